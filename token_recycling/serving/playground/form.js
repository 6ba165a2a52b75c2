// The form, filled with the server's drafters and limits, and the request built from it.

import { byId, element } from "./dom.js";
import { key } from "./api.js";
import { isChat, messagesWith } from "./chat.js";

const PROMPT = "token-recycling.prompt";
const EXAMPLE = `class Matrix:
    """Numbers in rows of equal length."""

    def __init__(self, rows):
        self.rows = [list(row) for row in rows]

    def __add__(self, other):
        if not isinstance(other, Matrix):
            raise TypeError("expected a matrix")
        return Matrix([[a + b for a, b in zip(r, s)] for r, s in zip(self.rows, other.rows)])

    def __sub__(self, other):`;

const QUESTION = "Explain in a few sentences why the sky is blue.";

let offered = [];

/** Fills the form with the server's drafters and limits. */
export function offer(served) {
  offered = served.drafters;
  byId("served").textContent = `${served.model} · ${served.dtype} on ${served.device}`;
  byId("kind").hidden = !served.chat;
  if (served.chat) openAsChat();
  if (served.max_new_tokens !== null) limitTokens(served.max_new_tokens);
  const own = element("option", { value: "accelerated" }, `${served.drafter_name}, the server’s drafter`);
  const untrained = offered.map(({ spec }) => element("option", { value: spec }, spec));
  const group = element("optgroup", { label: "Untrained for each output" }, ...untrained);
  byId("drafter").replaceChildren(own, ...(untrained.length ? [group] : []));
  byId("drafter").onchange = () => describeDrafter(served);
  describeDrafter(served);
}

/** Starts with a chat message if the model has a chat template, unless this tab had another prompt. */
function openAsChat() {
  byId("form").elements.kind.value = "chat";
  if (byId("prompt").value === EXAMPLE) byId("prompt").value = QUESTION;
}

function limitTokens(most) {
  const field = byId("max-tokens");
  field.max = most;
  if (Number(field.value) > most) field.value = most;
}

/** Restores this tab's prompt after a reload, or fills in an example. */
export function bringPrompt() {
  const field = byId("prompt");
  field.value ||= sessionStorage.getItem(PROMPT) ?? EXAMPLE;
  field.addEventListener("input", () => sessionStorage.setItem(PROMPT, field.value));
}

/** Shows or hides the field for the API key. */
export function askForKey(wanted) {
  byId("key-field").hidden = !wanted;
  byId("key").required = wanted;
}

/** Stores the API key that the user has typed. */
export function takeKey() {
  if (!byId("key-field").hidden) key.set(byId("key").value.trim());
}

/** Returns whether the form is valid; if not, the browser shows the problem. */
export function isComplete() {
  const schema = byId("schema");
  schema.setCustomValidity(schemaOf(schema.value) === null ? "The schema must be a JSON object." : "");
  if (!schema.validity.valid) schema.closest("details").open = true;
  return byId("form").reportValidity();
}

/** The parsed schema: undefined for an empty field, null if it is not a JSON object. */
function schemaOf(text) {
  if (!text.trim()) return undefined;
  try {
    const schema = JSON.parse(text);
    return schema !== null && typeof schema === "object" && !Array.isArray(schema) ? schema : null;
  } catch {
    return null;
  }
}

/** The body of a request. */
export function request() {
  const prompt = byId("prompt").value;
  const seed = byId("seed").value;
  const schema = schemaOf(byId("schema").value);
  return {
    ...(isChat() ? { messages: messagesWith(prompt) } : { prompt }),
    drafter: byId("drafter").value,
    max_tokens: Number(byId("max-tokens").value),
    temperature: Number(byId("temperature").value),
    ...(seed === "" ? {} : { seed: Number(seed) }),
    ...(schema ? { response_format: { type: "json_schema", json_schema: { name: "answer", strict: true, schema } } } : {}),
  };
}

function ownDrafter({ drafter, isolation }) {
  return isolation === "per-request" ? `${drafter}.` : `${drafter}. It learns across requests.`;
}

function describeDrafter(served) {
  const chosen = offered.find(({ spec }) => spec === byId("drafter").value);
  byId("drafter-hint").textContent = chosen ? `${chosen.summary} It starts untrained.` : ownDrafter(served);
}
