"""Drafting with a module that reads the target's hidden states, such as EAGLE heads, MTP layers or a DFlash assistant:
where it stands, what it has not read yet, and when drafting rests.

Modules that name the tokens of all places at once, whatever stands before, give trees in which the candidates of a
place stand below every candidate of the one before (`product_draft`; Medusa, section 2.1.1).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from typing_extensions import Self

from ...costs.budget import best_size
from ...costs.costs import Costs, Overhead
from ...model.tree_model import TreeModel
from ...trees.draft import Draft, Step
from ...trees.templates import best_paths, size_in_words, tree_of
from ...trees.tree import Tree
from .._base import Drafter, SequenceDrafter
from .placed import Placed

Module = TypeVar("Module")
REMOVED = {"learn": "learning while decoding did not raise acceptance; leave it out, or train a head for such text"}
"""Former options of heads and layers, and what to use instead."""


class PendingStates:
    """The target's states (n, ...) at tokens of one sequence in a row, as far as a drafter has not read them."""

    def __init__(self, prompt: int) -> None:
        self._pending: list[torch.Tensor] = []
        self._next = self.begin = prompt - 1
        """The place of the first of these, and that of the first token whose states were known."""

    def read_prompt(self, states: torch.Tensor) -> None:
        """Takes those of the tokens before the prompt's last one."""
        self._pending.append(states)
        self._next = self.begin = self.begin - len(states)

    def learn(self, states: torch.Tensor) -> None:
        """Takes those of the sequence's next tokens, all but its newest."""
        self._pending.append(states)

    @property
    def waits(self) -> bool:
        return any(map(len, self._pending))

    def taken(self) -> torch.Tensor:
        """All of them, to be read now."""
        states, self._pending = torch.cat(self._pending), []
        return states


class StatesDrafter(Drafter, Generic[Module]):
    """A drafter with a module of its own that reads hidden states."""

    tree: str | int
    """auto: as many nodes as pay, the module's passes counted; a number of them; or what a subclass takes besides."""
    k: int
    template: Tree | None = None
    """The tree that the option gives; None where it grows."""

    def __post_init__(self) -> None:
        self.overhead = Overhead()
        """What a pass of the module takes, and the steps of all sequences, where the tree is to pay."""
        self._placed = Placed[Module]()

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
                f"the tree may have at most {layers} and ranks below k={self.k}, got {given} with ranks up to "
                f"{given.breadth - 1}; give a smaller tree, or larger options"
            )

    def fork(self) -> Self:
        """Return this drafter: nothing is learned, and the module is shared."""
        return self

    def tree_in_words(self) -> str:
        """What is verified."""
        return str(self.template or size_in_words(self.tree))


class StatesSequence(SequenceDrafter):
    """Drafts for one sequence from hidden states, and counts what that takes. Where as many nodes are verified as pay,
    it rests while none do: what a module of one's own takes is spent before anything is known.
    """

    def __init__(
        self,
        drafter: StatesDrafter[Any],
        pending: PendingStates,
        costs: Costs,
    ) -> None:
        super().__init__(drafter)
        self._pending, self._costs = pending, costs
        self._tree, self._overhead = drafter.tree, drafter.overhead
        self._disabled_steps = 0
        """Steps for which nothing is to be drafted, where the tree is to pay."""
        self._counts: Counter[str] = Counter()
        self._passes = 0

    def _limits(self) -> tuple[int, np.ndarray | None]:
        """How many nodes may be verified, and t(n) of 1, 2, ... nodes where the tree is to pay; for trees that grow."""
        if self._tree != "auto":
            return int(self._tree), None
        times = self._costs.by_nodes
        return len(times) - 1, times

    def _backs_off(self) -> bool:
        """Whether nothing is to be drafted for this step; called once a step."""
        disabled = self._disabled_steps > 0
        self._disabled_steps -= disabled
        return disabled

    def _spent(self, passes: int, since: float) -> None:
        """The module was passed so often for this step, which began drafting then (`time.perf_counter`)."""
        self._counts["draft_forwards"] += passes
        self._passes = passes
        if self._tree == "auto":
            self._costs.count(self._overhead, 1, (time.perf_counter() - since) / passes)

    def read_prompt(self, states: torch.Tensor) -> None:
        self._pending.read_prompt(states)

    def observe(self, step: Step) -> None:
        assert step.states is not None
        self._pending.learn(step.states[step.accepted])
        passes, self._passes = self._passes, 0
        if passes and self._tree == "auto":
            own = passes * self._overhead.step
            taken = self._costs.of(self._costs.nodes) + own
            self._disabled_steps = self._costs.back_off(self._overhead, len(step.tokens), taken, own)

    def statistics(self) -> Mapping[str, float]:
        counts, self._counts = self._counts, Counter()
        return counts


def best_product(acceptance: Sequence[Sequence[float]], nodes: int, times: np.ndarray | None = None) -> Tree:
    """The best tree if the candidate of rank r at depth d is right with probability `acceptance[d - 1][r]`: of `nodes`
    nodes, or of as many as pay where `times` (most + 1,) are those of steps over 1, 2, ... nodes, drafting included.
    """
    paths = list(islice(best_paths(acceptance), nodes))
    if times is not None:
        paths = paths[: best_size([gain for gain, _ in paths], times)[0]]
    return tree_of(paths)


def product_draft(tree: Tree, root: torch.Tensor, candidates: np.ndarray, probabilities: np.ndarray) -> Draft:
    """`tree` below `root` (1,), filled with the candidates of each place (places, k) and their probabilities."""
    chosen = np.array(tree.depths[1:], int) - 1, np.array(tree.ranks[1:], int)
    following = torch.tensor(candidates[chosen], dtype=torch.long, device=root.device)
    return Draft(tree, torch.cat([root, following]), confidence=np.append(np.float32(1), probabilities[chosen]))
