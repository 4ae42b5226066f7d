// Continuations side by side, one card each.

import { Chart } from "./chart.js";
import { make } from "./elements.js";
import { groupColour, signed } from "./shade.js";
import { path, sumOfLogprobs, text, withoutLast } from "./search.js";
import { tokenElement, write } from "./token.js";

const ENDS = { stop: "ended", length: "max tokens", abort: "stopped", error: "failed" };

export class Column {
  #nodes = [];
  #chart = null;

  constructor(title, { open, reply }) {
    this.open = open;
    this.title = make("h2", "", title);
    this.badge = make("span", "badge");
    this.badge.hidden = true;
    this.groupName = make("span", "group-name");
    this.groupName.hidden = true;
    this.state = make("span", "state", "waiting");
    this.tokens = make("div", "tokens");
    this.tokens.dir = "auto"; // as the text itself runs
    this.tokens.setAttribute("role", "group");
    this.tokens.setAttribute("aria-label", `${title}: tokens. Arrow keys move, Enter shows alternatives.`);
    this.facts = make("div", "facts");
    this.element = make("article", "column", make("header", "", this.title, this.badge, this.groupName, this.state), this.tokens, this.facts);
    this.element.setAttribute("aria-label", title);
    this.tokens.addEventListener("keydown", (event) => this.#move(event));
    this.tokens.addEventListener("focusin", (event) => this.#focused(event.target));
    if (reply) {
      this.replyButton = make("button", "quiet small reply", "Reply to this");
      this.replyButton.type = "button";
      this.replyButton.addEventListener("click", () => reply(text(this.#nodes.at(-1))));
    }
  }

  get last() {
    return this.#nodes.at(-1) ?? null;
  }

  /** Shows the chain that ends at this node; what it shares with the chain before is left as it stands. */
  show(tip, search) {
    const nodes = path(tip);
    let shared = 0;
    while (shared < nodes.length && nodes[shared] === this.#nodes[shared]) shared += 1;
    while (this.tokens.children.length > shared) this.tokens.lastChild.remove();
    for (const node of nodes.slice(shared)) {
      this.#takeBack(node.num_taken_back);
      const element = tokenElement(node, this.open);
      this.tokens.append(element);
    }
    this.#nodes = nodes;
    if (this.tokens.firstChild && !this.tokens.querySelector('[tabindex="0"]')) this.tokens.firstChild.tabIndex = 0;
    this.#showChart(search);
    this.settle(tip.finish_reason);
  }

  /** Says whether it still grows, or how it ended. */
  settle(reason) {
    this.element.classList.toggle("running", reason === null);
    this.element.dataset.finished = reason ?? "";
    this.state.textContent = reason === null ? "writing" : ENDS[reason] ?? reason;
    this.#showFacts();
  }

  rank(place, { won, score }) {
    this.badge.hidden = place === "";
    this.badge.textContent = place;
    this.element.classList.toggle("won", won);
    this.element.classList.toggle("lost", !won);
    this.score = score;
    this.#showFacts();
  }

  /** Which group of beams it belongs to, in the tree's colour. */
  group(number) {
    this.groupName.hidden = false;
    this.groupName.textContent = `group ${number + 1}`;
    this.element.classList.add("grouped");
    this.element.style.setProperty("--group", groupColour(number));
  }

  #showFacts() {
    const sum = this.last ? sumOfLogprobs(this.last) : 0;
    const count = this.#nodes.length;
    const facts = [fact("tokens", String(count)), fact("logprob", signed(sum, 1))];
    if (count) facts.push(fact("perplexity", Math.exp(-sum / count).toFixed(1)));
    if (this.score !== undefined) facts.push(fact("score", this.score === null ? "last" : signed(this.score, 2)));
    this.facts.replaceChildren(...facts);
    if (this.replyButton && this.last && this.element.dataset.finished) this.facts.append(this.replyButton);
  }

  #showChart(scales) {
    if (!this.last?.mixture) return;
    if (!this.#chart) {
      this.#chart = new Chart();
      this.tokens.before(this.#chart.element);
    }
    this.#chart.show(this.#nodes, scales);
  }

  /** A stop string began in what was shown already: that much goes. */
  #takeBack(count) {
    for (let element = this.tokens.lastElementChild; element && count > 0; element = element.previousElementSibling) {
      if (element.classList.contains("silent")) continue;
      const shown = element.textContent;
      write(element, withoutLast(shown, count));
      count -= [...shown].length - [...element.textContent].length;
    }
  }

  get #runsLeft() {
    return getComputedStyle(this.tokens).direction === "rtl";
  }

  #focused(element) {
    for (const other of this.tokens.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
    element.tabIndex = 0;
    this.#chart?.mark(this.#nodes.indexOf(element.node));
  }

  #move(event) {
    const items = [...this.tokens.children];
    const at = items.indexOf(document.activeElement);
    const right = this.#runsLeft ? -1 : 1;
    const target = { ArrowRight: at + right, ArrowLeft: at - right, ArrowDown: at + 8, ArrowUp: at - 8, Home: 0, End: items.length - 1 }[event.key];
    if (at < 0 || target === undefined) return;
    event.preventDefault();
    const element = items[Math.max(0, Math.min(items.length - 1, target))];
    element.focus();
    if (items[at].getAttribute("aria-expanded") === "true") this.open(element, element.node);
  }
}

function fact(name, value) {
  return make("span", "", `${name} `, make("b", "", value));
}
