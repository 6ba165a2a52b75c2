"""The recycler for one sequence: how its trees are drafted, sized and learned from; see `Recycling`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...recycling.ngram_matrix import NgramMatrix
from ...recycling.ngrams import ABSENT
from ...recycling.recycler import Recycler
from ...trees.draft import Context, Draft, Step
from .._base import PREDICTED, SequenceDrafter

if TYPE_CHECKING:
    from ...grammar.state import State
    from . import Recycling

_DEEPEST = 255
_MOST_NODES = 255
"""Most nodes of a tree that is sized by cost: those of the largest pass that is considered."""


class RecyclingSequence(SequenceDrafter):
    """One sequence and its recycler. The matrix is shared: each look-up is one uninterrupted call of compiled code."""

    drafter: Recycling

    def __init__(self, drafter: Recycling, matrix: NgramMatrix, prompt: np.ndarray) -> None:
        super().__init__(drafter)
        template, nodes = drafter.template, drafter.traits.nodes
        sized = nodes if isinstance(nodes, int) else _MOST_NODES
        most = sized if template is None else len(template) - 1
        self._recycler = Recycler(matrix, prompt, most, suffix=drafter.suffix, template=template)
        self._drafted = False
        """Whether there was a draft in this step."""
        self._predicted = False

    def predict(self, tokens: torch.Tensor) -> None:
        self._predicted = True
        self._recycler.predict(tokens.tolist())

    def draft(self, context: Context) -> Draft:
        self._drafted, budget = True, context.budget
        tokens, max_depth = context.tokens.cpu().numpy(), min(_DEEPEST, context.remaining - 1)
        if context.state is None or self.drafter.template is not None:
            tree = self._recycler.draft(tokens, max_depth, budget.times, budget.ratio)
            probabilities = tree["probabilities"][tree["parent"], tree["rank"]]
        else:
            tree, probabilities = self._recycler.draft_within(
                tokens, max_depth, context.state, self.drafter.grammar_statistics, budget.times, budget.ratio
            )
        return Draft.of(tree["token"], tree["parent"], probabilities)

    def observe(self, step: Step) -> None:
        drafted, self._drafted = self._drafted, False
        self._recycler.observe(step.tokens, step.finished)
        if drafted:
            self._learn_from(step)

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
        from ...grammar.allowed import top_allowed

        choices = {
            node: state for node in teaching.tolist() if (state := states[node]) is not None and not state.single
        }
        if choices:
            nodes = np.array([*choices])
            self._recycler.matrix.learn(ngrams[nodes], *top_allowed(step, choices, self.drafter.k))
