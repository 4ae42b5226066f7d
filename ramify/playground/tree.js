// Beams as a tree that grows to the right: one level a step, the rows in the order of the cards, what was given up faded.

import { draw, make } from "./elements.js";
import { Overview } from "./overview.js";
import { ranksOf, rowsOf } from "./rows.js";
import { groupColour, percent, probability, shade, signed, visible } from "./shade.js";
import { label, ownText } from "./token.js";

const STEP = 104; // from level to level
const LANE = 36; // from row to row
const BOX = { width: 78, height: 24 };
const LEFT = 62;
const ROOT = { cx: 30, cy: 26, r: 7 }; // the prompt
const TOP = ROOT.cy;
const SCORE = 64; // room for a rank and a score behind the last level
const LEAST_ZOOM = 0.75; // by itself the tree shrinks this far before it scrolls

export class Tree {
  #drawn = new Map(); // node -> { group, edge, score } and where it stands: { row, rowBefore, rank }
  #size = { width: 0, height: 0 };
  #strokes = [];
  #room = 0; // the width there was when it was drawn last

  constructor({ open, numGroups, fits }) {
    this.open = open;
    this.edges = draw("g");
    this.nodes = draw("g");
    const root = draw("g", { class: "root" }, draw("circle", ROOT), text("prompt", { x: ROOT.cx, y: TOP + 20 }));
    this.svg = draw("svg", { role: "group", "aria-label": "Tree of beams. Arrow keys move, Enter shows alternatives." }, this.edges, root, this.nodes);
    this.scroll = make("div", "tree-scroll", this.svg);
    this.scroll.tabIndex = 0;
    this.scroll.setAttribute("role", "region");
    this.scroll.setAttribute("aria-label", "Tree of beams, scrolls");
    this.overview = new Overview(this.scroll);
    this.fit = make("button", "quiet small", "Fit to width");
    this.fit.type = "button";
    this.fit.addEventListener("click", () => this.#zoom(!this.fits));
    this.fit.setAttribute("aria-pressed", String(fits));
    this.said = make("span", "");
    const keys = make("span", "tree-keys");
    for (let group = 0; numGroups > 1 && group < numGroups; group += 1) {
      const key = make("span", "", `group ${group + 1}`);
      key.style.setProperty("--key", groupColour(group));
      keys.append(key);
    }
    this.element = make("div", "", make("div", "tree-head", make("h2", "", "Beams"), this.said, keys, this.fit), this.scroll, this.overview.element);
    this.nodes.addEventListener("keydown", (event) => this.#move(event));
    new ResizeObserver(() => {
      if (this.scroll.clientWidth !== this.#room) this.#zoom(this.fits);
    }).observe(this.scroll);
  }

  get fits() {
    return this.fit.getAttribute("aria-pressed") === "true";
  }

  /** Draws what is new, moves rows whose rank changed, and follows the newest level unless the reader looks back. */
  show(search) {
    const follows = this.scroll.scrollLeft + this.scroll.clientWidth >= this.scroll.scrollWidth - STEP;
    const ranks = ranksOf(search);
    const rows = rowsOf(search.levels, ranks);
    for (const [node, row] of rows) this.#place(node, row, rows.get(node.before) ?? 0);
    this.nodes.querySelector('[tabindex="0"]') ?? this.nodes.firstChild?.setAttribute("tabindex", "0");
    this.#mark(search, ranks);
    const mostRows = Math.max(1, ...search.levels.map((level) => level.length));
    this.#size = { width: LEFT + search.levels.length * STEP + SCORE, height: TOP + mostRows * LANE };
    this.#strokes = this.#lines();
    this.#zoom(this.fits);
    if (follows) this.scroll.scrollLeft = this.scroll.scrollWidth;
  }

  #place(node, row, rowBefore) {
    const item = this.#drawn.get(node) ?? this.#draw(node);
    if (item.row === row && item.rowBefore === rowBefore) return;
    item.row = row;
    item.rowBefore = rowBefore;
    const { x, xBefore } = placeOf(node);
    const [y, yBefore] = [TOP + row * LANE, TOP + rowBefore * LANE];
    const middle = (xBefore + x) / 2;
    item.edge.setAttribute("d", `M${xBefore} ${yBefore}C${middle} ${yBefore} ${middle} ${y} ${x} ${y}`);
    item.group.setAttribute("transform", `translate(${x} ${y})`);
  }

  #draw(node) {
    const edge = draw("path", { class: "edge" });
    const frame = { x: 0, y: -BOX.height / 2, ...BOX, rx: 7 };
    const score = text("", { x: BOX.width + 6, y: 0, class: "score" });
    const group = draw("g", { class: "node", role: "button", tabindex: "-1", "aria-haspopup": "dialog" },
      draw("title", {}, `${visible(ownText(node))}  ${percent(probability(node.logprob))}`),
      draw("rect", { ...frame, class: "frame" }), draw("rect", { ...frame, class: "tint" }),
      text(short(ownText(node)), { x: BOX.width / 2, y: 0 }), score);
    group.setAttribute("aria-label", `Step ${node.position + 1}: ${label(node)}`);
    if (node.finish_reason) group.classList.add("finished");
    for (const part of [edge, group]) part.style.setProperty("--group", groupColour(node.group));
    shade(group, node);
    group.node = node;
    group.addEventListener("click", () => { this.#stop(group); this.open(group, node); });
    this.edges.append(edge);
    this.nodes.append(group);
    const item = { group, edge, score, rank: null };
    this.#drawn.set(node, item);
    return item;
  }

  /** Living branches, the best one, the rest; at the end of a beam its place among the cards, and its score. */
  #mark(search, ranks) {
    for (const [node, item] of this.#drawn) {
      const rank = ranks.get(node);
      if (item.rank === rank) continue;
      item.rank = rank;
      for (const part of [item.group, item.edge]) {
        part.classList.toggle("dead", rank === undefined);
        part.classList.toggle("best", rank === 0);
      }
      if (!node.finish_reason) continue;
      const place = rank === undefined ? "" : `${rank + 1}: `;
      item.score.textContent = `${place}${node.finish_reason === "stop" ? "■ " : ""}${node.score === null ? "" : signed(node.score, 2)}`;
    }
    const running = search.standings.filter((item) => !item.finished).length;
    const finished = search.standings.length - running;
    this.said.textContent = search.end
      ? `${search.levels.length} steps, ${finished} finished`
      : `step ${search.levels.length}: ${running} running, ${finished} finished`;
  }

  /** The tree as a few strokes for the overview: those that were given up, then groups, then the best. */
  #lines() {
    const strokes = new Map();
    for (const [node, { row, rowBefore, rank }] of this.#drawn) {
      const style = rank === undefined ? "dead" : rank === 0 ? "best" : "alive";
      const { x, xBefore } = placeOf(node);
      const d = `M${xBefore} ${TOP + rowBefore * LANE}L${x} ${TOP + row * LANE}h${BOX.width}`;
      const key = `${style} ${node.group}`;
      strokes.set(key, { style, colour: groupColour(node.group), d: (strokes.get(key)?.d ?? "") + d });
    }
    const order = ["dead", "alive", "best"];
    return [...strokes.values()].sort((one, other) => order.indexOf(one.style) - order.indexOf(other.style));
  }

  /** All of the tree in the width there is, or as large as can be read, to be scrolled. */
  #zoom(fits) {
    const { width, height } = this.#size;
    if (!width || !this.scroll.clientWidth) return; // nothing yet, or nobody sees it
    this.#room = this.scroll.clientWidth;
    const style = getComputedStyle(this.scroll);
    const room = this.#room - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    const fitting = Math.min(1, room / width);
    const zoom = fits ? fitting : Math.max(LEAST_ZOOM, fitting);
    this.fit.setAttribute("aria-pressed", String(fits));
    this.fit.hidden = fitting >= LEAST_ZOOM;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("width", Math.floor(width * zoom));
    this.svg.setAttribute("height", Math.ceil(height * zoom));
    this.overview.show(this.#strokes, this.#size);
  }

  #stop(group) {
    for (const other of this.nodes.querySelectorAll('[tabindex="0"]')) other.setAttribute("tabindex", "-1");
    group.setAttribute("tabindex", "0");
  }

  /** Left to the parent, right to the best continuation, up and down among the rows of a step. */
  #move(event) {
    const here = event.target.node;
    if (!here) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.open(event.target, here);
      return;
    }
    if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
    const byRow = (one, other) => this.#drawn.get(one).row - this.#drawn.get(other).row;
    const level = [...this.#drawn.keys()].filter((node) => node.position === here.position).sort(byRow);
    const after = [...this.#drawn.keys()].filter((node) => node.before === here).sort(byRow);
    const target = {
      ArrowLeft: here.before,
      ArrowRight: after[0],
      ArrowUp: level[level.indexOf(here) - 1],
      ArrowDown: level[level.indexOf(here) + 1],
    }[event.key];
    if (!target) return;
    const { group } = this.#drawn.get(target);
    this.#stop(group);
    group.focus();
    group.scrollIntoView({ block: "nearest", inline: "nearest" });
    if (event.target.getAttribute("aria-expanded") === "true") this.open(group, target);
  }
}

/** Where a node's box begins, and where the edge that leads to it does. */
function placeOf(node) {
  const x = LEFT + node.position * STEP;
  return { x, xBefore: node.before ? x - STEP + BOX.width : ROOT.cx + ROOT.r };
}

function text(content, attributes) {
  return draw("text", attributes, content);
}

/** A token's text on a node. */
function short(piece) {
  const shown = piece.startsWith(" ") && piece.length > 1 ? piece.slice(1) : piece;
  const seen = shown.trim() === "" ? visible(shown) : shown.replaceAll("\n", "↵");
  const characters = [...seen];
  return characters.length > 10 ? `${characters.slice(0, 9).join("")}…` : seen;
}
