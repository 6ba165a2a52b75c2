"""The loop: draft, forward, accept, keep, learn.

One step runs in one direction (`TreeStepper.step`, then `learn`). The drafter proposes a tree from the text so far; one
forward pass gives the target's logits after every node; acceptance finds the tokens to emit and trims them at the end
of the text; the cache keeps the accepted slots; the step is handed out, and the drafter learns from it. The last token
of the text is never in the cache: it is the root of the next draft. So the pass over the prompt's last token verifies
the first draft, every emitted token belongs to a step, and plain decoding is the same loop with a lone root.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeVar

import torch
from transformers.cache_utils import Cache

from ..drafters._base import Drafter
from ..model.cache_layers import takes_frames
from ..model.kv_cache import TreeCache, slots, unroll
from ..model.pass_times import costs_of, pass_times
from ..model.prefill import Reading, cross_border
from ..model.tree_model import TreeModel
from ..trees.draft import Draft, Step
from ..trees.packed import PackedTrees, send
from .accept import GreedySteps, accept_walk
from .known import NOTHING_KNOWN, Known
from .prompt import first_logits, give_states, prefill, reads_alone, reads_along
from .state import Row, Run, Sequence, TokenSelector, check_held, places_left
from .stats import Clock, Stats


class Stepper(Protocol):
    """A way to make steps: here, or replayed on a device. Reads the prompts when it is made or with its first step."""

    def step(self, going: list[int]) -> list[Step]:
        """One pass over all texts: the steps of those that are `going`, trimmed at the end, with their slots kept."""

    def learn(self) -> None:
        """Learn from the last step, whose tokens are out."""

    def leave(self, gone: Collection[Row]) -> None:
        """Remove finished texts; at least one must remain. The last one takes the place of a removed one."""

    def close(self) -> None:
        """After the last step, ended or not: leave in the cache all tokens of each text but the last."""

    def describe(self) -> str:
        """Which way this is and, if another one was wanted, why not."""


S = TypeVar("S", bound=Stepper)


class _Pass(NamedTuple):
    """What one pass gives for all texts, at all n nodes of the largest draft."""

    lengths: list[int]  # tokens of each text that were cached before
    logits: torch.Tensor  # (batch, n, vocabulary)
    states: torch.Tensor | None = None  # (batch, n, states * hidden), where drafters read hidden states


class TreeStepper:
    """The ordinary way: drafts of any shape, any number of texts, every way of choosing tokens."""

    def __init__(self, run: Run) -> None:
        self.run = run
        unroll(run.cache)
        if not reads_along(run):
            prefill(run)
        self._kept = TreeCache(run.cache)
        self._steps: list[Step] = []
        """Not yet learned from."""
        self._trees: PackedTrees | None = None
        """Those of the drafts of this step, where they were sent to the device in one copy."""
        self._prompt_alone = False
        """Whether the last pass read the prompts before any draft was made."""
        self._prompt_states: list[torch.Tensor] = []
        """Hidden states of the prompts that the last pass read, where drafters need them."""

    def step(self, going: list[int]) -> list[Step]:
        """One pass over all texts; see `Stepper`. Whoever has taken its tokens calls `learn`."""
        clock = self.run.clock
        self._prompt_alone, self._trees = clock.reads_prompt and self.run.prompt_alone, None
        drafts = self.run.drafts([] if self._prompt_alone else going)
        clock.lap("retrieve")
        seen = self._forward(drafts, going)
        clock.lap("forward")
        self._steps = self._accept(drafts, seen, going)
        clock.lap("verify")
        self._keep(seen)
        clock.lap("update cache")
        return self._steps

    def _forward(self, drafts: list[Draft], going: list[int]) -> _Pass:
        """One forward pass over all trees. Finished rows may have no position left: they are fully masked."""
        run, rows = self.run, self.run.rows
        if run.target.info.border is not None:
            cross_border(run.target, run.texts, run.cache)
        lengths = [row.sequence.length - 1 for row in rows]
        held = run.cache.get_seq_length()
        with run.states() as states:
            logits = self._logits(drafts, lengths, going)
        if states is None:
            return _Pass(lengths, logits)
        n, read = logits.shape[1], torch.cat(states, dim=1).to(run.target.device)
        if 0 < read.shape[1] - n == max(lengths) - held:  # shorter texts stand behind padding
            self._prompt_states = [read[row, max(lengths) - length : -n] for row, length in enumerate(lengths)]
        return _Pass(lengths, logits, read[:, -n:])

    def _logits(self, drafts: list[Draft], lengths: list[int], going: list[int]) -> torch.Tensor:
        """Logits (batch, n, vocabulary) after all nodes; reads in the same pass what of a prompt is not cached."""
        run, target, cache = self.run, self.run.target, self.run.cache
        logits = first_logits(run, drafts, self._prompt_alone) if run.clock.reads_prompt else None
        if logits is None:
            lengths = [length if row in going else 0 for row, length in enumerate(lengths)]
            held = cache.get_seq_length()
            if target.inputs.fixed_shapes and held:
                TreeCache(cache)  # takes over its layers, where the prompt was read without a draft
            if target.inputs.fixed_shapes and takes_frames(cache):
                inputs, self._trees = target.inputs.of_packed(drafts, lengths, held)
            else:
                inputs = target.inputs.of(drafts, lengths, held)
            run.clock.lap("prepare")
            logits = target.forward(inputs, cache)
        # Whoever reads rows one by one is faster in 32 bits.
        return logits if self._at_once(logits, going) else logits.float()

    def _at_once(self, logits: torch.Tensor, going: list[int]) -> bool:
        """Whether whole trees are judged at once: waiting for an accelerator costs more than all rows of logits."""
        return logits.device.type != "cpu" and all(self.run.rows[row].selector.greedy for row in going)

    def _accept(self, drafts: list[Draft], seen: _Pass, going: list[int]) -> list[Step]:
        """The steps of the texts that are `going`, but for those whose own parts have failed."""
        steps, at_once = [], None
        if self._at_once(seen.logits, going):
            logits = seen.logits
            trees = self._trees or send(drafts, seen.lengths, logits.shape[1], logits.device)
            at_once = GreedySteps(drafts, logits, trees, max(self.run.rows[row].traits.top_k for row in going))
        for row in going:
            text, draft, n = self.run.rows[row], drafts[row], len(drafts[row].tree)
            if text.error is not None:
                continue
            with text.guarded():
                append = text.sequence.append
                if at_once is not None:
                    step = at_once.step(row, append)
                else:
                    step = accept_walk(draft, seen.logits[row, :n], append, text.selector, row)
                if seen.states is not None:
                    step = replace(step, states=seen.states[row, :n])
                steps.append(step)
        return steps

    def _keep(self, seen: _Pass) -> None:
        """Keep the slots of accepted nodes."""
        if not self._prompt_alone:  # the first token waits for no copies
            accepted = {step.row: step.accepted for step in self._steps}
            first = self.run.cache.get_seq_length() - seen.logits.shape[1]
            self._kept.keep(first, seen.lengths, [accepted.get(row, []) for row in range(len(seen.lengths))])

    def learn(self) -> None:
        """Learn from the last step; ask now for the draft that was left out where a prompt was read alone."""
        steps, self._steps = {step.row: step for step in self._steps}, []
        target, costs = self.run.target, self.run.costs
        if self._prompt_states:
            give_states(self.run, self._prompt_states)
            self._prompt_states = []
        for index, row in enumerate(self.run.rows):
            with row.guarded():
                if self._prompt_alone:
                    row.ask(target, costs, row.prompt, room=1)
                if index in steps:
                    row.observe(target, costs, steps[index])

    def close(self) -> None:
        """Do nothing: the cache is up to date after every step."""

    def describe(self) -> str:
        return "ordinary"

    def join(self, other: TreeStepper) -> None:
        """Add the texts of another run of the same model, after their first steps."""
        self._kept.join(other._kept)
        self.run.rows += other.run.rows

    def leave(self, gone: Collection[Row]) -> None:
        """Remove finished rows; at least one must remain. The last row takes the place of a removed one."""
        rows, order = self.run.rows, places_left(self.run.rows, gone)
        rows[:] = [rows[row] for row in order]
        self._kept.select(order, max(row.sequence.length - 1 for row in rows))


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
    kind: str = "",
    streamed: bool = False,
    reading: Reading | None = None,
    keeps_all: bool = True,
    returns_cache: bool = True,
    known: Known = NOTHING_KNOWN,
) -> Generator[list[Step]]:
    """Yields the steps of one forward pass after another, one step for every text that had not ended, until all have.

    `cache` holds nothing or a prefix of each text, from slot 0 on: `held[row]` tokens of it, if they are not equally
    many. Afterwards it holds of each text all but the last token, then slots of no text. If not `keeps_all`, texts
    leave it when they end, and rows of steps are places among those left: passes over fewer texts take less time.
    If not `returns_cache`, it may hold anything.
    `after_pass` is called after every pass and may end texts. `stepper` makes the steps, and `kind` names them.
    `streamed`: the first token is waited for, so the pass over a long prompt verifies no draft, which would delay it.
    `reading` is called before pieces of a prompt, and may raise. `known`: of every text.
    """
    held = held or [slots(cache)] * len(sequences)
    rows = [
        Row(sequence, selector, drafter, stats, cached, known)
        for sequence, selector, cached in zip(sequences, selectors, held, strict=True)
    ]
    longest = max(sequence.length for sequence in sequences)
    anew = drafter.traits.begins_anew
    target = target.unmeasured() if anew else target
    costs = costs_of(target, len(sequences), longest, kind, fixed=anew)
    run = Run(target, list(rows), costs, cache, Clock(stats, target.device), streamed or anew, reading, returns_cache)
    made = begin(run, stepper)
    going = list(range(len(rows)))
    try:
        while going:
            steps = made.step(going)
            count(run, steps)
            if after_pass is not None:
                after_pass()
            going = [row for row in going if not run.rows[row].sequence.ended]
            try:
                yield steps
            finally:
                learn(run, made)
            if not keeps_all and 0 < len(going) < len(run.rows):
                made.leave([row for row in run.rows if row.sequence.ended])
                going = list(range(len(run.rows)))
                costs.share(len(going), max(row.sequence.length for row in run.rows))
    finally:
        made.close()
        for row in rows:
            row.finish()
        pass_times(target, kind).keep()


def begin(run: Run, stepper: Callable[[Run], S]) -> S:
    """Create the stepper of a run. Raises ValueError for a cache that holds all of a text."""
    for row in run.rows:
        check_held(row.held, row.sequence.length)
        row.stats.prompt_tokens += row.sequence.length
    stats = run.rows[0].stats
    run.prompt_alone = reads_alone(run)
    stats.drafter = "" if run.prompt_alone else run.text_drafter(run.rows[0]).describe()
    made = stepper(run)
    stats.path = made.describe()
    return made


def count(run: Run, steps: list[Step]) -> None:
    """Count the steps of one pass, and what it took."""
    for step in steps:
        run.rows[step.row].stats.count(step)
    run.costs.nodes = max((len(step.draft.tree) for step in steps), default=1)
    if run.clock.reads_prompt:
        run.clock.reads_prompt = False
        for step in steps:
            run.rows[step.row].stats.first_tokens += len(step.tokens)
    elif steps:
        longest = max(run.rows[step.row].sequence.length for step in steps)
        run.costs.took(run.costs.nodes, run.clock.pass_seconds, longest)


def learn(run: Run, stepper: Stepper) -> None:
    """Let drafters learn from the last steps of a run, whose tokens are out."""
    run.clock.restart()
    stepper.learn()
    run.clock.lap("update matrix")
