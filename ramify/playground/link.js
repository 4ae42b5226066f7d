// Settings as a link: #try?prompt=…&strategy=beam&n=4. What follows # stays in the browser and is sent to no server.
// The API key is no setting, so no link has it.

import { controlsOf, sound } from "./settings.js";

const MARK = "#try?";

export function linkOf(settings, address) {
  const parts = new URLSearchParams();
  if (settings.kind === "chat") parts.set("messages", JSON.stringify(settings.messages));
  else parts.set("prompt", settings.prompt);
  if (settings.kind === "prompt" && settings.theta_prompt) parts.set("theta_prompt", settings.theta_prompt);
  if (settings.model) parts.set("model", settings.model);
  parts.set("strategy", settings.strategy);
  for (const { name } of controlsOf(settings.strategy)) {
    if (settings.values[name]) parts.set(name, settings.values[name]);
  }
  return `${address.split("#")[0]}${MARK}${parts}`;
}

export function isLink(fragment) {
  return fragment.startsWith(MARK);
}

/** The settings in a link's fragment; null where it cannot be read. A field that it does not name is empty. */
export function settingsOf(fragment) {
  const parts = new URLSearchParams(fragment.slice(MARK.length));
  const values = Object.fromEntries(controlsOf(parts.get("strategy")).map(({ name }) => [name, parts.get(name) ?? ""]));
  const messages = parts.get("messages");
  try {
    return sound({
      kind: messages === null ? "prompt" : "chat",
      prompt: parts.get("prompt") ?? "",
      theta_prompt: parts.get("theta_prompt") ?? "",
      messages: messages === null ? [] : JSON.parse(messages),
      strategy: parts.get("strategy"),
      model: parts.get("model") ?? "",
      values,
    });
  } catch {
    return null;
  }
}
