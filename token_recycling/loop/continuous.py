"""Continuous batching: texts join and leave a batch between its steps.

A text begins alone: its prompt is read into a cache of its own, and its first step is made there. Then its slots are
put beside those of the others, with whom it takes the same passes (`step.TreeStepper`). A long prompt is read in
pieces: between two of them shorter prompts are read, the others make steps for as long as a piece took, and whoever no
longer waits is let go. An error of its processors, criteria or drafter, or of whoever takes its tokens, ends that text
alone.

Cost: a copy of a text's slots where it joins or leaves; now and then one of all, where room grows. A pass costs as if
all texts were as long as the longest and drafted as many nodes, so nodes are shared out (`BatchState.drafts`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache

from .._util.device import synchronize
from ..model.info import UnsupportedModelError
from ..model.pass_times import costs_of, pass_times
from ..model.prefill import Reading, piece_of
from ..model.tree_model import TreeModel
from ..trees.draft import Step
from .prompt import prefill
from .state import BatchState, RequestState
from .stats import Clock, Stats
from .step import TreeStepper, begin, count, learn

Take = Callable[[Step], None]
_MOST_PASSED_OVER = 8
"""Prompts, or pieces of them, that are read before the oldest one has a piece again: many short ones may come."""


def why_not_batched(target: TreeModel) -> str | None:
    """Why the texts of a model cannot share passes as they come and go, or None if they can."""
    if target.info.processes > 1:
        return (
            f"continuous batching needs a model in one process, got {target.info.processes} processes: sequences "
            "would join at different steps in each"
        )
    return target.info.batch_reason


@dataclass(eq=False)
class _Joining:
    """A text whose prompt is being read."""

    batch: BatchState
    take: Take

    @property
    def row(self) -> RequestState:
        return self.batch.requests[0]

    def unread(self) -> int:
        """Tokens before its last one that are neither read nor kept of another text."""
        row, prefixes = self.row, self.row.hints.prefixes
        held = row.cached if prefixes is None or row.cached else prefixes.known(row.sequence.on_host)
        return row.sequence.length - 1 - held

    def is_given_up(self) -> bool:
        """Whether nobody waits for it any more."""
        if self.batch.reading is not None:
            with self.row.guarded():
                self.batch.reading()
        return self.row.error is not None


class RunningBatch:
    """A batch of texts for continuous batching; used by one thread."""

    def __init__(self, target: TreeModel) -> None:
        """Begin with no texts. Raises UnsupportedModelError for a model whose texts cannot share passes."""
        reason = why_not_batched(target)
        if reason is not None:
            raise UnsupportedModelError(reason)
        self.target = target
        self._costs = costs_of(target, 1, 1)
        self._piece = piece_of(target, 0, others=True)
        self._joining: list[_Joining] = []
        """In the order in which they came."""
        self._passed_over = 0
        """How often others were read since the oldest one was."""
        self._owed = 0.0
        """Seconds of steps that are due before the next piece of a long prompt."""
        self._stepper: TreeStepper | None = None
        """Makes the steps of the texts that have begun; None if there are none."""
        self._takes: dict[RequestState, Take] = {}
        """The texts that have begun, and who is given their steps."""

    @property
    def requests(self) -> list[RequestState]:
        """All texts: those that have begun, and those whose prompts are being read."""
        return [*self._takes, *(joining.row for joining in self._joining)]

    def join(
        self,
        row: RequestState,
        take: Take,
        cache: Cache | None = None,
        streamed: bool = True,
        reading: Reading | None = None,
    ) -> None:
        """Add a text, from the next step on. `take` is given each of its steps, before they are learned from;
        `cache` holds the first `row.cached` of its tokens; `streamed`: somebody waits for the first token; `reading` is
        called before each step while its prompt is being read, and ends the text if it raises.
        """
        cache = self.target.new_cache() if cache is None else cache
        clock, wanted = Clock(row.stats, self.target.device), self._states(row)
        for other in self.requests:
            if None not in (wanted, self._states(other)) and wanted != self._states(other):
                raise ValueError(
                    f"drafters of a batch must need the same hidden states, {self._states(other)}, got {wanted} of "
                    f"{row.drafter.describe()}"
                )
        row.isolated = True
        self._joining.append(
            _Joining(BatchState(self.target, [row], self._costs, cache, clock, streamed, reading), take)
        )

    def _states(self, row: RequestState) -> list[int] | None:
        """Numbers of the layers whose hidden states its drafter needs, or None."""
        states = row.traits.states
        return None if states is None else list(states(self.target.config.num_hidden_layers))

    def leave(self, row: RequestState, error: Exception) -> None:
        """End a text early: the next step returns it."""
        row.error = row.error or error

    @torch.inference_mode(False)  # see `decode`
    @torch.no_grad()
    def step(self) -> list[RequestState]:
        """Read a piece of the waiting prompts, make one pass over all texts, and return those that ended."""
        ended = [*self._given_up(), *self._begin(), *self._drop()]
        if self._stepper is not None:
            began = time.perf_counter()
            try:
                self._pass(self._stepper)
            except Exception as error:  # of the pass itself, which was that of all
                for row in self._takes:
                    row.error = row.error or error
            self._owed -= time.perf_counter() - began
            ended += self._drop()
        return ended

    def _begin(self) -> list[RequestState]:
        """Read a piece of the waiting prompts, make first steps, and return the texts that end with them."""
        left, ended = self._piece, []
        while left > 0 and (joining := self._next(left)) is not None:
            batch, row, began = joining.batch, joining.row, time.perf_counter()
            if row.hints.prefixes is not None and not row.cached:  # by now others may have read what it begins with
                with row.guarded():
                    batch.cache, row.cached = row.hints.prefixes.take(row.sequence.on_host)
                    row.stats.cached_tokens += row.cached
            unread, most = (
                row.sequence.length - 1 - row.cached,
                piece_of(self.target, row.cached, len(self.requests) > 1),
            )
            self._passed_over = 0 if joining is self._joining[0] else self._passed_over + 1
            going_on = False
            if row.error is None:
                self._costs.share(1, row.sequence.length)
                try:
                    going_on = unread > most and self.target.info.reads_on
                    if going_on:
                        batch.clock.restart()
                        prefill(batch, most=most)
                        batch.clock.lap("forward")
                    else:
                        self._first_step(joining)
                except Exception as error:
                    row.error, going_on = error, False
            if unread > most and self._takes:
                synchronize(self.target.device)
                self._owed = time.perf_counter() - began
            left = 0 if going_on else left - max(1, unread)
            if not going_on:
                self._joining.remove(joining)
                if not row.going:
                    row.finish()
                    ended.append(row)
        return ended

    def _next(self, left: int) -> _Joining | None:
        """Whose prompt is read next, where `left` tokens may still be read before the others make a step: the shortest;
        the oldest where others came before it too often. None where none fits, or the others are owed their time.
        """
        if not self._joining:
            return None
        oldest, shortest, fresh = self._joining[0], min(self._joining, key=_Joining.unread), left == self._piece
        if self._passed_over >= _MOST_PASSED_OVER:
            return oldest if fresh else None
        if shortest.unread() <= left:
            return shortest
        return shortest if fresh and not (self._takes and self._owed > 0) else None

    def _given_up(self) -> list[RequestState]:
        """Remove and return the texts that nobody waits for any more, of those whose prompts are being read; what was
        read of them is kept.
        """
        gone = [joining for joining in self._joining if joining.is_given_up()]
        for joining in gone:
            self._joining.remove(joining)
            row = joining.row
            if row.hints.prefixes is not None:
                with row.guarded():
                    row.hints.prefixes.keep(row.sequence.on_host[: row.cached + 1], joining.batch.cache)
            row.finish()
        return [joining.row for joining in gone]

    def _first_step(self, joining: _Joining) -> None:
        """Make a text's first step alone; then let it go on with the others."""
        batch, row = joining.batch, joining.row
        batch.clock.restart()
        alone = begin(batch, TreeStepper)
        _step(batch, alone, [joining.take])
        _keep_text(batch, 0)
        if not row.going:
            return
        if self._stepper is None:
            self._stepper = alone
        else:
            self._stepper.join(alone)
        self._takes[row] = joining.take

    def _pass(self, stepper: TreeStepper) -> None:
        """Make one pass over all texts; its time counts for each of them."""
        batch = stepper.batch
        self._costs.share(len(batch.requests), max(row.sequence.length for row in batch.requests))
        batch.clock.stats = spent = Stats(batch.requests[0].stats.synchronize)
        batch.clock.restart()
        _step(batch, stepper, [self._takes[row] for row in batch.requests])
        for place, row in enumerate(batch.requests):
            row.stats.spend(spent)
            if not row.going:
                _keep_text(batch, place)

    def _drop(self) -> list[RequestState]:
        """Remove the texts that have ended, and return them."""
        gone = [row for row in self._takes if not row.going]
        for row in gone:
            row.finish()
            del self._takes[row]
        if not self._takes:
            self._stepper = None
            if gone:  # nobody waits for a token
                pass_times(self.target).keep()
        elif gone and self._stepper is not None:
            self._stepper.leave(gone)
        return gone


def _step(batch: BatchState, stepper: TreeStepper, takes: Sequence[Take]) -> None:
    """Make one step of each text of a batch, give it to its `takes`, then learn from it."""
    steps = stepper.step(list(range(len(batch.requests))))
    count(batch, steps)
    for row in batch.requests:
        row.whole = False
    for step in steps:
        batch.requests[step.row].whole = True
        with batch.requests[step.row].guarded():
            takes[step.row](step)
    learn(batch, stepper)


def _keep_text(batch: BatchState, place: int) -> None:
    """Keep the slots of a text for those that begin as it does, unless its last step failed."""
    row = batch.requests[place]
    if row.hints.prefixes is not None and row.whole:
        with row.guarded():
            row.hints.prefixes.keep(row.sequence.on_host, batch.cache, place)
