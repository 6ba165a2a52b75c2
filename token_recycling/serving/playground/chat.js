// The conversation: the turns before the message in the form.

import { byId, element } from "./dom.js";

let turns = [];

/** Whether the prompt is a message to answer. */
export const isChat = () => !byId("kind").hidden && byId("form").elements.kind.value === "chat";

/** All messages, with this prompt as the last. */
export const messagesWith = (prompt) => [...turns, { role: "user", content: prompt }];

/** Continues the conversation after an answer. */
export function goOn(messages, answer) {
  turns = [...messages, { role: "assistant", content: answer }];
  byId("prompt").value = "";
  byId("prompt").dispatchEvent(new Event("input")); // stores the prompt for a reload
  show();
}

function show() {
  const shown = isChat() && turns.length > 0;
  byId("turns").replaceChildren(...turns.map(({ role, content }) => element("p", { class: role }, content)));
  byId("turns").hidden = byId("new-conversation").hidden = !shown;
  byId("turns").scrollTop = byId("turns").scrollHeight;
}

byId("kind").addEventListener("change", show);
byId("new-conversation").addEventListener("click", () => {
  turns = [];
  show();
  byId("prompt").focus();
});
