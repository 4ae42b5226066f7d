// A conversation that can be written turn by turn.

import { make } from "./elements.js";
import { ROLES } from "./settings.js";
import { FIRST_MESSAGE } from "./strategies.js";

export class Chat {
  constructor(holder, addButton) {
    this.holder = holder;
    addButton.addEventListener("click", () => {
      const last = [...holder.children].at(-1)?.dataset.role;
      this.add(last === "user" ? "assistant" : "user", "").querySelector("textarea").focus();
      this.#changed();
    });
    this.add("user", FIRST_MESSAGE);
  }

  add(role, content) {
    const choice = make("select");
    for (const name of ROLES) choice.append(new Option(name, name));
    choice.value = role;
    const text = make("textarea");
    text.rows = 2;
    text.dir = "auto";
    text.value = content;
    const remove = make("button", "remove", "Remove");
    remove.type = "button";
    const message = make("div", "chat-message", choice, remove, text);
    message.dataset.role = role;
    const name = () => {
      message.dataset.role = choice.value;
      choice.setAttribute("aria-label", "Role");
      text.setAttribute("aria-label", `Message of the ${choice.value}`);
      remove.setAttribute("aria-label", `Remove this message of the ${choice.value}`);
    };
    choice.addEventListener("change", name);
    name();
    remove.addEventListener("click", () => {
      message.remove();
      if (!this.holder.children.length) this.add("user", "");
      this.holder.querySelector("textarea").focus();
      this.#changed();
    });
    this.holder.append(message);
    return message;
  }

  read() {
    return [...this.holder.children].map((message) => ({
      role: message.querySelector("select").value,
      content: message.querySelector("textarea").value,
    }));
  }

  write(messages) {
    this.holder.replaceChildren();
    for (const { role, content } of messages) this.add(role, content);
    if (!messages.length) this.add("user", "");
  }

  /** Goes on with an answer: it becomes a turn, and the next one is the user's. */
  reply(answer) {
    this.add("assistant", answer);
    this.add("user", "").querySelector("textarea").focus();
    this.#changed();
  }

  #changed() {
    this.holder.dispatchEvent(new Event("input", { bubbles: true }));
  }
}
