// The runs of this browser: settings and the first words of what came, the latest first. Results themselves stay with the page.

import { find, make } from "./elements.js";
import { described, sound } from "./settings.js";
import { keep, kept, thisBrowser } from "./storage.js";

const PLACE = "ramify-runs";
const MOST_RUNS = 30;
const MOST_TOKENS_SHOWN_AGAIN = 20_000; // of searches that this page still has whole
const LONGEST_SAID = 160;
const TIME = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

export class History {
  #searches = new Map(); // a run's id -> its search, the latest last

  /** `choose(settings, search)` is called for the run that was chosen; its search is null where the page no longer has it. */
  constructor(choose) {
    this.choose = choose;
    this.dialog = find("history-dialog");
    find("history-open").addEventListener("click", () => this.open());
    find("history-close").addEventListener("click", () => this.dialog.close());
    find("history-clear").addEventListener("click", () => this.#clear());
  }

  /** Adds a search that has ended, one way or another, or is about to; once. `settings` have nothing left open. */
  add(search, settings) {
    const run = {
      id: search.start.id,
      time: Date.now(),
      settings,
      words: described(search.settings, search.request),
      said: [...search.firstText.trim()].slice(0, LONGEST_SAID).join(""),
    };
    const runs = [run, ...this.#runs().filter(({ id }) => id !== run.id)].slice(0, MOST_RUNS);
    // A long prompt may fill what the browser gives one page: older runs make room.
    while (runs.length && !keep(thisBrowser, PLACE, runs)) runs.pop();
    this.#searches.set(run.id, search);
    let tokens = [...this.#searches.values()].reduce((sum, item) => sum + item.numTokens, 0);
    for (const [id, item] of this.#searches) {
      if (tokens <= MOST_TOKENS_SHOWN_AGAIN) break;
      tokens -= item.numTokens;
      this.#searches.delete(id);
    }
  }

  open() {
    this.#list();
    this.dialog.showModal();
  }

  /** Read each time: other tabs write there too. */
  #runs() {
    const runs = kept(thisBrowser, PLACE);
    if (!Array.isArray(runs)) return [];
    return runs.filter((run) => run && Number.isFinite(run.time) && sound(run.settings)).slice(0, MOST_RUNS);
  }

  #list() {
    const runs = this.#runs();
    find("history-clear").hidden = runs.length === 0;
    find("history-empty").hidden = runs.length > 0;
    find("history-runs").replaceChildren(...runs.map((run) => make("li", "", this.#row(run))));
  }

  #row(run) {
    const settings = sound(run.settings);
    const asked = settings.kind === "chat" ? settings.messages.at(-1)?.content ?? "" : settings.prompt;
    const seed = settings.values.seed ? ` · seed ${settings.values.seed}` : "";
    const search = this.#searches.get(run.id) ?? null;
    const button = make("button", "run",
      make("span", "run-asked", make("bdi", "", asked.trim() || "(an empty prompt)")),
      make("span", "run-said", make("bdi", "", String(run.said ?? ""))),
      make("span", "run-words", `${TIME.format(run.time)} · ${settings.model ? `${settings.model} · ` : ""}${String(run.words ?? "")}${seed}`));
    button.type = "button";
    button.title = search ? "Show it again, with its settings" : "Take its settings: the same seed gives the same texts";
    button.addEventListener("click", () => {
      this.dialog.close();
      this.choose(settings, search);
    });
    return button;
  }

  #clear() {
    keep(thisBrowser, PLACE, undefined);
    this.#searches.clear();
    this.#list();
    find("history-close").focus();
  }
}
