// α and both divergences over the tokens of one continuation; the legend above the cards says which line is which.

import { draw, make } from "./elements.js";

const WIDTH = 300;
const HEIGHT = 76;

export class Chart {
  constructor() {
    this.cursor = draw("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
    this.alpha = draw("polyline", { class: "alpha" });
    this.klTeacher = draw("polyline", { class: "kl-teacher" });
    this.klTheta = draw("polyline", { class: "kl-theta" });
    const lines = [0, 0.5, 1].map((share) => draw("line", { x1: 0, x2: WIDTH, y1: y(share), y2: y(share) }));
    this.svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      ...lines, this.klTeacher, this.klTheta, this.alpha, this.cursor);
    this.caption = make("figcaption");
    this.element = make("figure", "chart", this.svg, this.caption);
  }

  /** α from 0.5 − reach to 0.5 + reach, the divergences from 0 to their scale: the same in the charts of all cards. */
  show(nodes, { reach, klScale }) {
    this.count = nodes.length;
    const told = nodes.map((node) => node.mixture);
    const alphas = told.map((item) => item.alpha);
    const mean = alphas.reduce((sum, alpha) => sum + alpha, 0) / nodes.length;
    const share = (kl) => (klScale ? (kl ?? 0) / klScale : 0);
    this.#line(this.alpha, alphas.map((alpha) => (alpha - 0.5 + reach) / (2 * reach)));
    this.#line(this.klTeacher, told.map((item) => share(item.kl_teacher)));
    this.#line(this.klTheta, told.map((item) => share(item.kl_theta)));
    const largest = Math.max(...told.flatMap((item) => [item.kl_teacher ?? 0, item.kl_theta ?? 0]));
    const said = `mean α ${mean.toFixed(2)}, KL up to ${largest.toPrecision(2)}`;
    this.svg.setAttribute("aria-label", `α and both divergences over ${nodes.length} tokens: ${said} nats`);
    this.caption.textContent = said;
  }

  /** A line at one token, the one that has the focus. */
  mark(index) {
    this.cursor.setAttribute("visibility", index < 0 ? "hidden" : "visible");
    this.cursor.setAttribute("x1", this.#x(index));
    this.cursor.setAttribute("x2", this.#x(index));
  }

  #line(polyline, values) {
    polyline.setAttribute("points", values.map((value, index) => `${this.#x(index)},${y(value)}`).join(" "));
  }

  #x(index) {
    return ((index + 0.5) * WIDTH / this.count).toFixed(1);
  }
}

function y(share) {
  return (HEIGHT - 3 - share * (HEIGHT - 6)).toFixed(1);
}
