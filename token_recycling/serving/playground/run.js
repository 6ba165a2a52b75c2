// One generated text: its steps and their figures.

import { plural } from "./dom.js";

const LONGEST_LOOP = 64; // tokens
const LEAST_REPEATED = 24;

export class Run {
  /** `title` is shown to the user; `plain` is true for a run without drafts. */
  constructor(title, plain) {
    this.title = title;
    this.plain = plain;
    this.steps = [];
    this.totals = [];
    this.rest = "";
    this.usage = null;
  }

  add(step) {
    this.totals.push(this.tokens + step.tokens.length);
    this.steps.push(step);
  }

  /** `end` is the data of the last event. */
  finish(end) {
    this.rest = end.text;
    this.usage = end.usage;
  }

  get text() {
    return this.steps.flatMap((step) => step.texts).join("") + this.rest;
  }

  get tokens() {
    return this.totals.at(-1) ?? 0;
  }

  get seconds() {
    return this.steps.at(-1)?.seconds ?? 0;
  }

  get ids() {
    return this.steps.flatMap((step) => step.tokens);
  }

  get tokensPerSecond() {
    return this.figures().rate;
  }

  /**
   * Figures after the first `count` steps. The rate is the decoding rate: tokens after the first step by the time since,
   * as on the server and the command line.
   */
  figures(count = this.steps.length) {
    if (!count) return { steps: 0, tokens: 0, seconds: 0, mat: 0, rate: 0 };
    const tokens = this.totals[count - 1];
    const { seconds } = this.steps[count - 1];
    const first = this.steps[0];
    const rate = count > 1 ? (tokens - first.tokens.length) / (seconds - first.seconds) : 0;
    return { steps: count, tokens, seconds, mat: tokens / count, rate };
  }

  /** The number of steps that were complete `seconds` after the prefill. */
  countAt(seconds) {
    let [low, high] = [0, this.steps.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.steps[middle].seconds <= seconds) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** A sentence if the text ends with three or more repetitions; otherwise an empty string. */
  get loops() {
    const { ids } = this;
    for (let period = 1; period <= LONGEST_LOOP; period++) {
      let same = 0;
      while (same < ids.length - period && ids.at(-1 - same) === ids.at(-1 - same - period)) same++;
      if (same < 2 * period || same + period < LEAST_REPEATED) continue;
      const from = ids.length - same - period + 1;
      return `From token ${from} on, the output repeats ${plural(period, "token")}, which is easy to draft.`;
    }
    return "";
  }

  /** Index of the step to show first: the step with the most tokens, preferably one with rejected branches. */
  get example() {
    const worth = ({ tokens, path, draft }) => tokens.length + (draft.tokens.length > path.length ? 1000 : 0);
    return this.steps.reduce((best, step, at, all) => (worth(step) > worth(all[best]) ? at : best), 0);
  }
}

/** Index of the first difference of two lists of tokens, or -1. */
export function firstDifference(one, other) {
  for (let at = 0; at < Math.max(one.length, other.length); at++) if (one[at] !== other[at]) return at;
  return -1;
}
