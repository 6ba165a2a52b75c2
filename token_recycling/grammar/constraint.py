"""The grammar of one sequence: its current state, and drafts that follow the grammar.

Masks never affect the emitted tokens, which the logits processors of the call constrain, as in `generate`. They only
identify drafted nodes that would be rejected. A drafter may grow its tree within the grammar
(`DrafterTraits.within_grammars`). In the drafts of other drafters, forbidden nodes are replaced by forced chains here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import LogitsProcessor

from ..costs import NO_COSTS
from ..trees.draft import Draft, Step
from .adapters import state_of
from .grow import grow, states_of
from .state import State
from .statistics import Candidates, GrammarStatistics

_CHAIN = 8
"""Nodes that a draft may always have, even if the drafter drafted fewer: forced chains are rarely rejected."""
_FIRST, _NEXT = 0.6, 0.4
"""Assumed probability of a node if the draft has none, and the ratio for each further sibling."""


class Constraint:
    """The grammar of one sequence, and statistics of the target's choices among allowed tokens."""

    def __init__(self, state: State, length: int, statistics: GrammarStatistics | None = None) -> None:
        """`state`: after the prompt, which has `length` tokens; `statistics`: shared with other sequences."""
        self._state: State | None = state
        """The state after the tokens read so far, which end with the root of the last draft."""
        self._read = length
        self._statistics = GrammarStatistics() if statistics is None else statistics

    def at(self, sequence: np.ndarray) -> State | None:
        """Return the state after a sequence (length,) that continues the last one; None if unknown."""
        for token in sequence[self._read :].tolist():
            self._state = None if self._state is None else self._state.after(token)
        self._read = max(self._read, len(sequence))
        return self._state

    def fitted(self, draft: Draft, max_depth: int) -> Draft:
        """Return a draft at the current state, without forbidden nodes and with forced chains; `max_depth`: maximum
        layers below the root.

        Sampled drafts and nodes that the drafter needs are not changed, nor is any draft if the state is unknown.
        """
        state = self._state
        if state is None or draft.sampled_from:
            return draft
        tokens, children_of, grammar_statistics = draft.tokens.tolist(), draft.children, self._statistics
        if draft.needed:
            states = states_of(state, draft.parents.tolist(), tokens)
            needed = {above for node in draft.needed for above in draft.lineages[node]}
            return draft.part([node for node, allowed in enumerate(states) if allowed is not None or node in needed])
        shown = [0]
        """The index of each node in the original draft, -1 for a forced node."""

        def below(node: int, state: State) -> Candidates:
            children = () if node < 0 else children_of[node]
            stated = draft.probabilities
            probabilities = [
                _FIRST * _NEXT**rank if stated is None else float(stated[child]) for rank, child in enumerate(children)
            ]
            return [
                (tokens[child], probability)
                for child, probability in zip(children, probabilities, strict=True)
                if state.allows(np.array([tokens[child]]))[0]
            ]

        def propose(parent: int, token: int, probability: float, after: State | None) -> Candidates:
            children = () if shown[parent] < 0 else children_of[shown[parent]]
            shown.append(next((child for child in children if tokens[child] == token), -1))
            return [] if after is None else below(shown[-1], after)

        most = max(len(draft) - 1, _CHAIN)
        parents, grown, probabilities = grow(
            state, below(0, state), tokens[0], propose, grammar_statistics, max_depth - 1, most, NO_COSTS
        )
        return Draft.of(grown, parents, probabilities)

    def learn(self, step: Step) -> Step:
        """Count the target's choices in a step at the current state. Return the step with the states of its nodes, from
        which drafters learn; unchanged if the state is unknown.
        """
        if self._state is None:
            return step
        states = states_of(self._state, step.draft.parents.tolist(), step.draft.tokens.tolist())
        self._statistics.learn_path([states[node] for node in step.accepted], step.tokens)
        return replace(step, grammar_states=states)


def constraint_of(
    processors: Sequence[LogitsProcessor],
    padded: torch.Tensor,
    length: int,
    timed: bool = True,
    statistics: GrammarStatistics | None = None,
) -> Constraint | None:
    """Return the grammar that `processors` enforce on a sequence, or None.

    `padded` (1, columns) is the prompt as the processors see it; it has `length` tokens. `timed`: whether drafts stop
    following a grammar that is measured to be slow. `statistics`: shared with other sequences.
    """
    state = state_of(processors, padded, timed)
    return None if state is None else Constraint(state, length, statistics)
