// Replays two runs, which were measured one after the other, side by side in measured time.

import { byId, reducedMotion } from "./dom.js";

export class Replay {
  constructor() {
    this.lanes = [];
    this.playing = false;
    [this.play, this.clock, this.time, this.speed] = ["play", "clock", "time", "speed"].map(byId);
    this.play.addEventListener("click", () => this.#toggle());
    this.clock.addEventListener("input", () => {
      this.#pause();
      this.#show(Number(this.clock.value));
    });
  }

  /** Shows the end of a race, then plays it from the start unless the user prefers reduced motion. */
  begin(lanes) {
    this.lanes = lanes;
    this.span = Math.max(...lanes.map((lane) => lane.run.seconds));
    this.clock.max = this.span;
    for (const lane of lanes) lane.drawTrack(this.span);
    byId("replay").hidden = false;
    this.#show(this.span);
    if (!reducedMotion.matches) this.#start(0);
  }

  /** Stops and hides the replay. */
  clear() {
    this.#pause();
    this.lanes = [];
    byId("replay").hidden = true;
  }

  #toggle() {
    if (this.playing) this.#pause();
    else this.#start(this.now >= this.span ? 0 : this.now);
  }

  #start(from) {
    this.playing = true;
    this.play.textContent = "Pause";
    let [shown, before] = [from, performance.now()];
    const frame = (now) => {
      if (!this.playing) return;
      shown = Math.min(this.span, shown + ((now - before) / 1000) * Number(this.speed.value));
      before = now;
      this.#show(shown);
      if (shown >= this.span) this.#pause();
      else requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  #pause() {
    this.playing = false;
    this.play.textContent = "Play";
  }

  #show(seconds) {
    this.now = seconds;
    this.clock.value = seconds;
    const label = `${seconds.toFixed(2)} s of ${this.span.toFixed(2)} s`;
    this.clock.setAttribute("aria-valuetext", label);
    this.time.textContent = label;
    for (const lane of this.lanes) lane.showAt(seconds);
  }
}
