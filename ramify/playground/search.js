// A search as its steps tell it. Every token is a node that knows the node before it, so columns and trees are one thing:
// a child is a chain, and beams are chains that share their beginning.

import { reachOf } from "./shade.js";

export class Search {
  constructor(request) {
    this.request = request;
    this.start = null; // the stream's first event
    this.end = null; // and its last
    this.tips = new Map(); // child -> its last node
    this.levels = []; // nodes by position
    this.standings = []; // where children are ranked: best first
    this.reach = reachOf([]); // of α's scale: how far from the middle it was
    this.isBeams = request.strategy === "beam_search";
  }

  /** Takes an event; returns the nodes that are new. */
  take(event) {
    if (event.type === "start") this.start = event;
    if (event.type === "end") this.end = event;
    return (event.steps ?? []).flatMap((step) => this.#grow(step));
  }

  /** Children in the order of their numbers. */
  children() {
    return [...this.tips.keys()].sort((one, other) => one - other);
  }

  standing(child) {
    return this.standings.find((item) => item.child === child);
  }

  #grow(step) {
    // Parents are named as they stood before the step: look all of them up before any child moves on.
    const nodes = step.tokens.map((token) => ({
      ...token,
      before: token.position === 0 ? null : this.tips.get(token.parent) ?? null,
    }));
    if (step.standings.length) this.standings = step.standings;
    const scores = new Map(this.standings.map((item) => [item.child, item]));
    for (const node of nodes) {
      node.score = scores.get(node.child)?.score ?? null;
      node.group = scores.get(node.child)?.group ?? 0;
      if (node.mixture) this.reach = Math.max(this.reach, reachOf([node.mixture.alpha]));
      this.tips.set(node.child, node);
      (this.levels[node.position] ??= []).push(node);
    }
    return nodes;
  }
}

/** The nodes from the first token to this one. */
export function path(node) {
  const nodes = [];
  for (let at = node; at; at = at.before) nodes.push(at);
  return nodes.reverse();
}

export function text(node) {
  return path(node).reduce(
    (sofar, item) => sofar.slice(0, sofar.length - item.num_taken_back) + item.text, "");
}

export function sumOfLogprobs(node) {
  return path(node).reduce((sum, item) => sum + item.logprob, 0);
}
