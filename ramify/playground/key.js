// The API key: asked for when the server wants one, kept until the tab is closed.

import { find } from "./elements.js";

const PLACE = "ramify-api-key";

export class ApiKey {
  #answer = null;

  constructor() {
    this.value = sessionStorage.getItem(PLACE) ?? "";
    this.dialog = find("key-dialog");
    this.input = find("api-key");
    find("key-cancel").addEventListener("click", () => this.dialog.close());
    find("key-form").addEventListener("submit", () => this.#use(this.input.value.trim()));
    this.dialog.addEventListener("close", () => this.#settle(false));
  }

  /** Whether a key was given. `message` says what was wrong with the last one. */
  ask(message = "") {
    find("key-open").hidden = false;
    find("key-error").textContent = message;
    find("key-error").hidden = !message;
    this.input.value = this.value;
    if (!this.dialog.open) this.dialog.showModal();
    this.input.focus();
    return new Promise((resolve) => { this.#answer = resolve; });
  }

  #use(value) {
    this.value = value;
    sessionStorage.setItem(PLACE, value);
    this.#settle(value !== "");
  }

  #settle(given) {
    this.#answer?.(given);
    this.#answer = null;
  }
}
