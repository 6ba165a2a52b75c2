// The result of a race as text, including races that drafting loses.

import { byId } from "./dom.js";
import { firstDifference } from "./run.js";

/**
 * Compares two runs; `first` is the title of the run that was measured first. `warmed`, if present, is a run with the
 * server's own drafter; `known`: whether this page has sent that drafter the prompt before. `served` is the result of
 * `about`.
 */
export function showVerdict({ plain, drafted, warmed, known, first, sampled, served }) {
  const ratio = drafted.tokensPerSecond / plain.tokensPerSecond;
  // An answer of one step has no decode time.
  byId("ratio").textContent = ratio > 0 && Number.isFinite(ratio) ? `${ratio.toFixed(2)}×` : "–";
  byId("same").textContent = `${pace(ratio, drafted, plain)} ${sameness(plain, drafted, sampled, served)} ${drafted.loops}`;
  byId("warmed").textContent = warmed ? memory(warmed, plain, known) : "";
  byId("warmed").hidden = !warmed;
  byId("fairness").textContent =
    `Measured one after the other, ${first} first, without drawing; replayed in measured time. ` +
    "Plain decoding is the same loop without drafts; prefill is not counted. " +
    "The drafter started untrained.";
  byId("verdict").hidden = false;
}

/** A drafter that has seen a text before drafts nearly all of it, so this ratio says nothing about the method. */
function memory(warmed, plain, known) {
  const ratio = warmed.tokensPerSecond / plain.tokensPerSecond;
  const brought = known ? "has already decoded this prompt" : "has learned from earlier requests";
  return `Hot start: ${ratio.toFixed(2)}×, ${warmed.steps.length} steps. The server’s own drafter ${brought}.`;
}

function pace(ratio, drafted, plain) {
  const rates = `${drafted.tokensPerSecond.toFixed(0)} tokens/s instead of ${plain.tokensPerSecond.toFixed(0)}`;
  const steps = `${drafted.steps.length} steps instead of ${plain.steps.length}`;
  return `${rates}, ${steps}${ratio < 1 ? ": drafting cost more than it saved" : ""}.`;
}

function sameness(plain, drafted, sampled, served) {
  const at = firstDifference(plain.ids, drafted.ids);
  if (at < 0) return `Both outputs have the same ${plain.tokens} tokens.`;
  if (sampled) return "The outputs are two samples from the same distribution.";
  const why = served.dtype === "float32" ? "" : `, as can happen with near-ties in ${served.dtype}`;
  return `The outputs diverge at token ${at + 1}${why}.`;
}
