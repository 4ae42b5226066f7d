// The API key: asked for when the server wants one, kept until the tab is closed.

import { find } from "./elements.js";
import { keep, kept, thisTab } from "./storage.js";

const PLACE = "ramify-api-key";

export class ApiKey {
  #answer = null;

  constructor() {
    this.value = kept(thisTab, PLACE) ?? "";
    this.dialog = find("key-dialog");
    this.input = find("api-key");
    find("key-cancel").addEventListener("click", () => this.dialog.close());
    find("key-form").addEventListener("submit", () => this.#use(this.input.value.trim()));
    this.input.addEventListener("input", () => this.#complain(""));
    this.dialog.addEventListener("close", () => this.#settle(false));
  }

  /** Whether a key was given. The dialog starts clean: a key that was refused is forgotten, and said to be. */
  ask({ refused = false } = {}) {
    find("key-open").hidden = false;
    const wrong = refused && this.value !== "";
    if (wrong) this.#remember("");
    this.#complain(wrong ? "The server did not accept that key. Check it and write it again." : "");
    this.input.value = "";
    if (!this.dialog.open) this.dialog.showModal();
    this.input.focus();
    return new Promise((resolve) => { this.#answer = resolve; });
  }

  #complain(message) {
    find("key-error").textContent = message;
    find("key-error").hidden = !message;
    if (message) this.input.setAttribute("aria-invalid", "true");
    else this.input.removeAttribute("aria-invalid");
  }

  #use(value) {
    if (value) this.#remember(value);
    this.#settle(value !== "");
  }

  #remember(value) {
    this.value = value;
    keep(thisTab, PLACE, value || undefined);
  }

  #settle(given) {
    this.#answer?.(given);
    this.#answer = null;
  }
}
