"""Drafting with a module that reads the target's hidden states, such as EAGLE heads, MTP layers or a DFlash assistant:
where it stands, what it has not read yet, and when drafting rests.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from typing_extensions import Self

from ...costs.costs import Costs, Work
from ...model.device_map import Placed
from ...model.inspection import processes
from ...model.tree_model import TreeModel
from ...trees.draft import Step
from ...trees.templates import size_in_words
from ...trees.tree import Tree
from .._base import Drafter, TextDrafter
from .last_layer import LastLayer, Said, TextLessons
from .pairing import Pairs

Module = TypeVar("Module")


class UnreadStates:
    """The target's states (n, ...) at tokens of one text in a row, as far as a drafter has not read them."""

    def __init__(self, prompt: int) -> None:
        self._unread: list[torch.Tensor] = []
        self._next = self.begin = prompt - 1
        """The place of the first of these, and that of the first token whose states were known."""

    def read_prompt(self, states: torch.Tensor) -> None:
        """Takes those of the tokens before the prompt's last one."""
        self._unread.append(states)
        self._next = self.begin = self.begin - len(states)

    def learn(self, states: torch.Tensor) -> None:
        """Takes those of the text's next tokens, all but its newest."""
        self._unread.append(states)

    @property
    def waits(self) -> bool:
        return any(map(len, self._unread))

    def taken(self) -> torch.Tensor:
        """All of them, to be read now."""
        states, self._unread = torch.cat(self._unread), []
        return states


class StatesDrafter(Drafter, Generic[Module]):
    """A drafter with a module of its own that reads hidden states."""

    tree: str | int
    """auto: as many nodes as pay, the module's passes counted; a number of them; or what a subclass takes besides."""
    k: int
    template: Tree | None = None
    """The tree that the option gives; None where it grows."""
    learn: bool = False
    """Whether a layer behind the module's last one goes on learning from what the target accepts."""

    def __post_init__(self) -> None:
        self.work = Work()
        """What a pass of the module takes, and the steps of all texts, where the tree is to pay."""
        self._placed = Placed[Module]()
        self._last = Pairs[LastLayer]()
        """What learns for each target."""

    def placed(self, target: TreeModel) -> Module:
        """The module where the target is, and of its type; checked once."""
        return self._placed.of(target, lambda: self.check(target), lambda: self.place(target))

    def check(self, target: TreeModel) -> None:
        """Raises ValueError unless the module fits the target."""

    def place(self, target: TreeModel) -> Module:
        """Create the module for a target as it is."""
        raise NotImplementedError(f"{type(self).__name__} must define place()")

    def check_template(self, depth: int, layers: str) -> None:
        """Raises ValueError for a template of more layers than `depth`, in words `layers`, or of ranks from `k` on."""
        given = self.template
        if given is not None and (given.depth > depth or given.breadth > self.k):
            raise ValueError(
                f"expected a tree of at most {layers} and ranks below k={self.k}, got {given} with ranks up to "
                f"{given.breadth - 1}; give a smaller tree, or larger options"
            )

    def said(self, target: TreeModel) -> Said:
        """How tokens are read from what the module's last layer gives."""
        raise NotImplementedError(f"{type(self).__name__} must define said()")

    def lessons(self, target: TreeModel, prompt: int) -> TextLessons | None:
        """Create what learns from a text whose prompt has so many tokens; None where nothing learns."""
        if not self.learn:
            return None
        if processes(target.model) > 1:
            raise ValueError(
                f"expected a model in one process for learn=true, got one in {processes(target.model)}: what is "
                "learned depends on the time, and all processes must draft alike; leave out learn=true"
            )
        with self._last.making:
            layer = self._last.get(target.model)
            if layer is None:
                layer = self._last[target.model] = LastLayer(self.said(target), target.device, target.dtype)
            elif not layer.serves(target):
                layer = self._last[target.model] = layer.placed(self.said(target), target.device, target.dtype)
        return TextLessons(layer, prompt)

    def fork(self) -> Self:
        """The same where nothing is learned; else another one that shares the module."""
        if not self.learn:
            return self
        other = copy.copy(self)
        other.work, other._last = copy.deepcopy(self.work), Pairs[LastLayer]()
        with self._last.making:
            for model, layer in self._last.items():
                other._last[model] = layer.fork()
        return other

    def tree_in_words(self) -> str:
        """What is verified."""
        return str(self.template or size_in_words(self.tree))


class StatesText(TextDrafter):
    """Drafts for one text from hidden states, and counts what that takes. Where as many nodes are verified as pay, it
    rests while none do: what a module of one's own takes is spent before anything is known.
    """

    def __init__(
        self,
        drafter: StatesDrafter[Any],
        unread: UnreadStates,
        costs: Costs,
        lessons: TextLessons | None = None,
    ) -> None:
        super().__init__(drafter)
        self._unread, self._costs, self._lessons = unread, costs, lessons
        self._tree, self._work = drafter.tree, drafter.work
        self._rest = 0
        """Steps for which nothing is to be drafted, where the tree is to pay."""
        self._counts: Counter[str] = Counter()
        self._passes = 0

    def _limits(self) -> tuple[int, np.ndarray | None]:
        """How many nodes may be verified, and t(n) of 1, 2, ... nodes where the tree is to pay; for trees that grow."""
        if self._tree != "auto":
            return int(self._tree), None
        times = self._costs.by_nodes
        return len(times) - 1, times

    def _rests(self) -> bool:
        """Whether nothing is to be drafted for this step; called once a step."""
        rests = self._rest > 0
        self._rest -= rests
        return rests

    def _spent(self, passes: int, since: float) -> None:
        """The module was passed so often for this step, which began drafting then (`time.perf_counter`)."""
        self._counts["draft_forwards"] += passes
        self._passes = passes
        if self._tree == "auto":
            self._costs.count(self._work, 1, (time.perf_counter() - since) / passes)

    def read_prompt(self, states: torch.Tensor) -> None:
        self._unread.read_prompt(states)

    def observe(self, step: Step) -> None:
        assert step.states is not None
        self._unread.learn(step.states[step.accepted])
        passes, self._passes = self._passes, 0
        if passes and self._tree == "auto":
            own = passes * self._work.step
            taken = self._costs.of(self._costs.nodes) + own
            self._rest = self._costs.rest(self._work, len(step.tokens), taken, own)
        if self._lessons is not None:
            self._lessons.observe(step, self._costs.seconds / self._costs.texts)
            if step.finished:
                self._lessons.learn()

    def statistics(self) -> Mapping[str, float]:
        counts, self._counts = self._counts, Counter()
        return counts if self._lessons is None else {**counts, **self._lessons.statistics()}
