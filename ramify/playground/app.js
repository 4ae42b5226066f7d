// The page: a form, a stream, and the views that draw what comes.

import { Alternatives } from "./alternatives.js";
import { Column } from "./columns.js";
import { find } from "./elements.js";
import { Form } from "./form.js";
import { ApiKey } from "./key.js";
import { Search } from "./search.js";
import { legend } from "./shade.js";
import { curl, python } from "./snippets.js";
import { events, models, Refusal, ServerGone } from "./stream.js";
import { startTheme } from "./theme.js";
import { Tree } from "./tree.js";

const ORDINALS = new Intl.PluralRules("en", { type: "ordinal" });

class Page {
  #frame = 0; // of the screen, in which what came is drawn

  constructor() {
    this.form = new Form();
    this.key = new ApiKey();
    this.alternatives = new Alternatives();
    this.models = [];
    this.running = null; // what stops the search under way
    this.results = find("results");
    startTheme(find("theme"));
    find("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    find("stop").addEventListener("click", () => this.running?.abort());
    find("key-open").addEventListener("click", async () => {
      if (await this.key.ask()) this.#loadModels();
    });
    find("model").addEventListener("change", () => this.#chooseModel());
    find("shade").addEventListener("change", () => this.#shade());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !this.running && !document.querySelector("dialog[open]")) this.run();
      if (event.key === "Escape" && this.running && !document.querySelector("dialog[open], :popover-open")) this.running.abort();
    });
    this.#code("copy-python", "Python", () => python(this.search.request, this.#mixtureOf(this.search.request)));
    this.#code("copy-curl", "curl", () => curl(this.search.request, location.origin, this.key.value !== ""));
    this.#shade();
    this.#loadModels();
  }

  // -- one search ------------------------------------------------------------------------------------------

  async run() {
    this.running?.abort();
    const request = this.form.read();
    if (request === null) return;
    const running = this.running = new AbortController();
    this.#begin(request);
    try {
      for await (const event of events(request, { key: this.key.value, signal: running.signal })) {
        this.search.take(event);
        if (event.type === "start") this.#start();
        else this.#drawSoon();
      }
      this.#drawNow();
      this.#finish();
    } catch (error) {
      if (this.search.start) this.#drawNow();
      this.#interrupted(error);
    } finally {
      if (this.running === running) {
        this.running = null;
        this.#swap("stop", "run");
      }
    }
  }

  #begin(request) {
    this.alternatives.close();
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.search = new Search(request);
    this.columns = new Map();
    this.tree = null;
    this.#swap("run", "stop");
  }

  /** One button takes the other's place, and its focus if it had it. */
  #swap(from, to) {
    const focused = document.activeElement === find(from);
    find(to).hidden = false;
    if (focused) find(to).focus({ preventScroll: true });
    find(from).hidden = true;
  }

  /** The server took it: only now does what was there before make room. */
  #start() {
    const { search } = this;
    find("empty").hidden = true;
    find("toolbar").hidden = false;
    find("columns").replaceChildren();
    find("tree").replaceChildren();
    find("tree").hidden = !search.isBeams;
    if (search.isBeams) {
      this.tree = new Tree({ open: this.alternatives.open, numGroups: search.request.num_beam_groups ?? 1 });
      find("tree").append(this.tree.element);
    } else {
      for (let child = 0; child < search.start.num_children; child += 1) this.#column(child);
    }
    const mixture = this.#mixtureOf(search.request);
    this.#offerAlpha(mixture !== null);
    find("copy-python").hidden = mixture !== null && search.request.messages !== undefined; // a chat of two is the server's
    this.#say(`${counted(search.start.num_prompt_tokens, "prompt token")}, computed once for all.`, "Sampling has begun.");
    if (matchMedia("(max-width: 960px)").matches) this.results.scrollIntoView();
  }

  /** However fast events come, a screen shows so many pictures a second. */
  #drawSoon() {
    this.#frame ||= requestAnimationFrame(() => this.#drawNow());
  }

  #drawNow() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const { search } = this;
    const rescaled = this.reach !== search.reach;
    if (rescaled) this.#shade();
    if (search.isBeams) {
      this.tree.show(search);
      search.standings.slice(0, search.request.n).forEach((item, place) => {
        const column = this.#column(place);
        column.show(search.tips.get(item.child), search.reach);
        column.rank("", { won: place === 0, score: item.score });
        column.element.classList.remove("lost");
      });
      return;
    }
    for (const [child, tip] of search.tips) {
      const column = this.#column(child);
      if (column.last !== tip || rescaled) column.show(tip, search.reach);
    }
  }

  #finish() {
    const { search } = this;
    const { outputs, usage, error } = search.end;
    if (error) this.form.complain(null, error);
    if (!search.isBeams && search.standings.length) {
      const kept = outputs.length;
      search.standings.forEach((item, place) => {
        this.#column(item.child).rank(ordinal(place), { won: place < kept, score: item.score });
      });
      const [best] = search.standings;
      this.#say(`Best: <Sample ${best.child + 1}>. ${kept} of ${search.standings.length} kept, ${counted(usage.completion_tokens, "token")} drawn.`, "Sampling has ended.");
    } else {
      this.#say(`<${search.isBeams ? "Search" : "Sampling"} over>: ${counted(outputs.length, "continuation")}, ${counted(usage.completion_tokens, "token")} drawn.`, "Sampling has ended.");
    }
    for (const column of this.columns.values()) if (!column.element.dataset.finished) column.settle("abort");
  }

  #interrupted(error) {
    for (const column of this.columns.values()) if (!column.element.dataset.finished) column.settle("abort");
    if (error.name === "AbortError") {
      if (this.search.start) this.#say("Stopped. What came so far is kept.", "Stopped.");
      return;
    }
    if (error instanceof Refusal && error.status === 401) {
      this.#askKey().then((given) => given && this.run());
      return;
    }
    if (!(error instanceof Refusal) && !(error instanceof ServerGone)) throw error;
    this.form.complain(error.param, error.message);
    this.#announce(error.message);
  }

  #column(number) {
    if (!this.columns.has(number)) {
      const reply = this.search.request.messages ? (answer) => this.form.chat.reply(answer) : null;
      const title = this.search.isBeams ? `Beam ${number + 1}` : `Sample ${number + 1}`;
      const column = new Column(title, { open: this.alternatives.open, reply });
      this.columns.set(number, column);
      find("columns").append(column.element);
    }
    return this.columns.get(number);
  }

  // -- around it -------------------------------------------------------------------------------------------

  async #loadModels() {
    const choice = find("model");
    try {
      this.models = await models(this.key.value);
    } catch (error) {
      if (error instanceof Refusal && error.status === 401) {
        choice.replaceChildren(new Option("an API key is needed", ""));
        if (await this.#askKey()) this.#loadModels();
        return;
      }
      if (error instanceof Refusal && error.status === 503) { // it listens, and loads its model
        choice.replaceChildren(new Option("the model is being loaded …", ""));
        setTimeout(() => this.#loadModels(), 1000);
        return;
      }
      choice.replaceChildren(new Option("no server", ""));
      this.form.complain(null, error.message);
      return;
    }
    choice.replaceChildren(...this.models.map((model) => new Option(model.id, model.id)));
    choice.disabled = this.models.length < 2;
    this.#chooseModel();
  }

  #askKey() {
    return this.key.ask(this.key.value ? "The server does not know this key." : "");
  }

  #chooseModel() {
    this.form.use(this.models.find((model) => model.id === find("model").value) ?? null);
  }

  #mixtureOf(request) {
    return this.models.find((model) => model.id === request.model)?.mixture ?? null;
  }

  #offerAlpha(offered) {
    const choice = find("shade");
    const option = choice.querySelector('[value="alpha"]');
    if (option.hidden === !offered) return;
    option.hidden = option.disabled = !offered;
    choice.value = offered ? "alpha" : "probability";
    this.#shade();
  }

  #shade() {
    const by = find("shade").value;
    this.results.classList.toggle("by-probability", by === "probability");
    this.results.classList.toggle("by-alpha", by === "alpha");
    this.reach = this.search?.reach ?? 0.5;
    this.results.style.setProperty("--reach", this.reach);
    find("legend").replaceChildren(legend(by, this.reach));
  }

  /** A line above the continuations; what stands in <…> is strong. */
  #say(line, announced) {
    find("summary").replaceChildren(...line.split(/<([^>]*)>/).map((part, place) => {
      if (place % 2 === 0) return part;
      const strong = document.createElement("strong");
      strong.textContent = part;
      return strong;
    }));
    this.#announce(announced);
  }

  #announce(text) {
    find("announcer").textContent = text;
  }

  #code(id, language, write) {
    find(id).addEventListener("click", () => {
      find("code-title").textContent = `This search in ${language}`;
      find("code").textContent = write();
      find("code-copied").textContent = "";
      find("code-dialog").showModal();
      find("code-copy").focus();
    });
    if (language !== "Python") return; // the buttons of the dialog are there once
    find("code-close").addEventListener("click", () => find("code-dialog").close());
    find("code-copy").addEventListener("click", () => copy(find("code")));
  }
}

/** Where the page was not loaded over a safe connection browsers lend no clipboard: the text is selected instead. */
async function copy(element) {
  try {
    await navigator.clipboard.writeText(element.textContent);
    find("code-copied").textContent = "Copied.";
  } catch {
    getSelection().selectAllChildren(element);
    find("code-copied").textContent = "Selected: copy it with Ctrl C.";
  }
}

function ordinal(place) {
  const number = place + 1;
  const suffix = { one: "st", two: "nd", few: "rd", other: "th" }[ORDINALS.select(number)];
  return `${number}${suffix}`;
}

function counted(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

new Page();
