// A text with its steps in colors, and its figures above. A race has two lanes.

import { element, parity, svgElement } from "./dom.js";

const FIGURES = [
  ["rate", "tokens/s", (value) => value.toFixed(0)],
  ["mat", "MAT", (value) => value.toFixed(2)],
  ["tokens", "tokens", String],
  ["steps", "steps", String],
  ["seconds", "seconds", (value) => value.toFixed(2)],
];
const NAMES = { mat: "mean accepted tokens: tokens per step on average" };

export class Lane {
  /** `onChoose(run, index)` is called when the user selects a step by pointer or arrow key. */
  constructor(run, onChoose) {
    this.run = run;
    this.spans = [];
    this.onChoose = onChoose;
    this.chosen = null;
    this.text = element("div", {
      class: "text",
      tabindex: 0,
      role: "group",
      "aria-label": `Text of ${run.title}; left and right arrow keys select a step`,
    });
    this.values = Object.fromEntries(FIGURES.map(([name]) => [name, element("dd", {}, "–")]));
    this.finished = element("p", { class: "finished" });
    this.track = svgElement("svg", { class: "track", preserveAspectRatio: "none", "aria-hidden": "true" });
    this.track.toggleAttribute("hidden", true);
    this.element = element(
      "section",
      { class: run.plain ? "lane plain" : "lane", "aria-label": run.title },
      element("div", { class: "head" }, element("h2", {}, run.title), this.finished),
      element("dl", { class: "figures" }, ...FIGURES.map(([name, label]) => this.#figure(name, label))),
      this.track,
      this.text,
    );
    this.text.addEventListener("click", (event) => this.#clicked(event));
    this.text.addEventListener("keydown", (event) => this.#pressed(event));
  }

  #figure(name, label) {
    return element("div", { title: NAMES[name] }, element("dt", {}, label), this.values[name]);
  }

  /** Appends new steps; follows the end of the text unless the user has scrolled up. */
  extend() {
    const { text } = this;
    const following = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
    const added = this.run.steps.slice(this.spans.length).map((step, at) => this.#span(step, this.spans.length + at));
    this.spans.push(...added);
    text.append(...added);
    if (following) text.scrollTop = text.scrollHeight;
  }

  #span(step, index) {
    const tokens = step.texts.map((text, at) =>
      element("span", { class: `${at < step.accepted ? "accepted" : "own"}${step.forced?.[at] ? " forced" : ""}` }, text),
    );
    return element("span", { class: `step ${parity(index)}`, "data-step": index }, ...tokens);
  }

  /** Completes the text: appends the rest that belongs to no step. */
  complete() {
    this.extend();
    this.text.append(this.run.rest);
    this.figures();
  }

  /** Shows the figures after the first `count` steps, by default all. */
  figures(count) {
    const figures = this.run.figures(count);
    for (const [name, , written] of FIGURES) {
      this.values[name].textContent = figures.steps ? written(figures[name]) : "–";
    }
  }

  /** Draws the steps along a time axis of `span` seconds. */
  drawTrack(span) {
    this.span = span;
    this.track.setAttribute("viewBox", `0 0 ${span} 1`);
    this.marks = this.run.steps.map((step, index, all) => {
      const begin = index ? all[index - 1].seconds : 0;
      return svgElement("rect", { class: parity(index), x: begin, y: 0, width: step.seconds - begin, height: 1 });
    });
    this.track.replaceChildren(...this.marks);
    this.track.toggleAttribute("hidden", false);
  }

  /** Shows the state at a time of a replay; later steps keep their space, so that the layout does not move. */
  showAt(seconds) {
    const count = this.run.countAt(seconds);
    this.spans.forEach((span, index) => span.classList.toggle("ahead", index >= count));
    this.marks.forEach((mark, index) => mark.classList.toggle("ahead", index >= count));
    const done = count === this.run.steps.length;
    this.reveal(count - 1);
    this.finished.textContent = done ? `finished after ${this.run.seconds.toFixed(2)} s` : "";
    this.figures(count);
  }

  /** Marks a step as selected; null removes the mark. */
  mark(index) {
    this.spans[this.chosen]?.classList.remove("chosen");
    this.chosen = index;
    this.spans[index]?.classList.add("chosen");
  }

  /** Scrolls only the text, so that a step is in view. */
  reveal(index) {
    const span = this.spans[index];
    if (!span) {
      this.text.scrollTop = 0;
      return;
    }
    const top = span.offsetTop - this.text.offsetTop;
    const bottom = top + span.offsetHeight;
    const { scrollTop, clientHeight } = this.text;
    if (top < scrollTop) this.text.scrollTop = top;
    else if (bottom > scrollTop + clientHeight) this.text.scrollTop = Math.min(top, bottom - clientHeight);
  }

  #clicked(event) {
    const span = event.target.closest("[data-step]");
    if (span && !String(getSelection())) this.onChoose(this.run, Number(span.dataset.step));
  }

  #pressed(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !this.spans.length || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    const next = this.chosen === null ? 0 : this.chosen + move;
    this.onChoose(this.run, Math.max(0, Math.min(this.spans.length - 1, next)));
  }
}
