// What can be chosen: strategies, controls and which of them go together. The server checks every value; the page only
// leaves out what a strategy does not know.

const BEAMS = ["beam", "groups"];
const DRAWS = ["parallel", "best_of", "diverse"];
const ALL = [...DRAWS, ...BEAMS];

export const STRATEGIES = [
  {
    id: "parallel", name: "Parallel", sends: { strategy: "parallel" },
    hint: "Independent samples of one prompt, which is computed once.",
    icon: [["M2 4h26"], ["M2 11h20"], ["M2 18h24"]],
  },
  {
    id: "best_of", name: "Best of", sends: { strategy: "best_of_n" },
    hint: "Draws more than asked for and keeps the best by score; the others are greyed.",
    icon: [["M2 4h22", "dim"], ["M2 11h20"], ["M24 11l2 2 4-5"], ["M2 18h24", "dim"]],
  },
  {
    id: "beam", name: "Beams", sends: { strategy: "beam_search" },
    hint: "Beam search: in every step the likeliest continuations of all beams go on. Nothing is drawn.",
    icon: [["M2 11h8c4 0 4-7 9-7h9"], ["M10 11h18"], ["M10 11c4 0 4 7 9 7h5", "dim"]],
  },
  {
    id: "groups", name: "Groups", sends: { strategy: "beam_search" },
    hint: "Groups of beams: a token costs a penalty once an earlier group took it in the same step.",
    icon: [["M2 8h6c4 0 4-5 8-5h12"], ["M8 8h20"], ["M2 17h26"], ["M12 17c3 0 3 4 7 4h9"]],
  },
  {
    id: "diverse", name: "Diverse", sends: { strategy: "diverse" },
    hint: "Samples that push each other apart: a token loses what earlier siblings took in the same step.",
    icon: [["M2 11c12 0 10-8 26-8"], ["M2 11h26"], ["M2 11c12 0 10 8 26 8"]],
  },
];

const whole = { kind: "integer" };
const real = { kind: "number" };

/**
 * Fields by name, with the value they have at first. An empty one is not sent: `neutral` is what it then means, unless
 * the model's makers recommend something else. `quiet` ones are worth a word only where they were changed.
 */
export const CONTROLS = [
  { name: "n", label: "Samples", value: "4", ...whole, for: ALL, hint: "continuations to return" },
  { name: "best_of", label: "Drawn", value: "8", ...whole, for: ["best_of"], hint: "continuations to draw, of which the best return" },
  { name: "beam_width", label: "Beam width", value: "4", ...whole, for: BEAMS },
  { name: "num_beam_groups", label: "Groups", value: "2", ...whole, for: ["groups"] },
  { name: "diversity_penalty", label: "Diversity", value: "0.8", ...real, for: ["groups", "diverse"], hint: "what a repeated token loses" },
  { name: "max_tokens", label: "Max tokens", value: "40", ...whole, for: ALL },
  { name: "temperature", label: "Temperature", value: "", ...real, for: DRAWS, neutral: 1, hint: "0 is greedy; below 1 sharper, above 1 flatter" },
  { name: "score", label: "Score", value: "cumulative_logprob", for: ["best_of"], wide: true, quiet: true,
    choices: [["cumulative_logprob", "sum of logprobs"], ["mean_logprob", "mean logprob"]] },
  { name: "seed", label: "Seed", value: "", ...whole, for: DRAWS, die: true, double: true, placeholder: "a new one", hint: "the same seed gives the same tokens; empty, every run draws one" },
  { name: "length_penalty", label: "Length penalty", value: "1", ...real, for: BEAMS, double: true, quiet: true, hint: "score is the sum of logprobs over length to this power" },
  { name: "early_stopping", label: "Stop early", value: "false", for: BEAMS, quiet: true,
    choices: [["false", "no"], ["true", "yes"], ["never", "never"]], parse: (value) => (value === "never" ? value : value === "true") },
];

export const MORE_CONTROLS = [
  { name: "top_p", label: "Top-p", value: "", ...real, for: ALL, neutral: 1 },
  { name: "top_k", label: "Top-k", value: "", ...whole, for: ALL, neutral: -1, placeholder: "off" },
  { name: "min_p", label: "Min-p", value: "", ...real, for: ALL, neutral: 0 },
  { name: "presence_penalty", label: "Presence", value: "", ...real, for: ALL, placeholder: "0", hint: "presence penalty" },
  { name: "frequency_penalty", label: "Frequency", value: "", ...real, for: ALL, placeholder: "0", hint: "frequency penalty" },
  { name: "repetition_penalty", label: "Repetition", value: "", ...real, for: ALL, neutral: 1, hint: "repetition penalty" },
  { name: "min_tokens", label: "Min tokens", value: "", ...whole, for: ALL, placeholder: "0" },
  { name: "top_logprobs", label: "Alternatives", value: "8", ...whole, for: ALL, quiet: true, hint: "how many of the likeliest tokens to show" },
  { name: "stop", label: "Stop at", value: "", for: DRAWS, wide: true, placeholder: "a text that ends it; \\n is a line break",
    parse: (value) => [value.replaceAll("\\n", "\n")] },
];

export const EXAMPLES = [
  ["A story", "The lighthouse keeper climbed the stairs one last time. At the top she found"],
  ["A fact", "The capital of Portugal is"],
  ["A list", "Five things to pack for a week in the mountains:\n1."],
  ["Code", "def fibonacci(n):\n    "],
];

export const FIRST_MESSAGE = "What is a good name for a small sailing boat? Say why in one sentence.";
