// The same search as code.

/** Python that returns what the page shows. */
export function python(body, mixture) {
  const { prompt, messages, theta_prompt: thetaPrompt, model, top_logprobs: topLogprobs, ...params } = body;
  if (topLogprobs !== undefined) params.logprobs = topLogprobs;
  const lines = Object.entries(params).map(([name, value]) => `    ${name}=${literal(value)},`);
  if (mixture) {
    return [
      "from ramify import OptimalSampling",
      "",
      `sampling = OptimalSampling(${literal(mixture.teacher)}, ${literal(mixture.theta)})`,
      "outputs = sampling.generate(",
      `    [${literal(prompt)}],`,
      `    theta_prompts=[${literal(thetaPrompt ?? prompt)}],`,
      ...lines,
      ")",
      "for text, alphas in zip(outputs.generated_texts, outputs.alpha_history):",
      "    print(text, alphas)",
      "",
    ].join("\n");
  }
  const asked = messages ? `llm.chat(${literal(messages)}, params)` : `llm.generate(${literal(prompt)}, params)`;
  return [
    "from ramify import LLM, SamplingParams",
    "",
    `llm = LLM(${model ? literal(model) : ""})`,
    "params = SamplingParams(",
    ...lines,
    ")",
    `[output] = ${asked}`,
    "for item in output.outputs:",
    "    print(item.index, item.score, item.text)",
    "",
  ].join("\n");
}

/** A command that asks this server for the stream the page reads. */
export function curl(body, origin, needsKey) {
  const lines = [
    `curl -N ${origin}/ramify/stream`,
    "-H 'Content-Type: application/json'",
    ...(needsKey ? ['-H "Authorization: Bearer $RAMIFY_API_KEY"'] : []),
    `-d ${quoted(JSON.stringify(body, null, 2))}`,
  ];
  return `${lines.join(" \\\n  ")}\n`;
}

function literal(value) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([key, item]) => `${literal(key)}: ${literal(item)}`).join(", ")}}`;
  }
  return JSON.stringify(value); // strings and numbers are spelled alike
}

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
