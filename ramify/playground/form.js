// The form: what its fields say as settings and as a request, and messages beside them.

import { Chat } from "./chat.js";
import { draw, find, make } from "./elements.js";
import { fieldOf, leftEmpty } from "./fields.js";
import { inLabels, nameOfField } from "./labels.js";
import { defaultsOf, fitted, requestOf, strategyOf } from "./settings.js";
import { CONTROLS, EXAMPLES, MORE_CONTROLS, STRATEGIES } from "./strategies.js";

export class Form {
  /** `changed` is called after every change, by hand or not. */
  constructor(changed) {
    this.element = find("form");
    this.changed = changed;
    this.said = ""; // what was made to fit the strategy
    this.model = null;
    this.wantedModel = ""; // by settings that were restored before the models were known
    this.chat = new Chat(find("messages"), find("add-message"));
    this.prompt = find("prompt");
    this.theta = find("theta_prompt");
    this.fields = new Map([...CONTROLS, ...MORE_CONTROLS].map((control) => [control.name, fieldOf(control)]));
    find("controls").append(...CONTROLS.map(({ name }) => this.fields.get(name).holder));
    find("more-controls").append(...MORE_CONTROLS.map(({ name }) => this.fields.get(name).holder));
    find("strategies").append(...STRATEGIES.map((strategy) => this.#strategy(strategy)));
    find("examples").append(...EXAMPLES.map(([name, text]) => this.#example(name, text)));
    find("defaults-use").addEventListener("click", () => this.#takeDefaults());
    this.prompt.value = EXAMPLES[0][1];
    this.element.elements.strategy.value = "parallel";
    this.element.addEventListener("input", (event) => {
      if (event.target.name === "strategy") this.#fit();
      else this.said = "";
      this.#update();
    });
    this.#tabs();
    this.#update();
  }

  get isChat() {
    return find("tab-chat").getAttribute("aria-selected") === "true";
  }

  get settings() {
    return {
      kind: this.isChat ? "chat" : "prompt",
      prompt: this.prompt.value,
      theta_prompt: this.theta.value,
      messages: this.chat.read(),
      strategy: this.element.elements.strategy.value,
      model: this.model?.id ?? this.wantedModel,
      values: Object.fromEntries([...this.fields].map(([name, { input }]) => [name, input.value])),
    };
  }

  /** The request of the form as it stands, whatever may be wrong with it. */
  get request() {
    return requestOf(this.settings, this.model);
  }

  /** Shows settings that were kept or came with a link; the model is chosen by whoever knows which there are. */
  restore(settings) {
    this.forgive();
    this.said = "";
    this.prompt.value = settings.prompt || (settings.kind === "chat" ? this.prompt.value : "");
    this.theta.value = settings.theta_prompt;
    if (settings.kind === "chat" || settings.messages.length) this.chat.write(settings.messages);
    this.element.elements.strategy.value = settings.strategy;
    for (const [name, value] of Object.entries(settings.values)) this.fields.get(name).input.value = value;
    this.wantedModel = settings.model;
    this.show(settings.kind);
  }

  /** The model that samples; a mixture has a second prompt. */
  use(model) {
    this.model = model;
    if (model) this.wantedModel = model.id;
    this.#update();
  }

  /** The request, or null, with a message beside the field, where a number is none. */
  read() {
    this.forgive();
    let sound = true;
    for (const { control, input, holder } of this.fields.values()) {
      if (holder.hidden || !control.kind) continue;
      if (input.validity.badInput) {
        this.complain(control.name, `${control.name} must be a number`);
        sound = false;
      } else if (control.kind === "integer" && Math.abs(Number(input.value)) > Number.MAX_SAFE_INTEGER) {
        this.complain(control.name, `${control.name} must be at most ${Number.MAX_SAFE_INTEGER}: a page sends no larger whole number exactly`);
        sound = false;
      }
    }
    return sound ? this.request : null;
  }

  /** Shows a message, in the page's words, beside the field it is about, or on top where that is none of ours. */
  complain(param, message) {
    const name = nameOfField(param, message);
    const said = inLabels(message, (field) => this.#label(field));
    const holder = this.#holder(name);
    if (!holder || holder.closest("[hidden]")) {
      find("general-error").textContent = said;
      find("general-error").hidden = false;
      find("general-error").scrollIntoView({ block: "nearest" });
      return said;
    }
    const place = holder.querySelector(".message");
    place.id ||= `${name}-message`;
    place.textContent = said;
    place.hidden = false;
    holder.classList.add("refused");
    holder.closest("details")?.setAttribute("open", "");
    const input = holder.querySelector("textarea, select, input");
    input.setAttribute("aria-invalid", "true");
    input.setAttribute("aria-describedby", place.id);
    input.focus();
    return said;
  }

  forgive() {
    for (const message of this.element.querySelectorAll(".message")) message.hidden = true;
    for (const holder of this.element.querySelectorAll(".refused")) holder.classList.remove("refused");
    for (const input of this.element.querySelectorAll("[aria-invalid]")) {
      input.removeAttribute("aria-invalid");
      input.removeAttribute("aria-describedby");
    }
  }

  /** Puts a seed into its field; an empty text lets every run draw its own. */
  keepSeed(text) {
    this.fields.get("seed").input.value = text;
    this.#update();
  }

  show(tab) {
    for (const name of ["prompt", "chat"]) {
      find(`tab-${name}`).setAttribute("aria-selected", String(name === tab));
      find(`tab-${name}`).tabIndex = name === tab ? 0 : -1;
      find(`panel-${name}`).hidden = name !== tab;
    }
    this.#update();
  }

  #holder(name) {
    return this.element.querySelector(`[data-field="${CSS.escape(name)}"]`);
  }

  #label(name) {
    const holder = this.#holder(name);
    return holder?.dataset.label ?? holder?.querySelector("label, legend")?.textContent;
  }

  /** A strategy was chosen: values of the last one that it would refuse are made to fit. */
  #fit() {
    const { strategy, values } = this.settings;
    const { changes, said } = fitted(strategy, values);
    for (const [name, value] of Object.entries(changes)) this.fields.get(name).input.value = value;
    this.said = said;
  }

  #update() {
    const { id: chosen, hint, sends } = strategyOf(this.settings);
    find("strategy-hint").textContent = this.said ? `${hint} ${this.said}` : hint;
    find("theta-field").hidden = !this.model?.mixture || this.isChat;
    find("prompt-label").textContent = this.model?.mixture ? "What the teacher sees" : "Prompt";
    const defaults = sends.strategy === "beam_search" ? {} : defaultsOf(this.model);
    for (const field of this.fields.values()) {
      field.holder.hidden = !field.control.for.includes(chosen);
      leftEmpty(field, defaults[field.control.name]);
    }
    const recommended = Object.entries(defaults).map(([name, value]) => `${this.fields.get(name).control.label.toLowerCase()} ${value}`);
    find("model-defaults").hidden = recommended.length === 0;
    find("defaults-said").textContent = `The model’s defaults: ${recommended.join(", ")}.`;
    find("defaults-use").hidden = !Object.keys(defaults).some((name) => this.fields.get(name).input.value !== "");
    const changed = MORE_CONTROLS.filter(({ name, value }) => this.fields.get(name).input.value !== value).length;
    find("more-changed").textContent = changed ? `· ${changed} changed` : "";
    this.changed();
  }

  #takeDefaults() {
    for (const name of Object.keys(defaultsOf(this.model))) this.fields.get(name).input.value = "";
    this.fields.get("temperature").input.focus();
    this.#update();
  }

  #strategy({ id, name, icon }) {
    const input = make("input");
    input.type = "radio";
    input.name = "strategy";
    input.value = id;
    const paths = icon.map(([d, style]) => draw("path", { d, class: style ?? "" }));
    return make("label", "strategy", input,
      make("span", "", draw("svg", { viewBox: "0 0 30 22", "aria-hidden": "true" }, ...paths), name));
  }

  #example(name, text) {
    const button = make("button", "", name);
    button.type = "button";
    button.addEventListener("click", () => {
      this.prompt.value = text;
      this.prompt.focus();
      this.#update();
    });
    return button;
  }

  #tabs() {
    const tabs = [find("tab-prompt"), find("tab-chat")];
    tabs.forEach((tab, place) => {
      tab.addEventListener("click", () => this.show(place ? "chat" : "prompt"));
      tab.addEventListener("keydown", (event) => {
        if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
        this.show(place ? "prompt" : "chat");
        tabs[1 - place].focus();
      });
    });
  }
}
