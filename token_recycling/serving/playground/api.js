// Requests to the server: its description, and the streamed steps of a generation.

const KEY = "token-recycling.key";
const BROKEN = "The stream broke off before the end of the output.";

/** An error from the server; its message is for the user. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The API key, kept until this tab is closed. */
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** The model, its limits and the available drafters. */
export async function about() {
  return (await send("v1/token_recycling/about")).json();
}

/**
 * Generates a text: calls `onEvent(name, data)` for every event of the stream except the last, whose data is returned.
 * Aborting the signal ends the generation.
 */
export async function steps(body, signal, onEvent) {
  const response = await send("v1/token_recycling/steps", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const { name, data } of events(response.body)) {
    if (name === "end") return data;
    if (name === "error") throw new ServerError(data.error.message);
    onEvent(name, data);
  }
  throw new ServerError(BROKEN);
}

async function send(path, request = {}) {
  const headers = { ...request.headers };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  let response;
  try {
    response = await fetch(path, { ...request, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ServerError(body?.error?.message ?? `The server returned status ${response.status}.`, response.status);
}

/** Server-sent events, each a name and one line of JSON data. Comments, which begin with a colon, only keep the
 * connection open. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new ServerError(BROKEN);
    });
    if (done) return;
    const complete = (held + value).split("\n\n");
    held = complete.pop();
    for (const event of complete) {
      const fields = Object.fromEntries(event.split("\n").map((line) => line.split(/: ?(.*)/s, 2)));
      if (fields.data !== undefined) yield { name: fields.event, data: JSON.parse(fields.data) };
    }
  }
}
