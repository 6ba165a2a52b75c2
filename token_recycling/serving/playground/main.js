// The page: what happens when something is generated, raced, stopped or chosen.

import { about, ServerError, steps } from "./api.js";
import { byId, calm, counted } from "./dom.js";
import { Explorer } from "./explorer.js";
import * as form from "./form.js";
import { Lane } from "./lane.js";
import { Replay } from "./replay.js";
import { Run } from "./run.js";
import { showVerdict } from "./verdict.js";

const FIGURES_EVERY = 200; // milliseconds, so that the numbers can be read

const explorer = new Explorer(choose);
const replay = new Replay();
const seen = new Set(); // prompts that the server's own drafter was given from here
let [lanes, served, going, races] = [[], null, null, 0];

/** Shows a step everywhere. */
function choose(run, index) {
  for (const lane of lanes) {
    lane.mark(lane.run === run ? index : null);
    if (lane.run === run) lane.reveal(index);
  }
  explorer.show(run, index);
}

const say = (text) => (byId("status").textContent = text);

function complain(text) {
  byId("error").textContent = text;
  byId("error").hidden = !text;
}

/** Runs `work` with a signal that the stop button aborts; whatever goes wrong is said. */
async function busy(work, stopped) {
  if (going) return;
  form.takeKey();
  if (!form.isComplete()) return;
  going = new AbortController();
  complain("");
  clear();
  showButtons(true);
  bringIntoView();
  try {
    if (!served) await connect();
    await work(form.request(), going.signal);
  } catch (error) {
    if (error.name === "AbortError") say(stopped());
    else failed(error);
  } finally {
    going = null;
    byId("progress").hidden = true;
    showButtons(false);
  }
}

function failed(error) {
  const expected = error instanceof ServerError;
  if (!expected) console.error(error);
  if (error.status === 401) form.askForKey(true);
  complain(expected ? error.message : `The page failed: ${error.message}`);
  say("");
}

/** Scrolls to the results where they begin in the lower half of the window, as on a phone. */
function bringIntoView() {
  const status = byId("status");
  if (status.getBoundingClientRect().top < 0.5 * innerHeight) return;
  status.scrollIntoView({ block: "start", behavior: calm.matches ? "instant" : "smooth" });
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

/** Stop takes the place, and the focus, of the buttons that start. */
function showButtons(running) {
  const started = [byId("generate"), byId("race")];
  const focused = [...started, byId("stop")].includes(document.activeElement);
  for (const button of started) button.hidden = running;
  byId("stop").hidden = !running;
  if (focused) (running ? byId("stop") : started[0]).focus({ preventScroll: true });
}

/** One text; `onStep(run)` is called after every step. */
async function made(run, body, signal, onStep) {
  if (body.drafter === "accelerated") seen.add(promptOf(body));
  const end = await steps(body, signal, (name, data) => {
    if (name !== "step") return;
    run.add(data);
    onStep(run);
  });
  const reason = end.usage.speculation?.not_accelerated_because;
  if (reason) throw new ServerError(`The server left this to transformers, which has no steps: ${reason}`);
  run.finish(end);
  return end;
}

const promptOf = (body) => JSON.stringify(body.prompt ?? body.messages);
const titleOf = (body) => (body.drafter === "accelerated" ? served.drafter_name : `${body.drafter} (anew)`);

async function generate(body, signal) {
  const run = new Run(titleOf(body), false);
  const lane = new Lane(run, choose);
  show([lane]);
  say("Generating …");
  const draw = inFrames(lane);
  try {
    const end = await made(run, body, signal, draw);
    const why = end.finish_reason === "length" ? "The limit of tokens is reached" : "The text is complete";
    say(`${why}. ${summary(run)}`);
  } finally {
    lane.complete();
    if (!run.steps.length) show([]);
    else choose(run, explorer.run === run ? explorer.index : run.telling);
  }
}

/** Draws what has come once a frame, and figures less often. */
function inFrames(lane) {
  let [asked, last] = [false, 0];
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame((now) => {
      asked = false;
      lane.extend();
      if (now - last < FIGURES_EVERY) return;
      last = now;
      lane.figures();
    });
  };
}

function summary(run) {
  const { tokens, steps: taken, mat, rate } = run.figures();
  const made = `${counted(tokens, "token")} in ${counted(taken, "step")}`;
  return `${made}: ${mat.toFixed(2)} a step, ${rate.toFixed(0)} a second.`;
}

/** Both ways one after the other, the first one in turn, then shown together. */
async function race(body, signal) {
  const drafted = new Run(titleOf(body), false);
  const plain = new Run("plain decoding", true);
  const keeps = body.drafter === "accelerated" && served.isolation !== "per-request";
  const learned = { keeps, prompt: seen.has(promptOf(body)) };
  const order = races++ % 2 ? [drafted, plain] : [plain, drafted];
  for (const [at, run] of order.entries()) {
    say(`${at + 1} of 2: measuring ${run.title}. Nothing is drawn meanwhile.`);
    const asked = run.plain ? { ...body, drafter: "plain" } : body;
    await made(run, asked, signal, progressOf(body.max_tokens));
  }
  show([plain, drafted].map((run) => new Lane(run, choose)));
  for (const lane of lanes) lane.complete();
  showVerdict({ plain, drafted, first: order[0].title, learned, sampled: body.temperature > 0, served });
  say("Race complete.");
  choose(drafted, drafted.telling);
  replay.begin(lanes);
}

/** Shows how far a run is, seldom enough to cost nothing. */
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
byId("race").addEventListener("click", () => busy(race, () => "The race was stopped; there is nothing to compare."));
byId("stop").addEventListener("click", () => going?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") going?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) startGenerating();
});

form.suggest();
connect().catch(failed);
