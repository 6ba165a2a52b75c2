// What is asked of the server: what it is, and the steps of a text as they are made.

const KEY = "token-recycling.key";
const BROKEN = "The stream broke off before its end.";

/** An answer that is an error; its message is made for the user. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The API key of this tab; nothing is kept after it is closed. */
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** The model, its limits and the drafters there are. */
export async function about() {
  return (await ask("v1/token_recycling/about")).json();
}

/**
 * Generates: `onEvent(name, data)` is called with every event of the stream but the last, whose data is returned.
 * Aborting the signal ends the generation.
 */
export async function steps(body, signal, onEvent) {
  const answer = await ask("v1/token_recycling/steps", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const { name, data } of events(answer.body)) {
    if (name === "end") return data;
    if (name === "error") throw new ServerError(data.error.message);
    onEvent(name, data);
  }
  throw new ServerError(BROKEN);
}

async function ask(path, request = {}) {
  const headers = { ...request.headers };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  let answer;
  try {
    answer = await fetch(path, { ...request, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.");
  }
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => null);
  throw new ServerError(said?.error?.message ?? `The server answered ${answer.status}.`, answer.status);
}

/** Server-sent events: each a name and its data, which is JSON. */
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
      const [name, data] = event.split("\n", 2);
      yield { name: name.slice("event: ".length), data: JSON.parse(data.slice("data: ".length)) };
    }
  }
}
