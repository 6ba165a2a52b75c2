// The result of a race as text, also where drafting lost.

import { byId } from "./dom.js";
import { firstDifference } from "./run.js";

/**
 * Compares two runs; `first` is the title of the one that was measured first. `warmed`, if there is one, began with
 * what the server has learned; `known` says whether this page gave it the prompt before. `served` is what `about`
 * returned.
 */
export function showVerdict({ plain, drafted, warmed, known, first, sampled, served }) {
  const ratio = drafted.tokensPerSecond / plain.tokensPerSecond;
  // An answer of one step has no time of decoding.
  byId("ratio").textContent = ratio > 0 && Number.isFinite(ratio) ? `${ratio.toFixed(2)}×` : "–";
  byId("same").textContent = `${pace(ratio, drafted, plain)} ${sameness(plain, drafted, sampled, served)} ${drafted.loops}`;
  byId("warmed").textContent = warmed ? memory(warmed, plain, known) : "";
  byId("warmed").hidden = !warmed;
  byId("fairness").textContent =
    `Measured one after the other, ${first} first, with nothing drawn meanwhile; shown on the measured clock. ` +
    "Plain is the same loop without drafts; reading the prompt is not counted. " +
    "The drafter began with nothing learned.";
  byId("verdict").hidden = false;
}

/** A drafter that has seen a text before drafts nearly all of it, which is no property of the method. */
function memory(warmed, plain, known) {
  const ratio = warmed.tokensPerSecond / plain.tokensPerSecond;
  const brought = known ? "has drafted for this very prompt before" : "brings what this server has learned so far";
  return `With memory ${ratio.toFixed(2)}×, ${warmed.steps.length} steps: the server’s own drafter ${brought}.`;
}

function pace(ratio, drafted, plain) {
  const rates = `${drafted.tokensPerSecond.toFixed(0)} tokens a second instead of ${plain.tokensPerSecond.toFixed(0)}`;
  const steps = `${drafted.steps.length} steps instead of ${plain.steps.length}`;
  return `${rates}, ${steps}${ratio < 1 ? ": here drafting cost more than it saved" : ""}.`;
}

function sameness(plain, drafted, sampled, served) {
  const at = firstDifference(plain.ids, drafted.ids);
  if (at < 0) return `The same ${plain.tokens} tokens, one for one.`;
  if (sampled) return "The texts are two draws from the same distribution.";
  const why = served.dtype === "float32" ? "" : `, as may happen in ${served.dtype} where two choices nearly tie`;
  return `The texts part at token ${at + 1}${why}.`;
}
