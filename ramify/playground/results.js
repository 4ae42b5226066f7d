// The results of one search: what was asked, the legend, the cards and the tree. Whatever is shown follows from the Search,
// so one that has ended can be shown again.

import { Alternatives } from "./alternatives.js";
import { Asked } from "./asked.js";
import { Column } from "./columns.js";
import { find, make } from "./elements.js";
import { legend } from "./legend.js";
import { same } from "./settings.js";
import { Tree } from "./tree.js";

const MOST_THAT_APPEAR = 2_000; // tokens, each by an animation of its own
const ORDINALS = new Intl.PluralRules("en", { type: "ordinal" });

export class Results {
  #frame = 0; // of the screen, in which what came is drawn
  #scales = ""; // those that the legend and all charts have now

  /** `keepSeed(text)` and `reply(answer)` go to the form. */
  constructor({ keepSeed, reply }) {
    this.element = find("results");
    this.alternatives = new Alternatives();
    this.asked = new Asked(keepSeed);
    this.reply = reply;
    this.search = null;
    this.columns = new Map();
    this.tree = null;
    find("shade").addEventListener("change", () => this.#shade());
    this.#shade();
  }

  /** Makes room for a search that the server has taken, or shows one that has ended. */
  show(search) {
    this.alternatives.close();
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.search = search;
    this.columns = new Map();
    find("empty").hidden = true;
    find("toolbar").hidden = find("asked").hidden = find("legend").hidden = false;
    find("columns").replaceChildren();
    find("tree").hidden = !search.isBeams;
    if (search.isBeams) {
      const numGroups = search.request.num_beam_groups ?? 1;
      this.tree = new Tree({ open: this.alternatives.open, numGroups, fits: this.tree?.fits ?? false });
      find("tree").replaceChildren(this.tree.element);
    } else {
      for (let child = 0; child < search.start.num_children; child += 1) this.#column(child);
    }
    this.asked.show(search);
    this.#offerAlpha(search.mixture !== null);
    find("copy-python").hidden = search.mixture !== null && search.request.messages !== undefined; // a chat of two is the server's
    this.#say(`${counted(search.start.num_prompt_tokens, "prompt token")}, computed once for all.`);
    if (search.levels.length) this.draw();
    if (search.end) this.finish();
    else if (search.stopped) this.interrupt();
  }

  /** However fast events come, a screen shows so many pictures a second. */
  drawSoon() {
    this.#frame ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const { search } = this;
    this.element.classList.toggle("many", search.numTokens > MOST_THAT_APPEAR);
    const rescaled = this.#scales !== scalesOf(search);
    if (rescaled) this.#shade();
    if (search.isBeams) {
      this.tree.show(search);
      search.standings.slice(0, search.request.n).forEach((item, place) => {
        const column = this.#column(place);
        column.show(search.tips.get(item.child), search);
        column.rank("", { won: place === 0, score: item.score });
        column.element.classList.remove("lost");
        if ((search.request.num_beam_groups ?? 1) > 1) column.group(item.group);
      });
      return;
    }
    for (const [child, tip] of search.tips) {
      const column = this.#column(child);
      if (column.last !== tip || rescaled) column.show(tip, search);
    }
  }

  /** It has ended; what is ranked now stands in that order. */
  finish() {
    const { search } = this;
    const { outputs, usage } = search.end;
    const drawn = `${counted(usage.completion_tokens, "token")} ${search.isBeams ? "tried" : "drawn"}.`;
    if (!search.isBeams && search.standings.length) {
      search.standings.forEach((item, place) => {
        const column = this.#column(item.child);
        column.rank(ordinal(place), { won: place < outputs.length, score: item.score });
        find("columns").append(column.element);
      });
      this.#say(`: the best ${outputs.length} of ${search.standings.length} kept, ${drawn}`, "Done");
    } else {
      this.#say(`: ${counted(outputs.length, "continuation")}, ${drawn}`, "Done");
    }
    this.#settle();
  }

  /** It was stopped, or broke off: what came so far stays. */
  interrupt() {
    this.search.stopped = true;
    this.#settle();
    this.#say(". What came so far is kept.", "Stopped");
  }

  /** Dims what does not belong to the form any more. */
  compare(request) {
    if (this.search === null) return;
    const stale = !same(request, this.search.asked) && !same(request, this.search.request);
    this.element.classList.toggle("stale", stale);
    find("stale").hidden = !stale;
    this.asked.compare(request);
  }

  #settle() {
    for (const column of this.columns.values()) if (!column.element.dataset.finished) column.settle("abort");
  }

  #column(number) {
    if (!this.columns.has(number)) {
      const title = this.search.isBeams ? `Beam ${number + 1}` : `Sample ${number + 1}`;
      const column = new Column(title, { open: this.alternatives.open, reply: this.search.request.messages ? this.reply : null });
      this.columns.set(number, column);
      find("columns").append(column.element);
    }
    return this.columns.get(number);
  }

  #offerAlpha(offered) {
    const choice = find("shade");
    const option = choice.querySelector('[value="alpha"]');
    if (option.hidden !== !offered) {
      option.hidden = option.disabled = !offered;
      choice.value = offered ? "alpha" : "probability";
    }
    this.#shade();
  }

  #shade() {
    const by = find("shade").value;
    const { search } = this;
    this.element.classList.toggle("by-probability", by === "probability");
    this.element.classList.toggle("by-alpha", by === "alpha");
    this.element.classList.toggle("kl-coincide", search?.klCoincide ?? false);
    this.element.style.setProperty("--reach", search?.reach ?? 0.5);
    this.#scales = search ? scalesOf(search) : "";
    find("legend").replaceChildren(...legend(by, search));
  }

  /** A line above the continuations; its first word is strong. */
  #say(line, word = "") {
    find("summary").replaceChildren(...(word ? [make("strong", "", word)] : []), line);
  }
}

/** What all charts and the legend have in common. */
function scalesOf({ reach, klScale, klCoincide }) {
  return [reach, klScale, klCoincide].join();
}

function ordinal(place) {
  const number = place + 1;
  const suffix = { one: "st", two: "nd", few: "rd", other: "th" }[ORDINALS.select(number)];
  return `${number}${suffix}`;
}

function counted(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}
