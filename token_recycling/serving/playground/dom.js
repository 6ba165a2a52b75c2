// Helpers that create elements. Text is always inserted as text, never as markup.

export const byId = (id) => document.getElementById(id);

/** `matches` is true if the user prefers reduced motion. */
export const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");

/** Creates an element with attributes, and with nodes or strings as children. */
export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** Creates an SVG element in the same way. */
export function svgElement(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** The class that gives a step its color. */
export const parity = (index) => (index % 2 ? "odd" : "even");

const SUPERSCRIPTS = [..."⁰¹²³⁴⁵⁶⁷⁸⁹"];
const MARKS = { "\n": "↵", "\r": "␍", "\t": "⇥" };
const LONGEST = 16;

/** A token's text on one line, with invisible characters made visible. */
export function visible(text) {
  const shown = text
    .replace(/ {4,}/g, (run) => "·" + [...String(run.length)].map((digit) => SUPERSCRIPTS[digit]).join(""))
    .replaceAll(" ", "·")
    .replace(/[\n\r\t]/g, (mark) => MARKS[mark])
    .replace(/\p{C}/gu, (char) => `\\u${char.codePointAt(0).toString(16).padStart(4, "0")}`);
  const characters = [...shown];
  return characters.length > LONGEST ? characters.slice(0, LONGEST - 1).join("") + "…" : shown || "∅";
}

/** "1 token", "2 tokens". */
export const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
