// The page: a form, a stream, and the views that draw what comes.

import { CodeDialog } from "./code.js";
import { find } from "./elements.js";
import { Form } from "./form.js";
import { History } from "./history.js";
import { ApiKey } from "./key.js";
import { isLink, linkOf, settingsOf } from "./link.js";
import { Results } from "./results.js";
import { Search } from "./search.js";
import { pinned, sound, withSeed } from "./settings.js";
import { curl, python } from "./snippets.js";
import { keep, kept, thisTab } from "./storage.js";
import { events, models, Refusal, ServerGone } from "./stream.js";
import { startTheme } from "./theme.js";

const DRAFT = "ramify-form";

class Page {
  constructor() {
    this.models = [];
    this.running = null; // what stops the search under way
    this.search = null; // that one, once it was sent
    this.isLost = false; // nobody answered when the page asked for the models
    this.key = new ApiKey();
    this.code = new CodeDialog();
    this.form = new Form(() => this.#changed());
    this.results = new Results({ keepSeed: (text) => this.form.keepSeed(text), reply: (answer) => this.form.chat.reply(answer) });
    this.history = new History((settings, search) => this.#showRun(settings, search));
    startTheme(find("theme"));
    this.#listen();
    const draft = sound(kept(thisTab, DRAFT));
    if (draft) this.form.restore(draft);
    this.#openLink();
    this.loading = this.#loadModels(); // until the models are known, or cannot be
  }

  #listen() {
    find("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    find("stop").addEventListener("click", () => this.running?.abort());
    find("key-open").addEventListener("click", async () => {
      if (await this.key.ask()) this.loading = this.#loadModels();
    });
    find("model").addEventListener("change", () => this.#chooseModel());
    find("stale-back").addEventListener("click", () => {
      this.#restore(this.results.search.settings);
      find("run").focus({ preventScroll: true }); // the button itself is gone now
    });
    find("copy-python").addEventListener("click", () => {
      const { request, mixture } = this.results.search;
      const note = mixture ? "How this server finds α, and system prompts of its own, are not in it." : "";
      this.code.show("This search in Python", python(request, mixture), note);
    });
    find("copy-curl").addEventListener("click", () => {
      this.code.show("This search in curl", curl(this.results.search.request, location.origin, this.key.value !== ""));
    });
    find("copy-link").addEventListener("click", () => {
      this.code.show("A link to this form", linkOf(this.#linked(), location.href),
        "It holds the prompt and the settings, for whoever can reach this server. An API key is never part of it.");
    });
    window.addEventListener("hashchange", () => this.#openLink());
    window.addEventListener("pagehide", () => this.#remember(this.search)); // a reload in the middle: nothing after it would run
    document.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !this.running && !document.querySelector("dialog[open]")) this.run();
      if (event.key === "Escape" && this.running && !document.querySelector("dialog[open], :popover-open")) this.running.abort();
    });
  }

  // -- one search ------------------------------------------------------------------------------------------

  async run() {
    this.running?.abort();
    const running = this.running = new AbortController();
    this.#swap("run", "stop");
    try {
      if (this.isLost) this.loading = this.#loadModels();
      await this.loading; // a request names its model, and has the model's defaults
      const asked = running.signal.aborted ? null : this.form.read();
      if (asked) await this.#follow(new Search(this.form.settings, asked, withSeed(asked), this.form.model?.mixture ?? null), running.signal);
    } finally {
      if (this.running === running) {
        this.running = null;
        this.#swap("stop", "run");
      }
    }
  }

  async #follow(search, signal) {
    this.search = search;
    try {
      for await (const event of events(search.request, { key: this.key.value, signal })) {
        search.take(event);
        if (event.type === "start") this.#start(search);
        else this.results.drawSoon();
      }
      this.results.draw();
      this.results.finish();
      this.#announce("Done.");
    } catch (error) {
      this.#interrupted(error, search);
    } finally {
      this.#remember(search);
      if (this.search === search) this.search = null;
    }
  }

  #remember(search) {
    if (search?.start) this.history.add(search, pinned(search.settings, search.request));
  }

  /** One button takes the other's place, and its focus if it had it. */
  #swap(from, to) {
    const focused = document.activeElement === find(from);
    find(to).hidden = false;
    if (focused) find(to).focus({ preventScroll: true });
    find(from).hidden = true;
  }

  /** The server took it: only now does what was there before make room. */
  #start(search) {
    this.results.show(search);
    this.results.compare(this.form.request);
    this.#announce("Sampling has begun.");
    if (matchMedia("(max-width: 960px)").matches) this.results.element.scrollIntoView();
  }

  #interrupted(error, search) {
    if (search.start && this.results.search === search) {
      this.results.draw();
      this.results.interrupt();
    }
    if (error.name === "AbortError") {
      this.#announce("Stopped.");
      return;
    }
    if (error instanceof Refusal && error.status === 401) {
      this.key.ask({ refused: true }).then((given) => given && this.run());
      return;
    }
    if (!(error instanceof Refusal) && !(error instanceof ServerGone)) throw error;
    if (error.status === 404 && error.param === "model") { // another server than the one that was asked for its models
      this.loading = this.#loadModels();
      return;
    }
    this.#announce(this.form.complain(error.param, error.message));
  }

  // -- settings that come and go ---------------------------------------------------------------------------

  #changed() {
    if (!this.results) return; // the form is being made
    keep(thisTab, DRAFT, this.form.settings);
    this.results.compare(this.form.request);
  }

  #restore(settings) {
    this.form.restore(settings);
    this.#wantModel(settings.model);
  }

  /** A link fills the form and runs nothing. Then it leaves the address: from here on the form is what counts. */
  #openLink() {
    if (!isLink(location.hash)) return;
    const settings = settingsOf(location.hash);
    history.replaceState(null, "", location.pathname + location.search);
    if (settings) this.#restore(settings);
    else this.form.complain(null, "The settings in this link cannot be read.");
  }

  /** What a link holds: where the results are this form's, with the seed that they were drawn with. */
  #linked() {
    const { search } = this.results;
    const isFresh = search && find("stale").hidden;
    return isFresh ? pinned(search.settings, search.request) : pinned(this.form.settings, this.form.request);
  }

  #showRun(settings, search) {
    this.#restore(settings);
    if (search && !this.running) {
      this.results.show(search);
      this.results.compare(this.form.request);
    }
    find("run").focus({ preventScroll: true });
  }

  // -- models ----------------------------------------------------------------------------------------------

  async #loadModels() {
    const choice = find("model");
    this.isLost = false;
    try {
      this.models = await models(this.key.value);
    } catch (error) {
      if (error instanceof Refusal && error.status === 401) {
        choice.replaceChildren(new Option("an API key is needed", ""));
        if (await this.key.ask({ refused: true })) await this.#loadModels();
        return;
      }
      if (error instanceof Refusal && error.status === 503) { // it listens, and loads its model
        choice.replaceChildren(new Option("the model is being loaded …", ""));
        setTimeout(() => { this.loading = this.#loadModels(); }, 1000);
        return;
      }
      this.isLost = true;
      choice.replaceChildren(new Option("no server", ""));
      this.form.complain(null, error.message);
      return;
    }
    choice.replaceChildren(...this.models.map((model) => new Option(model.id, model.id)));
    choice.disabled = this.models.length < 2;
    this.#wantModel(this.form.wantedModel);
  }

  /** Chooses a model by name, where this server has it; else says that the settings were made for another. */
  #wantModel(name) {
    const offered = this.models.some((model) => model.id === name);
    if (offered) find("model").value = name;
    this.#chooseModel();
    if (name && !offered && this.models.length) {
      this.form.complain(null, `These settings were made for the model ${name}, which this server does not have.`);
    }
  }

  #chooseModel() {
    this.form.use(this.models.find((model) => model.id === find("model").value) ?? null);
  }

  #announce(text) {
    find("announcer").textContent = text;
  }
}

new Page();
