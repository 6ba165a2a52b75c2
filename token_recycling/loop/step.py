"""The loop: draft, forward, accept, keep, learn.

One step runs in one direction (`TreeStepper.step`). The drafter proposes a tree from the text so far; one forward pass
gives the target's logits after every node; acceptance finds the tokens to emit and trims them at the end of the text;
the cache keeps the accepted slots; the step is handed out, and the drafter learns from it. The last token of the text
is never in the cache: it is the root of the next draft. So the prompt's last token is the first root, its pass verifies
the first draft, every emitted token belongs to a step, and plain decoding is the same loop with a lone root.

Steps may also be made in another way, such as replayed on a device: whoever calls `decode` passes the stepper in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from contextlib import nullcontext
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
from transformers.cache_utils import Cache

from ..drafters._base import Drafter
from ..model.inspection import hidden_states
from ..model.kv_cache import TreeCache, slots, unroll
from ..model.pass_costs import PassCosts
from ..model.prefill import cross_border, first_pass, read_prompts
from ..model.step_costs import StepCosts
from ..model.tree_model import TreeModel
from ..trees.draft import Draft, Step
from .accept import accept_greedy, accept_walk
from .run import Row, Run
from .stats import Clock, Stats
from .text import Sequence, TokenSelector


class Stepper(Protocol):
    """A way to make steps. It reads the prompts when it is made, or with its first step."""

    def step(self, going: list[int]) -> list[Step]:
        """One pass over all texts: the steps of those that are `going`, trimmed at the end, with their slots kept."""

    def learn(self) -> None:
        """From the last step, whose tokens are out."""

    def close(self) -> None:
        """After the last step, whether or not all texts have ended: leaves in the cache all but their last tokens."""

    def describe(self) -> str:
        """Which way this is and, if another one was wanted, why not."""


S = TypeVar("S", bound=Stepper)


class TreeStepper:
    """The ordinary way: drafts of any shape, any number of texts, every way of choosing tokens."""

    def __init__(self, run: Run, reason: str = "") -> None:
        """`reason`: why not another way."""
        self.run, self._reason = run, reason
        unroll(run.cache)
        if not run.reads_along:
            run.prefill()
        self._kept = TreeCache(run.cache)
        self._steps: list[Step] = []
        """The last ones, not yet learned from."""
        self._prompt_alone = False
        """Whether the last one was made before the drafter was asked."""
        self._prompt_states: list[torch.Tensor] = []
        """Those of the prompts that were read with the last one, where the drafter needs them."""

    def step(self, going: list[int]) -> list[Step]:
        run, clock = self.run, self.run.clock
        target, rows, cache = run.target, run.rows, run.cache

        # Draft.
        self._prompt_alone = clock.reads_prompt and run.prompt_alone
        drafts = run.drafts([] if self._prompt_alone else going)
        clock.lap("retrieve")

        # Forward. A text that has ended may have no position left: it sees nothing, as if it began anew.
        cross_border(target, run.texts, cache)
        lengths, held = [row.sequence.length - 1 for row in rows], cache.get_seq_length()
        needs_hidden = any(row.traits.hidden_states for row in rows)
        with hidden_states(target.model) if needs_hidden else nullcontext() as hidden, run.states() as seen:
            logits = self._forward(drafts, [length * (row in going) for row, length in enumerate(lengths)])
        # Waiting for an accelerator costs more than reading all rows of logits there; on a CPU it is the other way
        # round.
        at_once = target.device.type != "cpu" and all(rows[row].selector.greedy for row in going)
        if not at_once:
            logits = logits.float()  # for all who read rows of them: one by one takes longer in 16 bits
        clock.lap("forward")

        # Accept.
        steps = []
        for row in going:
            if rows[row].error is None:
                with run.own(rows[row]):
                    steps.append(self._accept(drafts[row], logits[row, : len(drafts[row].tree)], row, at_once))
        if hidden is not None:
            states = hidden[-1].to(target.device)[:, -logits.shape[1] :]
            steps = [replace(step, hidden=states[step.row, : len(step.draft.tree)]) for step in steps]
        if seen is not None:
            states = torch.cat(seen, dim=1).to(target.device)
            before, states = states[:, : -logits.shape[1]], states[:, -logits.shape[1] :]
            if 0 < before.shape[1] == max(lengths) - held:  # shorter texts stand behind padding
                self._prompt_states = [before[row, max(lengths) - length :] for row, length in enumerate(lengths)]
            steps = [replace(step, states=states[step.row, : len(step.draft.tree)]) for step in steps]
        clock.lap("verify")

        # Keep. A prompt that was read alone is kept as it is: the first token waits for no copies.
        if not self._prompt_alone:
            accepted = {step.row: step.accepted for step in steps}
            first = cache.get_seq_length() - logits.shape[1]
            self._kept.keep(first, lengths, [accepted.get(row, []) for row in range(len(rows))])
        clock.lap("update cache")

        self._steps = steps
        return steps

    def _forward(self, drafts: list[Draft], lengths: list[int]) -> torch.Tensor:
        """Logits (batch, n, vocabulary) after all nodes. What of a prompt is not in the cache is read in the same
        pass.
        """
        run, cache = self.run, self.run.cache
        if self._prompt_alone and run.target.support.recurrent:
            return read_prompts(run.target, run.texts, cache, run.observers)
        if len(drafts) == 1 and cache.get_seq_length() < lengths[0]:
            return first_pass(run.target, run.texts[0], drafts[0], cache)
        inputs = run.target.inputs.of(drafts, lengths, cache.get_seq_length())
        run.clock.lap("prepare")
        return run.target.forward(inputs, cache)

    def _accept(self, draft: Draft, logits: torch.Tensor, row: int, at_once: bool) -> Step:
        own = self.run.rows[row]
        if at_once:
            return accept_greedy(draft, logits, own.sequence.append, row)
        return accept_walk(draft, logits, own.sequence.append, own.selector, row)

    def learn(self) -> None:
        run, prompt_states = self.run, self._prompt_states
        steps = {step.row: step for step in self._steps}
        self._prompt_states, self._steps = [], []
        for row, own in enumerate(run.rows):
            with run.own(own):
                if prompt_states:
                    run.drafting(row).read_prompt(prompt_states[row])
                if self._prompt_alone:
                    run.draft_late(row)
                if row in steps:
                    run.drafting(row).observe(steps[row])

    def close(self) -> None:
        """Nothing: the cache is up to date after every step."""

    def describe(self) -> str:
        return f"ordinary: {self._reason}" if self._reason else "ordinary"

    def join(self, other: TreeStepper) -> None:
        """The texts of another run of the same model, which have their first steps behind them, go on with these."""
        self._kept.join(other._kept)
        self.run.rows += other.run.rows

    def leave(self, gone: Collection[Row]) -> None:
        """All but these go on, of which there must be some. The last one takes the place of one that has gone."""
        rows = self.run.rows
        order = list(range(len(rows)))
        for place in reversed(range(len(rows))):
            if rows[place] in gone:
                order[place] = order[-1]
                order.pop()
        self.run.rows[:] = [rows[row] for row in order]
        self._kept.select(order, max(row.sequence.length - 1 for row in self.run.rows))


@torch.inference_mode(False)  # what is kept from call to call must be of use outside of it too
@torch.no_grad()
def decode(
    target: TreeModel,
    sequences: list[Sequence],
    drafter: Drafter,
    selectors: list[TokenSelector],
    cache: Cache,
    stats: Stats,
    *,
    held: list[int] | None = None,
    after_pass: Callable[[], None] | None = None,
    stepper: Callable[[Run], Stepper] = TreeStepper,
    costs: PassCosts | None = None,
    streamed: bool = False,
    keeps_all: bool = True,
) -> Generator[list[Step]]:
    """Yields the steps of one forward pass after another, one step for every text that had not ended, until all have.

    `cache` holds nothing or a prefix of each text, from slot 0 on: `held[row]` tokens of it, if they are not equally
    many. Afterwards it holds of each text all but the last token; where texts differ in length, the slots after the
    shorter ones are of no text. If not `keeps_all`, texts leave it when they end, and rows of steps are places among
    those that are left: passes over fewer texts take less time. `after_pass` is called after every pass and may end
    texts. `stepper` makes the steps, and `costs` says what they cost; both are the ordinary ones if not given.
    `streamed`: the first token is waited for, so that the pass over a long prompt verifies no draft, whose rows would
    delay it; the text takes a step more then.
    """
    held = held or [slots(cache)] * len(sequences)
    rows = [
        Row(sequence, selector, drafter, stats, own)
        for sequence, selector, own in zip(sequences, selectors, held, strict=True)
    ]
    longest = max(sequence.length for sequence in sequences)
    step_costs = StepCosts(costs or PassCosts(target), len(sequences), longest, sequences[0].on_host)
    run = Run(target, rows, step_costs, cache, Clock(stats, target.device), streamed)
    steps_of = begin(run, stepper)
    going = list(range(len(rows)))
    try:
        while going:
            steps = steps_of.step(going)
            run.count(steps)
            if after_pass is not None:
                after_pass()
            going = [row for row in going if not run.rows[row].sequence.ended]
            try:
                yield steps
            finally:
                learn(run, steps_of)
            if not keeps_all and 0 < len(going) < len(run.rows):
                assert isinstance(steps_of, TreeStepper), "other ways are for one text"
                steps_of.leave([row for row in run.rows if row.sequence.ended])
                going = list(range(len(run.rows)))
                step_costs.share(len(going), max(row.sequence.length for row in run.rows))
    finally:
        steps_of.close()


def begin(run: Run, stepper: Callable[[Run], S]) -> S:
    """What makes the steps of a run, before the first of them."""
    for row in run.rows:
        check_held(row.held, row.sequence.length)
        row.stats.prompt_tokens += row.sequence.length
    stats = run.rows[0].stats
    stats.drafter = "" if run.prompt_alone else run.drafting(0).describe()
    made = stepper(run)
    stats.path = made.describe()
    return made


def check_held(held: int, length: int) -> None:
    """Raises ValueError for a cache of `held` tokens of a text that is no longer: its last token is the first root."""
    if held >= length:
        raise ValueError(
            f"expected a cache of fewer than the {length} tokens given, got one of {held}; pass the whole text so far"
        )


def learn(run: Run, steps_of: Stepper) -> None:
    """From the last steps of a run, whose tokens are out."""
    run.clock.restart()
    steps_of.learn()
    run.count_drafting()
