// What a result was asked: its prompt or conversation, its settings in a few words, and its seed.

import { find, make } from "./elements.js";
import { described } from "./settings.js";

export class Asked {
  /** `keepSeed(text)` puts a seed into the form, or an empty text. */
  constructor(keepSeed) {
    this.search = null;
    find("asked-more").addEventListener("click", () => this.#unfold(find("asked-more").getAttribute("aria-expanded") === "false"));
    find("seed-keep").addEventListener("click", () => keepSeed(find("seed-keep").getAttribute("aria-pressed") === "true" ? "" : String(this.search.request.seed)));
    new ResizeObserver(() => this.#measure()).observe(find("asked-text"));
  }

  show(search) {
    this.search = search;
    const { request, settings } = search;
    find("asked-text").replaceChildren(...said(request));
    find("asked-words").textContent = described(settings, request);
    find("seed-drawn").hidden = request.seed === undefined;
    find("seed-number").textContent = String(request.seed ?? "");
    this.#unfold(false);
  }

  /** Whether the form has this seed already. */
  compare(request) {
    find("seed-keep").setAttribute("aria-pressed", String(request.seed !== undefined && request.seed === this.search?.request.seed));
  }

  #unfold(open) {
    find("asked-text").classList.toggle("folded", !open);
    find("asked-more").setAttribute("aria-expanded", String(open));
    find("asked-more").textContent = open ? "Show less" : "Show all";
    this.#measure();
  }

  #measure() {
    const text = find("asked-text");
    const isCut = (element) => element.scrollHeight > element.clientHeight + 1;
    if (text.classList.contains("folded")) find("asked-more").hidden = ![text, ...text.children].some(isCut);
  }
}

function said({ prompt, messages, theta_prompt: theta }) {
  if (messages) return messages.map(({ role, content }) => line(role, content));
  return theta === undefined ? [line("Prompt", prompt)] : [line("Teacher sees", prompt), line("Student sees", theta)];
}

function line(name, content) {
  return make("p", "", make("span", "asked-name", name), " ", make("bdi", "asked-content", content));
}
