// The server speaks of fields by the names of its API; on the page they have labels.

// A name at the beginning, one with an underscore, one before "=", or n: elsewhere "stop" or "score" may be plain words.
const NAMES = /^[a-z_]+|\b[a-z]+(?:_[a-z]+)+\b|\b[a-z]+(?= = )|\bn\b/g;
const NO_FIELDS = { max_model_len: "the model’s context" };
const SAME_FIELD = { logprobs: "top_logprobs", theta_messages: "theta_prompt" };

/** The field that a refusal is about; messages of the engine itself begin with its name. */
export function nameOfField(param, message) {
  const name = String(param ?? message.match(/^[a-z_]+/)?.[0] ?? "").split(/[.[]/)[0];
  return SAME_FIELD[name] ?? name;
}

/** A message in the page's words: labelOf(name) is a field's label, or undefined where the page has no such field. */
export function inLabels(message, labelOf) {
  return message.replaceAll(NAMES, (name) => {
    const label = labelOf(SAME_FIELD[name] ?? name);
    return label === undefined ? NO_FIELDS[name] ?? name : `“${label}”`;
  });
}
