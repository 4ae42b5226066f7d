// The form: fields made from the lists in strategies.js, what they say as a request, and messages beside them.

import { Chat } from "./chat.js";
import { draw, find, make } from "./elements.js";
import { CONTROLS, EXAMPLES, MORE_CONTROLS, STRATEGIES } from "./strategies.js";

export class Form {
  constructor() {
    this.element = find("form");
    this.chat = new Chat(find("messages"), find("add-message"));
    this.prompt = find("prompt");
    this.theta = find("theta_prompt");
    this.fields = new Map();
    for (const [holder, controls] of [["controls", CONTROLS], ["more-controls", MORE_CONTROLS]]) {
      for (const control of controls) find(holder).append(this.#field(control));
    }
    find("strategies").append(...STRATEGIES.map((strategy) => this.#strategy(strategy)));
    find("examples").append(...EXAMPLES.map(([name, text]) => this.#example(name, text)));
    this.prompt.value = EXAMPLES[0][1];
    this.element.addEventListener("input", () => this.#changed());
    this.#tabs();
    this.choose("parallel");
  }

  get strategy() {
    return STRATEGIES.find((item) => item.id === this.element.elements.strategy.value);
  }

  get isChat() {
    return find("tab-chat").getAttribute("aria-selected") === "true";
  }

  /** The model that samples; a mixture has a second prompt. */
  use(model) {
    this.model = model;
    find("theta-field").hidden = !model?.mixture || this.isChat;
    find("prompt-label").textContent = model?.mixture ? "What the teacher sees" : "Prompt";
  }

  /** What is asked for, as the server wants it; null, with a message beside the field, where a number is none. */
  read() {
    this.forgive();
    const body = this.isChat ? { messages: this.chat.read() } : { prompt: this.prompt.value };
    if (this.model) body.model = this.model.id;
    if (this.model?.mixture && !this.isChat && this.theta.value) body.theta_prompt = this.theta.value;
    Object.assign(body, this.strategy.sends);
    let sound = true;
    for (const { control, input, holder } of this.fields.values()) {
      if (holder.hidden || (input.value === "" && !input.validity.badInput)) continue;
      const value = control.parse ? control.parse(input.value) : control.kind ? Number(input.value) : input.value;
      if (input.validity.badInput || Number.isNaN(value)) {
        this.complain(control.name, `${control.label} must be a number.`);
        sound = false;
      } else if (control.kind === "integer" && Math.abs(value) > Number.MAX_SAFE_INTEGER) {
        this.complain(control.name, `A page can send whole numbers up to ${Number.MAX_SAFE_INTEGER} exactly.`);
        sound = false;
      }
      body[control.name] = value;
    }
    return sound ? body : null;
  }

  /** Shows a message beside the field it is about, or on top where that is none of ours. */
  complain(param, message) {
    // Messages of the engine itself begin with the field's name.
    const name = String(param ?? message.match(/^[a-z_]+/)?.[0] ?? "").split(/[.[]/)[0].replace(/^logprobs$/, "top_logprobs");
    const holder = this.element.querySelector(`[data-field="${CSS.escape(name)}"]`);
    if (!name || !holder || holder.hidden) {
      find("general-error").textContent = message;
      find("general-error").hidden = false;
      find("general-error").scrollIntoView({ block: "nearest" });
      return;
    }
    const place = holder.querySelector(".message");
    place.id ||= `${name}-message`;
    place.textContent = message;
    place.hidden = false;
    holder.classList.add("refused");
    holder.closest("details")?.setAttribute("open", "");
    const input = holder.querySelector("textarea, select, input");
    input.setAttribute("aria-invalid", "true");
    input.setAttribute("aria-describedby", place.id);
    input.focus();
  }

  forgive() {
    for (const message of this.element.querySelectorAll(".message")) message.hidden = true;
    for (const holder of this.element.querySelectorAll(".refused")) holder.classList.remove("refused");
    for (const input of this.element.querySelectorAll("[aria-invalid]")) {
      input.removeAttribute("aria-invalid");
      input.removeAttribute("aria-describedby");
    }
  }

  choose(id) {
    this.element.elements.strategy.value = id;
    this.#changed();
  }

  show(tab) {
    for (const name of ["prompt", "chat"]) {
      find(`tab-${name}`).setAttribute("aria-selected", String(name === tab));
      find(`tab-${name}`).tabIndex = name === tab ? 0 : -1;
      find(`panel-${name}`).hidden = name !== tab;
    }
    this.use(this.model);
  }

  #changed() {
    find("strategy-hint").textContent = this.strategy.hint;
    for (const { control, holder } of this.fields.values()) holder.hidden = !control.for.includes(this.strategy.id);
    const changed = MORE_CONTROLS.filter(({ name, value }) => this.fields.get(name).input.value !== value).length;
    find("more-changed").textContent = changed ? `· ${changed} changed` : "";
  }

  #field(control) {
    const input = control.choices ? make("select") : make("input");
    for (const [value, text] of control.choices ?? []) input.append(new Option(text, value));
    if (!control.choices) input.type = control.kind ? "number" : "text";
    if (control.kind) input.step = control.kind === "integer" ? "1" : "0.1";
    input.name = control.name;
    input.id = `control-${control.name}`;
    input.value = control.value;
    input.autocomplete = "off";
    if (control.placeholder) input.placeholder = control.placeholder;
    const label = make("label", "", control.label);
    label.htmlFor = input.id;
    if (control.hint) label.title = input.title = control.hint;
    const message = make("p", "message");
    message.hidden = true;
    message.setAttribute("role", "alert");
    const holder = make("div", control.wide ? "field wide" : "field", label, input, message);
    holder.dataset.field = control.name;
    this.fields.set(control.name, { control, input, holder });
    return holder;
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
