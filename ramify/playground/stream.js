// The server as the page knows it: what it serves, and the stream of a search's steps (docs/playground.md).

/** The server answered, and said no. `param` names the field it is about, where there is one. */
export class Refusal extends Error {
  constructor(status, error) {
    super(error.message);
    this.status = status;
    this.param = error.param ?? null;
  }
}

/** There was no answer, or it broke off. */
export class ServerGone extends Error {}

/** The models this server offers, as /v1/models lists them. */
export async function models(key) {
  const response = await ask("v1/models", { headers: headers(key) });
  return (await response.json()).data;
}

/** Events of one search, in order: start, steps …, end. Whoever stops reading aborts the search. */
export async function* events(body, { key, signal }) {
  const response = await ask("ramify/stream", {
    method: "POST",
    headers: { ...headers(key), "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  let rest = "";
  let ended = false;
  for await (const text of pieces(response)) {
    const parts = (rest + text).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const event = read(part);
      if (event === null) continue;
      if (event.error && event.type === undefined) throw new Refusal(200, event.error);
      ended ||= event.type === "end";
      yield event;
    }
  }
  if (!ended) throw new ServerGone("The server closed the stream before its end. What came so far is kept.");
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, { ...options, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerGone("The server does not answer. Is it still running?");
  }
  if (response.ok) return response;
  throw new Refusal(response.status, await refusal(response));
}

async function refusal(response) {
  try {
    const { error } = await response.json();
    if (typeof error?.message === "string") return error;
  } catch { /* not one of ours, a proxy's perhaps: the status says what there is to say */ }
  return { message: `The server answered with status ${response.status}.` };
}

async function* pieces(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield decoder.decode(value, { stream: true });
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerGone("The connection broke off. What came so far is kept.");
  } finally {
    reader.cancel().catch(() => {}); // nobody is left to be told
  }
}

/** A server-sent event's JSON; null for the word that ends every stream. */
function read(part) {
  const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
  return data === "" || data === "[DONE]" ? null : JSON.parse(data);
}
