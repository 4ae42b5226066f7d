// One token in running text: shaded, selectable by mouse and keyboard.

import { make } from "./elements.js";
import { isPart, percent, probability, shade, visible } from "./shade.js";

/** The element of a node. `open(element, node)` shows its alternatives. */
export function tokenElement(node, open) {
  const element = make("span", "token");
  write(element, shownText(node));
  element.setAttribute("role", "button");
  element.setAttribute("aria-haspopup", "dialog");
  element.setAttribute("aria-label", label(node));
  element.tabIndex = -1; // the column is one stop of the Tab key; arrows move inside it
  element.node = node;
  if (!node.text) element.classList.add("silent");
  if (!node.text && isPart(ownText(node))) element.classList.add("part");
  if (node.text.includes("\n")) element.classList.add("newline");
  shade(element, node);
  element.addEventListener("click", () => open(element, node));
  element.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      open(element, node);
    }
  });
  return element;
}

/** Fills a token's element; a space before the word stays outside of what is shaded. */
export function write(element, text) {
  const gap = text.match(/^ ?/)[0];
  element.replaceChildren(gap, make("span", "ink", text.slice(gap.length)));
}

/** What a screen reader says, and what a tree writes on its nodes. */
export function label(node) {
  const own = ownText(node).trim();
  return `${own === "" || isPart(own) ? visible(ownText(node)) : own}, ${percent(probability(node.logprob))}`;
}

/** A token's own spelling; its contribution to the text may be none yet, in the middle of a character. */
export function ownText(node) {
  return node.token ?? node.text;
}

function shownText(node) {
  if (node.text) return node.text;
  if (isPart(ownText(node))) return "·";
  return node.finish_reason === "stop" ? `${ownText(node) || "end"}` : ownText(node) || "·";
}
