"""Many texts at once: a batch that texts join and leave between its steps.

A text begins alone: its prompt is read into a cache of its own, in pieces if it is long, so that the others wait for no
more than one piece, and its first step is made there. Then its slots are put beside those of the others, with whom it
takes the same passes as the texts of any batch (`decode.TreeStepper`). How it grows, chooses, ends and learns is its
own; and so is what fails: an error of its processors, criteria or drafter, or of whoever takes its tokens, ends that
text alone. Each text is what it would be by itself.

Cost: for a text that joins or leaves, a copy of its slots; now and then one of all, where room grows. A pass costs as
if all texts were as long as the longest, and drafted as many nodes as the largest tree has: so nodes are divided
(`Run.drafts`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from transformers.cache_utils import Cache

from ..model.pass_costs import PassCosts
from ..model.prefill import PIECE
from ..model.step_costs import StepCosts
from ..model.support import UnsupportedModelError
from ..model.tensor_parallel import processes
from ..model.tree_model import TreeModel
from ..trees.draft import Step
from .run import Row, Run
from .stats import Clock, Stats
from .step import TreeStepper, begin, learn

Take = Callable[[Step], None]


def why_not_many(target: TreeModel) -> str | None:
    """Why the texts of a model cannot share passes as they come and go, or None if they can."""
    if processes(target.model) > 1:
        return (
            f"expected a model in one process, got one in {processes(target.model)}: texts would join at other steps "
            "in each"
        )
    return target.support.batch_reason


class _Joining(NamedTuple):
    """A text whose prompt is being read."""

    run: Run
    take: Take


class RunningBatch:
    """Texts that are decoded together; for one thread."""

    def __init__(self, target: TreeModel, costs: PassCosts | None = None) -> None:
        """`costs` says what passes cost, the ordinary ones if not given. Raises UnsupportedModelError for a model whose
        texts cannot share passes.
        """
        reason = why_not_many(target)
        if reason is not None:
            raise UnsupportedModelError(reason)
        self.target = target
        self._costs = StepCosts(costs or PassCosts(target), 1, 1)
        self._joining: deque[_Joining] = deque()
        self._together: TreeStepper | None = None
        """Makes the steps of the texts that have begun; None if there is none."""
        self._takes: dict[Row, Take] = {}
        """Of these."""

    @property
    def rows(self) -> list[Row]:
        """The texts that have begun, and those whose prompts are being read."""
        return [*self._takes, *(run.rows[0] for run, _ in self._joining)]

    def join(self, row: Row, take: Take, cache: Cache | None = None, streamed: bool = True) -> None:
        """Lets a text take part from the next step on. `take` is given each of its steps, before they are learned from;
        `cache` holds the first `row.held` of its tokens; `streamed`: somebody waits for the first token.
        """
        cache = self.target.new_cache() if cache is None else cache
        clock, wanted = Clock(row.stats, self.target.device), self._states(row)
        for other in self.rows:
            if None not in (wanted, self._states(other)) and wanted != self._states(other):
                raise ValueError(
                    f"expected a drafter that needs the hidden states {self._states(other)}, as others in this batch, "
                    f"got one that needs {wanted}: {row.drafter.describe()}"
                )
        self._joining.append(_Joining(Run(self.target, [row], self._costs, cache, clock, streamed, apart=True), take))

    def _states(self, row: Row) -> list[int] | None:
        """The hidden states that its drafter needs."""
        states = row.traits.states
        return None if states is None else list(states(self.target.config.num_hidden_layers))

    def leave(self, row: Row, error: Exception) -> None:
        """Ends a text before its end: the next step returns it."""
        row.error = row.error or error

    @torch.inference_mode(False)  # see `decode`
    @torch.no_grad()
    def step(self) -> list[Row]:
        """Reads a piece of the prompts that are waiting, makes one pass over all texts that have begun, and returns the
        texts that have ended: each by itself, or with its `error`.
        """
        ended = [*self._begin(), *self._drop()]
        if self._together is not None:
            try:
                self._pass(self._together)
            except Exception as error:  # of the pass itself, which was that of all
                for row in self._takes:
                    row.error = row.error or error
            ended += self._drop()
        return ended

    def _begin(self) -> list[Row]:
        """Reads prompts, as many tokens as there are in a piece, and makes the first steps of those that were read;
        returns the texts that end with it.
        """
        left, ended = PIECE, []
        while self._joining and left > 0:
            run, take = self._joining[0]
            (row,) = run.rows
            unread = row.sequence.length - row.held
            # Who needs the states of a prompt needs those of all of it.
            in_pieces = self.target.support.reads_on and row.traits.states is None
            if row.error is None:
                self._costs.share(1, row.sequence.length)
                try:
                    if in_pieces and unread > left:
                        run.clock.restart()
                        run.prefill(most=left)
                        run.clock.lap("forward")
                        break
                    self._first_step(run, take)
                except Exception as error:
                    row.error = error
            left -= unread
            self._joining.popleft()
            if not row.going:
                ended.append(row)
        return ended

    def _first_step(self, run: Run, take: Take) -> None:
        """That of a text alone, after which it goes on with the others."""
        run.clock.restart()
        alone = begin(run, TreeStepper)
        _step(run, alone, [take])
        if not run.rows[0].going:
            return
        if self._together is None:
            self._together = alone
        else:
            self._together.join(alone)
        self._takes[run.rows[0]] = take

    def _pass(self, together: TreeStepper) -> None:
        """One pass over all texts, each of which has waited for all of it."""
        run = together.run
        self._costs.share(len(run.rows), max(row.sequence.length for row in run.rows))
        run.clock.stats = spent = Stats(run.rows[0].stats.synchronize)
        run.clock.restart()
        _step(run, together, [self._takes[row] for row in run.rows])
        for row in run.rows:
            row.stats.spend(spent)

    def _drop(self) -> list[Row]:
        """Lets the texts go that have ended."""
        gone = [row for row in self._takes if not row.going]
        for row in gone:
            del self._takes[row]
        if not self._takes:
            self._together = None
        elif gone and self._together is not None:
            self._together.leave(gone)
        return gone


def _step(run: Run, steps_of: TreeStepper, takes: Sequence[Take]) -> None:
    """One step of each of the texts of a run, of which `takes` are told before they are learned from."""
    steps = steps_of.step(list(range(len(run.rows))))
    run.count(steps)
    for step in steps:
        with run.own(run.rows[step.row]):
            takes[step.row](step)
    learn(run, steps_of)
