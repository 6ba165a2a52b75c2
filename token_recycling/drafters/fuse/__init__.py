"""Several drafters at once: their drafts are merged into one tree, of which the best nodes are verified.

Every part drafts as if it were alone. How likely a node is to be accepted is learned while decoding, from which parts
propose it and how sure they are (`merge`). Every part observes whatever is verified, so that one learns from what
another proposed.

Cost per step: that of all parts, spent before anything is chosen; a few microseconds a node besides.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch

from ...costs.budget import NO_COSTS
from ...draft import Context, Draft, Step
from ...drafter import Drafter, DrafterTraits
from ...model.pass_costs import PassCosts
from ...model.tensor_parallel import agreed
from ...model.tree_model import TreeModel
from ...registry import make_drafter, name_and_options, split_outside
from ...templates import root_only
from .merge import FuseCalibration, MergedDraft, NodeValues, best, kept_first, merge_drafts
from .worth import Forecast, MarginalValue, PassClock

_MOST_PARTS = 6
"""What is learned of parts together has a cell for every combination of them."""


@dataclass
class Fuse(Drafter):
    """Drafts with several drafters at once: the most promising nodes of all."""

    unnamed: ClassVar[str] = "parts"

    parts: str | Sequence[str | Drafter]
    """The drafters, such as recycling+draft_model(model=FOLDER,nodes=16), with options in parentheses; in Python also a
    list of drafters.
    """
    nodes: int | Literal["auto"] = "auto"
    """Drafted nodes at most, the best of all parts; auto: as many of them as pay on this machine."""
    asks: Literal["all", "paying"] = "all"
    """all: every part drafts at every step; paying: a part after the first only where what it adds is worth the time
    that it takes on this machine.
    """
    drafters: list[Drafter] = field(default_factory=list, init=False)
    """The parts, as they were made."""

    def __post_init__(self) -> None:
        if self.nodes != "auto" and (isinstance(self.nodes, str) or self.nodes < 1):
            raise ValueError(f"expected auto or 1 node or more, got nodes={self.nodes!r}")
        if self.asks not in ("all", "paying") or (self.asks == "paying" and self.nodes != "auto"):
            raise ValueError(
                f"expected asks=all, or asks=paying with nodes=auto, got asks={self.asks}, nodes={self.nodes}"
            )
        self.drafters = [make_drafter(part) for part in _written(self.parts)]
        if not 2 <= len(self.drafters) <= _MOST_PARTS:
            raise ValueError(
                f"expected 2 to {_MOST_PARTS} drafters to fuse, such as fuse:recycling+suffix, "
                f"got {len(self.drafters)}: {self.parts!r}"
            )
        if len({id(drafter) for drafter in self.drafters}) < len(self.drafters):
            raise ValueError("expected every part to be a drafter of its own, got one twice; make it twice")
        self._labels = _labels(self.drafters)
        self._calibration = FuseCalibration.empty(len(self.drafters))
        self._marginal = MarginalValue(len(self.drafters))
        self._counts: Counter[str] = Counter()

    @property
    def traits(self) -> DrafterTraits:
        parts = [drafter.traits for drafter in self.drafters]
        return DrafterTraits(
            learns_prompt=any(part.learns_prompt for part in parts),
            hidden_states=any(part.hidden_states for part in parts),
            on_host=all(part.on_host for part in parts),
            top_k=max(part.top_k for part in parts),
            draws=any(part.draws for part in parts),
        )

    def fork(self) -> Fuse:
        """Forks every part: what they share with their own forks stays shared."""
        other = replace(self, parts=[drafter.fork() for drafter in self.drafters])
        other._calibration, other._marginal = copy.deepcopy((self._calibration, self._marginal))
        return other

    def start(self, prompts: Sequence[torch.Tensor], target: TreeModel, costs: PassCosts) -> None:
        for drafter in self.drafters:
            drafter.start(prompts, target, costs)
        self._target = target
        self._selections: dict[int, _Selection] = {}
        self._counts.clear()
        if self.nodes != "auto":
            self._most, self._costs = int(self.nodes), NO_COSTS
            return
        curve, texts = costs.curve(max(map(len, prompts))), len(prompts)
        self._costs = curve.relative(texts)
        self._most = len(self._costs) - 1
        self._clock = PassClock(self._costs, float(np.interp(texts, curve.sizes, curve.seconds)), texts)

    def observe_prompt(self, tokens: torch.Tensor, logits: torch.Tensor, row: int) -> None:
        for drafter in self.drafters:
            if drafter.traits.learns_prompt:
                drafter.observe_prompt(tokens, logits, row)

    def draft(self, context: Context) -> Draft:
        drafts = [Draft(root_only(), context.root)] * len(self.drafters)
        draft_parts = self._draft_paying if self.asks == "paying" else self._draft_all
        chosen = self._selections[context.row] = draft_parts(drafts, context)
        draft = chosen.merged.draft(chosen.kept, chosen.drawn, context) if len(chosen.kept) > 1 else drafts[0]
        if len(self._costs):
            self._clock.drafted(len(draft.tree))
        return draft

    def _draft_all(self, drafts: list[Draft], context: Context) -> _Selection:
        began = time.perf_counter()
        for part, drafter in enumerate(self.drafters):
            drafts[part] = drafter.draft(context).cut(context.room - 1)
        spent = self._passes(time.perf_counter() - began) if len(self._costs) else 0.0
        return self._select(drafts, context, spent)

    def _draft_paying(self, drafts: list[Draft], context: Context) -> _Selection:
        """Drafts with the first part, and with every further one where it is worth the time."""
        chosen: _Selection | None = None
        spent = 0.0
        for part, drafter in enumerate(self.drafters):
            if chosen is not None and not self._marginal.pays(part, chosen.expected):
                continue
            began = time.perf_counter()
            drafts[part] = drafter.draft(context).cut(context.room - 1)
            spent += time.perf_counter() - began
            before = chosen
            chosen = self._select(drafts, context, self._passes(spent))
            if before is not None:
                self._marginal.count(part, before.expected, chosen.expected)
        assert chosen is not None
        self._marginal.count_step(chosen.expected)
        return chosen

    def _passes(self, seconds: float) -> float:
        """Time of drafting, in passes over one token."""
        return agreed(self._target.model, seconds / self._clock.unit)

    def _select(self, drafts: Sequence[Draft], context: Context, spent: float) -> _Selection:
        """The nodes of all drafts to verify, `spent` being the time of drafting in passes over one token."""
        merged = merge_drafts(drafts)
        valued = self._calibration.values_of(merged)
        first, drawn = kept_first(merged, self._most)
        # Whether the loop can use a drawn draft must not depend on what is drawn: how many nodes there are does.
        if drawn and not self._target.support.fits(len(context.tokens) - 1, self._most + 1):
            kept, drawn = np.zeros(1, np.int64), frozenset()
        else:
            kept = best(valued.values, first, self._most, self._costs, spent)
        taken = spent + self._costs[len(kept) - 1] if len(self._costs) else 0.0
        return _Selection(merged, valued, kept, drawn, Forecast(valued.values[kept].sum(), taken))

    def observe(self, step: Step) -> None:
        if len(self._costs):
            self._clock.verified()
        merged, valued, kept, *_ = self._selections.pop(step.row)
        self._calibration.learn(merged, valued, step.tokens)
        proposed = merged.nodes.ranks >= 0
        accepted = proposed[merged.follow(step.tokens[: len(step.accepted) - 1])]
        for part, label in enumerate(self._labels):
            self._counts[f"{label}.proposed"] += int(proposed[1:, part].sum())
            self._counts[f"{label}.kept"] += int(proposed[kept[1:], part].sum())
            self._counts[f"{label}.accepted"] += int(accepted[:, part].sum())
            self._counts[f"{label}.accepted_alone"] += int((accepted[:, part] & (accepted.sum(1) == 1)).sum())
        for drafter in self.drafters:
            drafter.observe(step)

    def statistics(self) -> Mapping[str, float]:
        counts, self._counts = self._counts, Counter()
        for label, drafter in zip(self._labels, self.drafters, strict=True):
            counts.update({f"{label}.{name}": number for name, number in drafter.statistics().items()})
        return counts

    def describe(self) -> str:
        size = "as many nodes as pay" if self.nodes == "auto" else f"{self.nodes} nodes at most"
        return f"fuse: {size}, best first, of {' + '.join(f'({drafter.describe()})' for drafter in self.drafters)}"


class _Selection(NamedTuple):
    """What is to be verified of a text, and why."""

    merged: MergedDraft
    valued: NodeValues
    kept: np.ndarray
    """The nodes that are verified."""
    drawn: frozenset[int]
    """Those of them that count as drawn."""
    expected: Forecast


def _written(parts: str | Sequence[str | Drafter]) -> Sequence[str | Drafter]:
    """The parts as `make_drafter` takes them."""
    if not isinstance(parts, str):
        return parts
    return [f"{name}:{options}" for name, options in map(name_and_options, split_outside(parts, "+"))]


def _labels(drafters: Sequence[Drafter]) -> list[str]:
    """A name for each part; of equal names the later ones are numbered."""
    labels: list[str] = []
    for drafter in drafters:
        name = drafter.name or type(drafter).__name__
        same = sum(label.partition(" ")[0] == name for label in labels)
        labels.append(f"{name} {same + 1}" if same else name)
    return labels
