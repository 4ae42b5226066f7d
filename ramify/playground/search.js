// A search as its steps tell it. Every token is a node that knows the node before it, so columns and trees are one thing:
// a child is a chain, and beams are chains that share their beginning.

import { reachOf, roundUp } from "./shade.js";

export class Search {
  /** `settings` are those of the form, `asked` is their request, and `request` the one that was sent: with a seed. */
  constructor(settings, asked, request, mixture) {
    this.settings = settings;
    this.asked = asked;
    this.request = request;
    this.mixture = mixture; // the names of the two models, or null for one
    this.start = null; // the stream's first event
    this.end = null; // and its last
    this.stopped = false; // before that
    this.tips = new Map(); // child -> its last node
    this.levels = []; // nodes by position
    this.standings = []; // where children are ranked: best first
    this.numTokens = 0;
    this.reach = reachOf([]); // of α's scale: how far from the middle it was
    this.largestKl = 0; // of both divergences, over all tokens
    this.klGap = 0; // how far the two were apart where they were farthest
    this.isBeams = request.strategy === "beam_search";
  }

  /** Takes an event; returns the nodes that are new. */
  take(event) {
    if (event.type === "start") this.start = event;
    if (event.type === "end") this.end = event;
    return (event.steps ?? []).flatMap((step) => this.#grow(step));
  }

  /** One scale for all charts: divergences from 0 to this, in nats; 0 where the models never differed. */
  get klScale() {
    return roundUp(this.largestKl);
  }

  /** Whether the two divergences are one line to the eye. */
  get klCoincide() {
    return this.klGap <= 0.01 * this.klScale;
  }

  /** The text that counts most: the best one, or the first. */
  get firstText() {
    const tip = this.standings.length ? this.tips.get(this.standings[0].child) : this.tips.get(0);
    return tip ? text(tip) : "";
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
      if (node.mixture) this.#measure(node.mixture);
      this.numTokens += 1;
      this.tips.set(node.child, node);
      (this.levels[node.position] ??= []).push(node);
    }
    return nodes;
  }

  #measure({ alpha, kl_teacher: klTeacher, kl_theta: klTheta }) {
    this.reach = Math.max(this.reach, reachOf([alpha]));
    this.largestKl = Math.max(this.largestKl, klTeacher ?? 0, klTheta ?? 0);
    this.klGap = Math.max(this.klGap, Math.abs((klTeacher ?? 0) - (klTheta ?? 0)));
  }
}

/** The nodes from the first token to this one. */
export function path(node) {
  const nodes = [];
  for (let at = node; at; at = at.before) nodes.push(at);
  return nodes.reverse();
}

export function text(node) {
  return path(node).reduce((sofar, item) => withoutLast(sofar, item.num_taken_back) + item.text, "");
}

/** A text without so many of its last characters, as the server counts them: an emoji is one, and two of JavaScript's. */
export function withoutLast(text, count) {
  return count ? [...text].slice(0, -count).join("") : text;
}

export function sumOfLogprobs(node) {
  return path(node).reduce((sum, item) => sum + item.logprob, 0);
}
