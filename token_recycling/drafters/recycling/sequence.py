"""The recycler for one sequence: how its trees are drafted, sized and learned from; see `Recycling`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..._util.compiled import compiling
from ...costs.budget import NO_COSTS
from ...costs.costs import Costs
from ...grammar.allowed import top_allowed
from ...grammar.state import State
from ...recycling.ngram_matrix import NgramMatrix
from ...recycling.ngrams import ABSENT
from ...recycling.recycler import Recycler
from ...trees.draft import Context, Draft, Step
from .._base import PREDICTED, SequenceDrafter

if TYPE_CHECKING:
    from . import Recycling

_DEEPEST = 255


class RecyclingSequence(SequenceDrafter):
    """One sequence and its recycler. The matrix is shared: each look-up is one uninterrupted call of compiled code."""

    drafter: Recycling

    def __init__(self, drafter: Recycling, matrix: NgramMatrix, prompt: np.ndarray, costs: Costs) -> None:
        super().__init__(drafter)
        template = drafter.template
        self._costs: Costs | None = None
        """Costs of forward passes, where the tree is sized by cost."""
        if template is not None:
            most = len(template) - 1
        elif drafter.tree == "auto":
            self._costs, most = costs, len(costs.by_nodes) * costs.sequences - 1  # as for a single sequence
        else:
            most = int(drafter.tree)  # type: ignore[arg-type]
        self._recycler = Recycler(matrix, prompt, most, suffix=drafter.suffix, template=template)
        self._overhead = drafter.overhead
        self._within_grammars = drafter.traits.within_grammars
        self._state: State | None = None
        """Grammar state at the last draft's root, if any."""
        self._disabled_steps = 0
        """Steps left without a draft."""
        self._predicted = False
        self._spent = 0.0
        self._values = np.empty(0, np.float32)
        """Acceptance probabilities of this step's nodes; empty where nothing was drafted."""

    def predict(self, tokens: torch.Tensor) -> None:
        self._predicted = True
        self._recycler.predict(tokens.tolist())

    def draft(self, context: Context) -> Draft:
        self._state = context.state if self._within_grammars else None
        self._overhead = self.drafter.overhead if self._state is None else self.drafter.overhead_within
        if self._disabled_steps:
            self._disabled_steps -= 1
            return Draft.chain(context.root)
        began = _now()
        times, ratio = self._times(), 1.0 if self._costs is None else self._costs.forecast_ratio(self._overhead)
        tokens, max_depth = context.tokens.cpu().numpy(), min(_DEEPEST, context.remaining - 1)
        if self._state is not None:
            tree, probabilities = self._recycler.draft_within(
                tokens, max_depth, self._state, self.drafter.grammar_statistics, times, ratio
            )
        else:
            tree = self._recycler.draft(tokens, max_depth, times, ratio)
            probabilities = tree.probabilities[tree.parents, tree.ranks]
        self._values = tree.values.copy()
        draft = Draft.of(tree.tokens, tree.parents, probabilities)
        self._spent = _now() - began
        return draft

    def _times(self) -> np.ndarray:
        """Return times of steps over 1, 2, ... nodes, in passes; empty where every node is wanted."""
        if self._costs is None:
            return NO_COSTS
        passes, overhead = self._costs.by_nodes, self._overhead
        return passes + overhead.step + overhead.node * np.arange(len(passes))

    def observe(self, step: Step) -> None:
        values, self._values = self._values, self._values[:0]
        began = _now() if len(values) else 0.0
        self._recycler.observe(step.tokens, step.finished)
        if len(values):
            self._learn_from(step)
            if self._costs is not None:
                self._reckon(step, values, self._costs, self._spent + _now() - began)

    def statistics(self) -> Mapping[str, float]:
        return {PREDICTED: self._recycler.predicted} if self._predicted else {}

    def _learn_from(self, step: Step) -> None:
        """Learn from the target's logits, at nodes of other drafters too."""
        draft = step.draft
        ngrams = self._recycler.ngrams(draft.parents, draft.tokens)
        chosen = np.full(len(draft), ABSENT, np.int64)
        chosen[step.accepted] = step.tokens
        learnable = np.arange(len(draft))[step.learnable]
        # A row that predicted right stays.
        teaching = learnable[~self._recycler.matrix.predicts(ngrams[learnable], chosen[learnable])]
        if step.grammar_states is None:
            self._recycler.matrix.learn(ngrams[teaching], *step.top(self.drafter.k, teaching))
        else:
            self._learn_within(step.grammar_states, step, teaching, ngrams)

    def _learn_within(
        self, states: Sequence[State | None], step: Step, teaching: np.ndarray, ngrams: np.ndarray
    ) -> None:
        """Learn which of the allowed tokens the target chooses: its other candidates never become output."""
        choices = {
            node: state for node in teaching.tolist() if (state := states[node]) is not None and not state.single
        }
        if choices:
            nodes = np.array([*choices])
            self._recycler.matrix.learn(ngrams[nodes], *top_allowed(step, choices, self.drafter.k))

    def _reckon(self, step: Step, values: np.ndarray, costs: Costs, seconds: float) -> None:
        """Record tokens and time of a step, `seconds` of it spent here."""
        verified, overhead = len(step.draft), self._overhead
        costs.count(overhead, verified, seconds)
        taken = costs.of(costs.nodes) + overhead.of(verified)
        self._disabled_steps = costs.back_off(
            overhead, len(step.tokens), taken, own=overhead.of(1), predicted=float(values.sum())
        )


def _now() -> float:
    """Return seconds, time of compilation excluded."""
    return time.perf_counter() - compiling.seconds
