// Settings: what the form says, as plain values that can be kept, sent in a link and compared.
//
//   { kind: "prompt" | "chat", prompt, theta_prompt, messages: [{ role, content }], strategy, model, values: { n: "4", … } }
//
// Values are the fields' own texts; an empty one leaves the choice to the model's defaults, or to the engine's.

import { CONTROLS, MORE_CONTROLS, STRATEGIES } from "./strategies.js";

export const ROLES = ["system", "user", "assistant"];
const ALL_CONTROLS = [...CONTROLS, ...MORE_CONTROLS];
const LONGEST_TEXT = 2 ** 20; // of what a link or the browser's storage may bring
const MOST_MESSAGES = 500;

export function strategyOf(settings) {
  return STRATEGIES.find((item) => item.id === settings.strategy);
}

/** The controls that a strategy knows. */
export function controlsOf(strategy) {
  return ALL_CONTROLS.filter((control) => control.for.includes(strategy));
}

/** The request these settings make of a model: always in full, so that it means the same as code and on other days. */
export function requestOf(settings, model) {
  const body = settings.kind === "chat" ? { messages: settings.messages } : { prompt: settings.prompt };
  if (model) body.model = model.id;
  if (model?.mixture && settings.kind === "prompt" && settings.theta_prompt) body.theta_prompt = settings.theta_prompt;
  Object.assign(body, strategyOf(settings).sends);
  for (const control of controlsOf(settings.strategy)) {
    const text = settings.values[control.name] ?? "";
    if (text !== "") body[control.name] = parsed(control, text);
  }
  if (body.strategy === "beam_search") return body; // nothing is drawn, and the model recommends how to draw
  for (const [name, value] of Object.entries(defaultsOf(model))) body[name] ??= value;
  // Several greedy samples would all be the same: where nobody asked for greedy ones, none are drawn.
  if (defaultsOf(model).temperature === 0 && (body.best_of ?? body.n) > 1 && !settings.values.temperature) body.temperature = 1;
  return body;
}

/** What the model's makers recommend and the page has a field for, where it differs from the model as it is. */
export function defaultsOf(model) {
  const given = model?.default_sampling_params ?? {};
  const controls = ALL_CONTROLS.filter(({ name, neutral }) => neutral !== undefined && given[name] !== undefined && given[name] !== neutral);
  return Object.fromEntries(controls.map(({ name }) => [name, given[name]]));
}

function parsed(control, text) {
  if (control.parse) return control.parse(text);
  return control.kind ? Number(text) : text;
}

/** The same settings with nothing left open: the seed that was drawn and the model's defaults are written down. */
export function pinned(settings, request) {
  const values = { ...settings.values };
  for (const { name } of controlsOf(settings.strategy)) {
    if (!values[name] && request[name] !== undefined) values[name] = String(request[name]);
  }
  return { ...settings, values };
}

/** Whether two requests ask for the same. */
export function same(one, other) {
  const sorted = (request) => JSON.stringify(Object.entries(request).sort(([a], [b]) => (a < b ? -1 : 1)));
  return sorted(one) === sorted(other);
}

/** A request without a seed gets one, where tokens are drawn. */
export function withSeed(request) {
  const draws = request.strategy !== "beam_search" && request.temperature !== 0;
  return draws && request.seed === undefined ? { ...request, seed: drawSeed() } : request;
}

export function drawSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0];
}

/** Values of one strategy made to fit another: { values that change }, and a sentence about it. */
export function fitted(strategy, values) {
  const [n, bestOf, width, groups] = ["n", "best_of", "beam_width", "num_beam_groups"].map((name) => Number(values[name]));
  if (!Number.isInteger(n) || n < 1) return { changes: {}, said: "" };
  if (strategy === "best_of" && bestOf < n) {
    return { changes: { best_of: String(2 * n) }, said: `${2 * n} are drawn now, so that the best ${n} can be kept.` };
  }
  if (strategy === "beam" || strategy === "groups") {
    const parts = strategy === "groups" && Number.isInteger(groups) && groups > 0 ? groups : 1;
    const fitting = Math.ceil(Math.max(n, width) / parts) * parts;
    if (fitting !== width) {
      const why = fitting === n || parts === 1 ? `hold ${n} samples` : `hold ${n} samples in ${parts} groups of one size`;
      return { changes: { beam_width: String(fitting) }, said: `Beam width is ${fitting} now, to ${why}.` };
    }
  }
  return { changes: {}, said: "" };
}

/** A request in a few words: "Parallel · samples 4 · max tokens 40 · temperature 0.2". */
export function described(settings, request) {
  const words = controlsOf(settings.strategy)
    .filter(({ name, quiet, value }) => name !== "seed" && request[name] !== undefined && !(quiet && String(request[name]) === value))
    .map((control) => `${control.label.toLowerCase()} ${shown(control, request[control.name])}`);
  return [strategyOf(settings).name, ...words].join(" · ");
}

function shown(control, value) {
  const choice = control.choices?.find(([name]) => name === String(value));
  return choice ? choice[1] : Array.isArray(value) ? JSON.stringify(value[0]) : String(value);
}

/** Settings from a link or from storage, of which nothing is believed: null unless they are sound. */
export function sound(candidate) {
  if (typeof candidate !== "object" || candidate === null || !STRATEGIES.some(({ id }) => id === candidate.strategy)) return null;
  const text = (value) => (typeof value === "string" && value.length <= LONGEST_TEXT ? value : "");
  const messages = Array.isArray(candidate.messages) ? candidate.messages.slice(0, MOST_MESSAGES) : [];
  return {
    kind: candidate.kind === "chat" ? "chat" : "prompt",
    prompt: text(candidate.prompt),
    theta_prompt: text(candidate.theta_prompt),
    messages: messages.filter((item) => ROLES.includes(item?.role)).map(({ role, content }) => ({ role, content: text(content) })),
    strategy: candidate.strategy,
    model: text(candidate.model),
    values: Object.fromEntries(ALL_CONTROLS
      .filter(({ name }) => typeof candidate.values?.[name] === "string")
      .map(({ name }) => [name, text(candidate.values[name])])),
  };
}
