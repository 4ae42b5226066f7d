// What could have stood in a token's place.

import { find, make } from "./elements.js";
import { percent, probability, signed, visible } from "./shade.js";
import { ownText } from "./token.js";

export class Alternatives {
  #anchor = null;

  constructor() {
    this.panel = find("alternatives");
    this.panel.addEventListener("toggle", (event) => {
      if (event.newState === "closed") this.#leave();
    });
    window.addEventListener("resize", () => this.close());
  }

  /** Opens beside the element, which keeps the focus: arrow keys go on to its neighbours. */
  open = (element, node) => {
    const again = this.#anchor === element;
    this.close();
    if (again) return;
    this.panel.replaceChildren(...this.#content(node));
    this.#anchor = element;
    element.setAttribute("aria-expanded", "true");
    this.panel.showPopover();
    this.#place(element);
    element.focus({ preventScroll: true });
  };

  close() {
    this.#leave();
    if (this.panel.matches(":popover-open")) this.panel.hidePopover();
  }

  #leave() {
    this.#anchor?.removeAttribute("aria-expanded");
    this.#anchor = null;
  }

  #content(node) {
    const rows = node.top ?? [];
    const list = make("ol", "");
    const chosen = rows.some((row) => row.token_id === node.token_id);
    for (const row of rows) list.append(line(row.token, row.logprob, row.token_id === node.token_id));
    if (!chosen) list.append(line(ownText(node), node.logprob, true));
    const rest = 1 - rows.reduce((sum, row) => sum + probability(row.logprob), 0);
    if (rest > 0.0005) {
      const other = make("li", "rest", make("span", "", "all others"), make("span", "share", percent(rest)));
      other.style.setProperty("--part", rest.toFixed(4));
      list.append(other);
    }
    const content = [
      make("h2", "", make("bdi", "", visible(ownText(node)))),
      make("p", "said", [
        percent(probability(node.logprob)),
        ...(node.rank ? [`rank ${node.rank}`] : []),
        `logprob ${node.logprob === null ? "−∞" : signed(node.logprob, 2)}`,
        `id ${node.token_id}`,
      ].join(" · ")),
      list,
    ];
    if (node.mixture) {
      const { alpha, kl_teacher: klTeacher, kl_theta: klTheta, logprob_teacher: teacher, logprob_theta: theta } = node.mixture;
      content.push(
        make("p", "note", `The teacher gave it ${percent(probability(teacher))}, the student ${percent(probability(theta))}.`),
        make("p", "note", `α ${alpha.toFixed(3)} · KL to teacher ${number(klTeacher)} · to student ${number(klTheta)}`));
    }
    if (node.finish_reason === "stop") content.push(make("p", "note", "This token ended the continuation."));
    return content;
  }

  #place(element) {
    const box = element.getClientRects()[0] ?? element.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.panel;
    const below = box.bottom + 8 + height <= window.innerHeight || box.top - 8 - height < 0;
    const style = this.panel.style;
    if (window.innerWidth <= 480) { // a sheet at the bottom, as the stylesheet says
      style.removeProperty("left");
      style.removeProperty("top");
      window.scrollBy({ top: Math.max(0, element.getBoundingClientRect().bottom + 12 - (window.innerHeight - height)) }); // not to hide its own token
      return;
    }
    style.left = `${Math.max(12, Math.min(window.innerWidth - width - 12, box.left - 12))}px`;
    style.top = `${Math.max(12, Math.min(window.innerHeight - height - 12, below ? box.bottom + 8 : box.top - height - 8))}px`;
  }
}

function line(piece, logprob, taken) {
  const part = probability(logprob);
  const item = make("li", taken ? "taken" : "", make("bdi", "piece", visible(piece)), make("span", "share", percent(part)));
  item.style.setProperty("--part", part.toFixed(4));
  if (taken) item.setAttribute("aria-current", "true");
  return item;
}

function number(value) {
  return value == null ? "–" : value.toFixed(3);
}
