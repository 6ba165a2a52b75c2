// The page: generate, race, stop, and select a step.

import { about, ServerError, steps } from "./api.js";
import { goOn } from "./chat.js";
import { byId, plural, reducedMotion } from "./dom.js";
import { Explorer } from "./explorer.js";
import * as form from "./form.js";
import { Lane } from "./lane.js";
import { Replay } from "./replay.js";
import { Run } from "./run.js";
import { showVerdict } from "./verdict.js";

const FIGURES_EVERY = 200; // milliseconds, so that the numbers stay readable

const explorer = new Explorer(choose);
const replay = new Replay();
const seen = new Set(); // prompts that this page has sent to the server's own drafter
let [lanes, served, controller, races] = [[], null, null, 0];

/** Shows a step in all lanes and in the explorer. */
function choose(run, index) {
  for (const lane of lanes) {
    lane.mark(lane.run === run ? index : null);
    if (lane.run === run) lane.reveal(index);
  }
  explorer.show(run, index);
}

const setStatus = (text) => (byId("status").textContent = text);

function showError(text) {
  byId("error").textContent = text;
  byId("error").hidden = !text;
}

/** Runs `work` with a signal that the stop button aborts; shows its errors, or `stopped()` after an abort. */
async function busy(work, stopped) {
  if (controller) return;
  form.takeKey();
  if (!form.isComplete()) return;
  controller = new AbortController();
  showError("");
  clear();
  showButtons(true);
  bringIntoView();
  try {
    if (!served) await connect();
    await work(form.request(), controller.signal);
  } catch (error) {
    if (error.name === "AbortError") setStatus(stopped());
    else failed(error);
  } finally {
    controller = null;
    byId("progress").hidden = true;
    showButtons(false);
  }
}

function failed(error) {
  const expected = error instanceof ServerError;
  if (!expected) console.error(error);
  if (error.status === 401) form.askForKey(true);
  showError(expected ? error.message : `Internal error of this page: ${error.message}`);
  setStatus("");
}

/** Scrolls to the results if they begin in the lower half of the window, as on a phone. */
function bringIntoView() {
  const status = byId("status");
  if (status.getBoundingClientRect().top < 0.5 * innerHeight) return;
  status.scrollIntoView({ block: "start", behavior: reducedMotion.matches ? "instant" : "smooth" });
}

function clear() {
  replay.clear();
  explorer.clear();
  byId("verdict").hidden = true;
  show([]);
}

function show(shown) {
  lanes = shown;
  byId("lanes").replaceChildren(...lanes.map((lane) => lane.element));
  byId("empty").hidden = true;
  if (lanes.length) bringIntoView();
  document.body.classList.toggle("raced", lanes.length > 1);
}

/** While running, the stop button replaces the start buttons and takes their focus. */
function showButtons(running) {
  const started = [byId("generate"), byId("race")];
  const focused = [...started, byId("stop")].includes(document.activeElement);
  for (const button of started) button.hidden = running;
  byId("stop").hidden = !running;
  if (focused) (running ? byId("stop") : started[0]).focus({ preventScroll: true });
}

/** Generates one text into `run`; calls `onStep(run)` after every step. */
async function fillRun(run, body, signal, onStep) {
  if (body.drafter === "accelerated") seen.add(promptOf(body));
  const end = await steps(body, signal, (name, data) => {
    if (name !== "step") return;
    run.add(data);
    onStep(run);
  });
  const reason = end.usage.speculation?.not_accelerated_because;
  if (reason) throw new ServerError(`transformers’ own loop decoded this request, which has no steps: ${reason}`);
  run.finish(end);
  return end;
}

const promptOf = (body) => JSON.stringify([body.prompt ?? body.messages, body.response_format]);
const titleOf = (body) => (body.drafter === "accelerated" ? served.drafter_name : `${body.drafter} (untrained)`);

async function generate(body, signal) {
  const run = new Run(titleOf(body), false);
  const lane = new Lane(run, choose);
  show([lane]);
  setStatus("Generating …");
  const draw = inFrames(lane);
  try {
    const end = await fillRun(run, body, signal, draw);
    const why = end.finish_reason === "length" ? "Token limit reached" : "Output complete";
    setStatus(`${why}. ${summary(run)}`);
    if (body.messages) goOn(body.messages, run.text);
  } finally {
    lane.complete();
    if (!run.steps.length) show([]);
    else choose(run, explorer.run === run ? explorer.index : run.example);
  }
}

/** Draws new steps at most once per frame, and figures less often. */
function inFrames(lane) {
  let [requested, last] = [false, 0];
  return () => {
    if (requested) return;
    requested = true;
    requestAnimationFrame((now) => {
      requested = false;
      lane.extend();
      if (now - last < FIGURES_EVERY) return;
      last = now;
      lane.figures();
    });
  };
}

function summary(run) {
  const { tokens, steps: taken, mat, rate } = run.figures();
  const size = `${plural(tokens, "token")} in ${plural(taken, "step")}`;
  return `${size}: ${mat.toFixed(2)} per step, ${rate.toFixed(0)} tokens/s. ${run.loops}`.trim();
}

/**
 * Measures both runs one after the other, in alternating order, then shows them together. The drafter starts untrained;
 * a run with the server's own drafter, which has learned from requests, is measured after them and reported separately.
 */
async function race(body, signal) {
  const own = body.drafter === "accelerated";
  const drafted = new Run(own ? `${served.drafter_name} (untrained)` : titleOf(body), false);
  const plain = new Run("plain decoding", true);
  const warmed = own && served.isolation !== "per-request" ? new Run(titleOf(body), false) : null;
  const known = seen.has(promptOf(body));
  const sent = new Map([[plain, "plain"], [drafted, own ? "untrained" : body.drafter], [warmed, body.drafter]]);
  const order = races++ % 2 ? [drafted, plain] : [plain, drafted];
  const measured = warmed ? [...order, warmed] : order;
  for (const [at, run] of measured.entries()) {
    setStatus(`${at + 1} of ${measured.length}: measuring ${run.title}. Nothing is drawn during the measurement.`);
    await fillRun(run, { ...body, drafter: sent.get(run) }, signal, progressOf(body.max_tokens));
  }
  show([plain, drafted].map((run) => new Lane(run, choose)));
  for (const lane of lanes) lane.complete();
  showVerdict({ plain, drafted, warmed, known, first: order[0].title, sampled: body.temperature > 0, served });
  setStatus("Race complete.");
  choose(drafted, drafted.example);
  replay.begin(lanes);
}

/** Shows the progress of a run, at intervals that do not affect the measurement. */
function progressOf(most) {
  let last = performance.now();
  Object.assign(byId("progress"), { max: most, value: 0, hidden: false });
  return (run) => {
    const now = performance.now();
    if (now - last < 2 * FIGURES_EVERY) return;
    last = now;
    byId("progress").value = run.tokens;
  };
}

async function connect() {
  served = await about();
  form.askForKey(false);
  form.offer(served);
}

const startGenerating = () => busy(generate, () => (lanes.length ? `Stopped. ${summary(lanes[0].run)}` : "Stopped."));

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  startGenerating();
});
byId("race").addEventListener("click", () => busy(race, () => "The race was stopped before both runs were complete."));
byId("stop").addEventListener("click", () => controller?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") controller?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) startGenerating();
});

form.bringPrompt();
connect().catch(failed);
