"""Several drafters combined: their drafts are merged into one tree, of which the best nodes are verified.

Every part drafts independently. The acceptance probability of a node is learned while decoding, from the parts that
propose the node and their confidence (`merge`). Every part observes each verified step, so parts also learn from each
other's proposals.

Cost per step: that of all parts, spent before any node is selected; a few microseconds per node.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch

from ..._util.locks import Lock
from ..._util.options import name_and_options, split_outside
from ...model.prefixes import Prefixes
from ...model.target import Target
from ...trees.draft import Budget, Context, Draft, Step
from .._base import PREDICTED, Drafter, DrafterTraits, SequenceDrafter, check_auto_or_nodes
from .._registry import make_drafter
from .merge import FuseCalibration, Merged, NodeValues, fixed_nodes, merge_drafts, valued_draft, warm_up

_MOST_PARTS = 6
"""The calibration has a cell for every combination of parts."""


@dataclass
class Fuse(Drafter):
    """Combines several drafters: verifies the most probable nodes of all their drafts."""

    unnamed: ClassVar[str] = "parts"
    parts: str | Sequence[str | Drafter]
    """The drafters, such as recycling+draft_model(model=FOLDER,nodes=16), with options in parentheses; in Python also a
    list of drafters.
    """
    nodes: int | Literal["auto"] = "auto"
    """Maximum number of drafted nodes, the best of all parts; auto: as many as pay on this machine."""
    drafters: list[Drafter] = field(default_factory=list, init=False)
    """The parts as drafter objects."""

    def __post_init__(self) -> None:
        check_auto_or_nodes(self, "nodes")
        self.drafters = [make_drafter(part) for part in _written(self.parts)]
        if not 2 <= len(self.drafters) <= _MOST_PARTS:
            raise ValueError(
                f"fuse takes 2 to {_MOST_PARTS} drafters, such as fuse:recycling+suffix, got {len(self.drafters)}: "
                f"{self.parts!r}"
            )
        if len({id(drafter) for drafter in self.drafters}) < len(self.drafters):
            raise ValueError("the parts of fuse must be different objects, got the same one twice; create two")
        self.labels = _labels(self.drafters)
        """A name for each part."""
        self.calibration = FuseCalibration.empty(len(self.drafters))
        self.learning = Lock()
        """Held while the calibration is read or updated."""

    @property
    def traits(self) -> DrafterTraits:
        parts = [drafter.traits for drafter in self.drafters]
        return DrafterTraits(
            states=self.states_of if any(part.states for part in parts) else None,
            on_host=all(part.on_host for part in parts),
            top_k=max(part.top_k for part in parts),
            predictions=any(part.predictions for part in parts),
            prefixes=any(part.prefixes for part in parts),
            grammar_statistics=next((part.grammar_statistics for part in parts if part.grammar_statistics), None),
            nodes=self.nodes,
            assumed_nodes=max(part.assumed_nodes for part in parts),
            samples=any(part.samples for part in parts),
            reproducible=all(part.reproducible for part in parts),
        )

    def states_of(self, layers: int) -> list[int]:
        """Return the indices of the hidden states that the parts need of a target with `layers` layers, by part."""
        needs = [part.traits.states for part in self.drafters]
        return [number for need in needs if need is not None for number in need(layers)]

    def fork(self) -> Fuse:
        """Fork every part; state that parts share with their own forks stays shared."""
        other = replace(self, parts=[drafter.fork() for drafter in self.drafters])
        other.calibration = copy.deepcopy(self.calibration)
        return other

    def warm_up(self, device: torch.device) -> None:
        warm_up()
        for drafter in self.drafters:
            drafter.warm_up(device)

    def fit(self, target: Target) -> None:
        for drafter in self.drafters:
            drafter.fit(target)

    def fit_again(self, target: Target) -> None:
        for drafter in self.drafters:
            drafter.fit_again(target)

    def start(self, prompt: torch.Tensor, target: Target) -> FuseSequence:
        self.warm_up(target.device)
        return FuseSequence(self, [drafter.start(prompt, target) for drafter in self.drafters], target)

    def describe(self) -> str:
        return self.describe_parts(self.drafters)

    def describe_parts(self, parts: Sequence[SequenceDrafter]) -> str:
        """Return one line that describes the parts by their options, or as started for a sequence."""
        size = "as many nodes as pay" if self.nodes == "auto" else f"{self.nodes} nodes at most"
        return f"fuse: {size}, best first, of {' + '.join(f'({part.describe()})' for part in parts)}"


class FuseSequence(SequenceDrafter):
    """The parts' drafters of one sequence, and their proposals."""

    drafter: Fuse

    def __init__(self, drafter: Fuse, parts: list[SequenceDrafter], target: Target) -> None:
        super().__init__(drafter)
        self._parts, self._target = parts, target
        self._nodes = [part.traits.nodes for part in drafter.drafters]
        self.pass_cost = max((part.pass_cost for part in parts if part.pass_cost is not None), default=None)
        needs = [len(part.traits.states_read(target)) for part in drafter.drafters]
        self._states = np.cumsum([0, *needs]).tolist()
        """Offset of each part's hidden states among the concatenated ones, and their total number."""
        self._proposed: _Proposal | None = None
        self._counts: Counter[str] = Counter()

    def predict(self, tokens: torch.Tensor) -> None:
        for part, drafter in zip(self._parts, self.drafter.drafters, strict=True):
            if drafter.traits.predictions:
                part.predict(tokens)

    def use_prefixes(self, prefixes: Prefixes) -> None:
        for part, drafter in zip(self._parts, self.drafter.drafters, strict=True):
            if drafter.traits.prefixes:
                part.use_prefixes(prefixes)

    def read_prompt(self, states: torch.Tensor) -> None:
        for number, part in enumerate(self._parts):
            own = self._states_for(number, states)
            if own is not None:
                part.read_prompt(own)

    def _states_for(self, number: int, states: torch.Tensor | None) -> torch.Tensor | None:
        """Return the part's own columns of hidden states (n, all concatenated); None if it needs none."""
        begin, end = self._states[number : number + 2]
        if states is None or begin == end:
            return None
        width = states.shape[1] // self._states[-1]
        return states[:, begin * width : end * width]

    def draft(self, context: Context) -> Draft:
        drafts, budget = [], context.budget
        for part, nodes in zip(self._parts, self._nodes, strict=True):
            own = budget if nodes == "auto" else Budget.of_nodes(nodes)
            draft = part.draft(replace(context, budget=own)).cut(context.remaining - 1)
            drafts.append(draft.first_ranked(1 + nodes) if isinstance(nodes, int) else draft)
            budget.passes += 0 if own is budget else own.passes
        merged = merge_drafts(drafts)
        with self.drafter.learning:
            valued = self.drafter.calibration.values_of(merged)
        self._proposed = _Proposal(merged, valued)
        first, sampled = fixed_nodes(merged, budget.nodes)
        # Whether the loop can use a sampled draft must depend on the number of nodes, not on the sampled tokens.
        if sampled and not self._target.info.fits(len(context.tokens) - 1, budget.nodes + 1):
            return merged.draft.cut(0)
        return valued_draft(merged, valued.values, sampled, first)

    def observe(self, step: Step) -> None:
        proposed, self._proposed = self._proposed, None
        if proposed is not None:
            self._count(proposed.merged, step)
            with self.drafter.learning:
                self.drafter.calibration.learn(proposed.merged, proposed.valued, step.tokens)
        for number, part in enumerate(self._parts):
            shown = step if step.states is None else replace(step, states=self._states_for(number, step.states))
            part.observe(shown)

    def _count(self, merged: Merged, step: Step) -> None:
        proposed = merged.ranks >= 0
        verified = [node for node in step.draft.places_in(merged.draft) if node is not None]
        accepted = proposed[merged.follow(step.tokens[: len(step.accepted) - 1])]
        for part, label in enumerate(self.drafter.labels):
            self._counts[f"{label}.proposed"] += int(proposed[1:, part].sum())
            self._counts[f"{label}.kept"] += int(proposed[verified[1:], part].sum())
            self._counts[f"{label}.accepted"] += int(accepted[:, part].sum())
            self._counts[f"{label}.accepted_alone"] += int((accepted[:, part] & (accepted.sum(1) == 1)).sum())

    def statistics(self) -> Mapping[str, float]:
        counts, self._counts = self._counts, Counter()
        for label, part in zip(self.drafter.labels, self._parts, strict=True):
            own = dict(part.statistics())
            counts[PREDICTED] = max(counts[PREDICTED], int(own.pop(PREDICTED, 0)))
            counts.update({f"{label}.{name}": number for name, number in own.items()})
        return counts

    def describe(self) -> str:
        return self.drafter.describe_parts(self._parts)


class _Proposal(NamedTuple):
    merged: Merged
    valued: NodeValues


def _written(parts: str | Sequence[str | Drafter]) -> Sequence[str | Drafter]:
    if not isinstance(parts, str):
        return parts
    return [f"{name}:{options}" for name, options in map(name_and_options, split_outside(parts, "+"))]


def _labels(drafters: Sequence[Drafter]) -> list[str]:
    """Return a label for each part; repeated names are numbered."""
    labels: list[str] = []
    for drafter in drafters:
        name = drafter.name or type(drafter).__name__
        same = sum(label.partition(" ")[0] == name for label in labels)
        labels.append(f"{name} {same + 1}" if same else name)
    return labels
