// The steps of a run as a strip of bars, and the draft tree of the selected step.

import { byId, parity, plural, svgElement } from "./dom.js";
import { treeOf } from "./tree.js";

const WIDEST_BAR = 16;

/** `onChoose(run, index)` is called when the user selects a step here. */
export class Explorer {
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.run = null;
    this.index = 0;
    this.strip = byId("strip");
    this.strip.addEventListener("pointerdown", (event) => this.#pointed(event));
    this.strip.addEventListener("pointermove", (event) => event.buttons && this.#pointed(event));
    this.strip.addEventListener("keydown", (event) => this.#pressed(event));
    byId("tree").addEventListener("keydown", (event) => this.#pressed(event));
    byId("previous").addEventListener("click", () => this.#go(this.index - 1));
    byId("next").addEventListener("click", () => this.#go(this.index + 1));
  }

  /** Hides the explorer. */
  clear() {
    this.run = null;
    byId("explorer").hidden = true;
  }

  /** Shows a step of a run. */
  show(run, index) {
    if (run !== this.run || this.bars.length !== run.steps.length) this.#drawStrip(run);
    this.bars[this.index]?.classList.remove("chosen");
    this.bars[index].classList.add("chosen");
    this.index = index;
    byId("explorer").hidden = false;
    const described = describe(run, index);
    byId("explorer-title").textContent = `Steps of ${run.title}`;
    byId("described").textContent = described;
    this.strip.setAttribute("aria-valuenow", index + 1);
    this.strip.setAttribute("aria-valuetext", described);
    byId("previous").ariaDisabled = String(index === 0);
    byId("next").ariaDisabled = String(index === run.steps.length - 1);
    const tree = byId("tree");
    tree.replaceChildren(treeOf(run, index, described));
    byId("wide").hidden = tree.scrollWidth <= tree.clientWidth;
  }

  #drawStrip(run) {
    const { steps } = run;
    const tallest = Math.max(2, ...steps.map((step) => step.tokens.length));
    this.run = run;
    this.bars = steps.map((step, at) => bar(step.tokens.length, step.accepted, at, tallest));
    const box = { class: "strip", viewBox: `0 0 ${steps.length} ${tallest}`, preserveAspectRatio: "none" };
    const svg = svgElement("svg", { ...box, "aria-hidden": "true" }, ...this.bars);
    svg.style.maxWidth = `${steps.length * WIDEST_BAR}px`;
    this.strip.replaceChildren(svg);
    this.strip.setAttribute("aria-valuemin", 1);
    this.strip.setAttribute("aria-valuemax", steps.length);
  }

  #go(index) {
    const last = this.run.steps.length - 1;
    this.onChoose(this.run, Math.max(0, Math.min(last, index)));
  }

  #pointed(event) {
    const { left, width } = this.strip.firstChild.getBoundingClientRect();
    if (event.type === "pointerdown") this.strip.setPointerCapture(event.pointerId);
    this.#go(Math.floor(((event.clientX - left) / width) * this.run.steps.length));
  }

  #pressed(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const far = Math.max(2, Math.round(this.run.steps.length / 10));
    const moves = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -far, PageUp: far };
    const ends = { Home: 0, End: this.run.steps.length - 1 };
    // The up and down keys scroll the tree.
    const here = event.currentTarget === this.strip || ["ArrowLeft", "ArrowRight"].includes(event.key);
    const to = event.key in moves ? this.index + moves[event.key] : ends[event.key];
    if (to === undefined || !here) return;
    event.preventDefault();
    this.#go(to);
  }
}

/** A step as a bar: the model's own token below, accepted tokens above; the full height is clickable. */
function bar(tokens, accepted, at, tallest) {
  const part = (name, from, size) =>
    svgElement("rect", { class: name, x: at + 0.1, width: 0.8, y: tallest - from - size, height: size });
  const whole = svgElement("rect", { class: "whole", x: at, width: 1, y: 0, height: tallest });
  const own = tokens - accepted;
  return svgElement("g", { class: parity(at) }, whole, part("accepted", own, accepted), part("own", 0, own));
}

/** A step as a sentence. */
export function describe(run, index) {
  const step = run.steps[index];
  const drafted = step.draft.tokens.length - 1;
  const milliseconds = (1000 * (step.seconds - (run.steps[index - 1]?.seconds ?? 0))).toFixed(0);
  const draft = drafted ? `${plural(drafted, "token")} drafted, ${step.accepted} accepted` : "nothing drafted";
  const total = plural(step.tokens.length, "token");
  const emitted = step.accepted ? `with the model’s own, ${total}` : "the model’s own token";
  return `Step ${index + 1} of ${run.steps.length}: ${draft}; ${emitted} in ${milliseconds} ms.`;
}
