// Beams as a tree that grows to the right: one level a step, every living beam a node, what was given up fades.

import { draw, make } from "./elements.js";
import { percent, shade, signed, visible } from "./shade.js";
import { path } from "./search.js";
import { label, ownText } from "./token.js";

const STEP = 104; // from level to level
const LANE = 36; // from beam to beam
const BOX = { width: 78, height: 24 };
const LEFT = 62;

export class Tree {
  #drawn = new Map(); // node -> { group, edge, y }
  #lanes = 1;

  constructor({ open, numGroups }) {
    this.open = open;
    this.edges = draw("g");
    this.nodes = draw("g");
    this.root = draw("g", { class: "root" }, draw("circle", { cx: 30, cy: 0, r: 7 }), text("prompt", { x: 30, y: 20 }));
    this.all = draw("g", {}, this.edges, this.root, this.nodes);
    this.svg = draw("svg", { role: "group", "aria-label": "Tree of beams. Arrow keys move, Enter shows alternatives." }, this.all);
    this.scroll = make("div", "tree-scroll", this.svg);
    this.scroll.tabIndex = 0;
    this.scroll.setAttribute("role", "region");
    this.scroll.setAttribute("aria-label", "Tree of beams, scrolls");
    this.said = make("span", "");
    const keys = make("span", "tree-keys");
    for (let group = 0; numGroups > 1 && group < numGroups; group += 1) {
      const key = make("span", "", `group ${group + 1}`);
      key.style.setProperty("--key", colour(group));
      keys.append(key);
    }
    this.element = make("div", "", make("div", "tree-head", make("h2", "", "Beams"), this.said, keys), this.scroll);
    this.nodes.addEventListener("keydown", (event) => this.#move(event));
    this.#resize(0);
  }

  /** Draws what is new, fades what was given up, and follows the newest level unless the reader looks back. */
  show(search) {
    const follows = this.scroll.scrollLeft + this.scroll.clientWidth >= this.scroll.scrollWidth - STEP;
    for (let level = 0; level < search.levels.length; level += 1) {
      const fresh = search.levels[level].filter((node) => !this.#drawn.has(node));
      if (fresh.length) this.#drawLevel(level, fresh);
    }
    this.#resize(search.levels.length);
    this.#mark(search);
    if (follows) this.scroll.scrollLeft = this.scroll.scrollWidth;
  }

  #drawLevel(level, nodes) {
    // Near their parents, best first: few edges cross.
    const above = (node) => (node.before ? this.#drawn.get(node.before).y : 0);
    nodes.sort((one, other) => above(one) - above(other) || (other.score ?? 0) - (one.score ?? 0));
    this.#lanes = Math.max(this.#lanes, nodes.length);
    nodes.forEach((node, place) => {
      const y = (place - (nodes.length - 1) / 2) * LANE;
      const x = LEFT + level * STEP;
      const from = node.before
        ? { x: LEFT + (level - 1) * STEP + BOX.width, y: above(node) }
        : { x: 37, y: 0 };
      const middle = (from.x + x) / 2;
      const edge = draw("path", { class: "edge", d: `M${from.x} ${from.y}C${middle} ${from.y} ${middle} ${y} ${x} ${y}` });
      const group = this.#box(node, x, y);
      for (const part of [edge, group]) part.style.setProperty("--group", colour(node.group));
      this.edges.append(edge);
      this.nodes.append(group);
      this.#drawn.set(node, { group, edge, y });
    });
    if (level === 0) this.nodes.firstChild.setAttribute("tabindex", "0");
  }

  #box(node, x, y) {
    const frame = { x, y: y - BOX.height / 2, ...BOX, rx: 7 };
    const group = draw("g", { class: "node", role: "button", tabindex: "-1", "aria-haspopup": "dialog" },
      draw("rect", { ...frame, class: "frame" }), draw("rect", { ...frame, class: "tint" }),
      text(short(ownText(node)), { x: x + BOX.width / 2, y }));
    group.setAttribute("aria-label", `Step ${node.position + 1}: ${label(node)}`);
    group.append(draw("title", {}, `${visible(ownText(node))}  ${percent(Math.exp(node.logprob))}`));
    if (node.finish_reason) {
      group.classList.add("finished");
      const score = node.score === null ? "" : signed(node.score, 2);
      group.append(text(`${node.finish_reason === "stop" ? "■ " : ""}${score}`, { x: x + BOX.width + 6, y, class: "score" }));
    }
    shade(group, node);
    group.node = node;
    group.addEventListener("click", () => { this.#stop(group); this.open(group, node); });
    return group;
  }

  /** Living branches, the best one, and the rest. */
  #mark(search) {
    const alive = new Set(search.standings.flatMap((item) => path(search.tips.get(item.child))));
    const best = new Set(search.standings.length ? path(search.tips.get(search.standings[0].child)) : []);
    for (const [node, { group, edge }] of this.#drawn) {
      for (const part of [group, edge]) {
        part.classList.toggle("dead", !alive.has(node));
        part.classList.toggle("best", best.has(node));
      }
    }
    const running = search.standings.filter((item) => !item.finished).length;
    const finished = search.standings.length - running;
    this.said.textContent = search.end
      ? `${search.levels.length} steps, ${finished} finished`
      : `step ${search.levels.length}: ${running} running, ${finished} finished`;
  }

  #resize(levels) {
    const width = LEFT + Math.max(1, levels) * STEP + 32; // and a score
    const height = this.#lanes * LANE + 32;
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", height);
    this.all.setAttribute("transform", `translate(0 ${height / 2})`);
  }

  #stop(group) {
    for (const other of this.nodes.querySelectorAll('[tabindex="0"]')) other.setAttribute("tabindex", "-1");
    group.setAttribute("tabindex", "0");
  }

  /** Left to the parent, right to the best continuation, up and down among the beams of a step. */
  #move(event) {
    const here = event.target.node;
    if (!here) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.open(event.target, here);
      return;
    }
    const level = [...this.#drawn.keys()].filter((node) => node.position === here.position);
    const after = [...this.#drawn.keys()].filter((node) => node.before === here);
    const target = {
      ArrowLeft: here.before,
      ArrowRight: after.sort((one, other) => (other.score ?? 0) - (one.score ?? 0))[0],
      ArrowUp: level[level.indexOf(here) - 1],
      ArrowDown: level[level.indexOf(here) + 1],
    }[event.key];
    if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
    if (!target) return;
    const { group } = this.#drawn.get(target);
    this.#stop(group);
    group.focus();
    group.scrollIntoView({ block: "nearest", inline: "nearest" });
    if (event.target.getAttribute("aria-expanded") === "true") this.open(group, target);
  }
}

function colour(group) {
  return `var(--group-${group % 8})`;
}

function text(content, attributes) {
  return draw("text", attributes, content);
}

/** A token's text on a node. */
function short(piece) {
  const shown = piece.startsWith(" ") && piece.length > 1 ? piece.slice(1) : piece;
  const seen = shown.trim() === "" ? visible(shown) : shown.replaceAll("\n", "↵");
  return seen.length > 10 ? `${seen.slice(0, 9)}…` : seen;
}
