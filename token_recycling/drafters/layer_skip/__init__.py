"""Self-speculation: the target itself, without some of its layers, drafts (Zhang et al., 2309.08168).

No second model and no copy of weights, but a key/value cache of its own. Whole layers are skipped; the paper skips
attention and feed-forward parts one by one, found by a search of hours. Cost per step: a forward pass without these
layers for every drafting step; of the search, once: 64 tokens, and for every layer two passes over them and the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from ..._util.locks import Lock
from ...costs.costs import Costs
from ...model.prefill import continued
from ...model.support import UnsupportedModelError
from ...model.tree_model import TreeModel
from .._shared.base import CausalDrafter, Mode, ModelText
from .layers import best_layers, cost_without, why_not, without_layers

_SAMPLE, _LONGEST = 64, 512
"""Tokens that the target adds to the first prompt for the search, and tokens of both together that it reads."""


@dataclass(kw_only=True)
class LayerSkip(CausalDrafter):
    """Drafts with the target, some of its layers left out; by default one branch, which ends where the draft is
    unsure.
    """

    layers: str | Sequence[int] = "auto"
    """The layers to skip, counted from 0, the first not among them: such as `4-9 12`. auto: chosen by a short search on
    the first prompt and what the target makes of it.
    """
    mode: Mode = "tree"
    depth: int = 6
    k: int = 1
    theta_prob: float = 0.6

    def __post_init__(self) -> None:
        super().__post_init__()
        self._skipped = None if self.layers == "auto" else _numbers(self.layers)
        self._expected: float | None = None
        self._view: tuple[PreTrainedModel, TreeModel] | None = None
        """A target, and what is left of it without these layers."""
        self._choosing = Lock()

    def fork(self) -> LayerSkip:
        """The same: nothing is learned from texts, once the first one has chosen the layers."""
        return replace(self) if self._skipped is None else self

    def start(self, prompt: torch.Tensor, target: TreeModel, costs: Costs) -> ModelText:
        with self._choosing:
            if self._skipped is None:
                self.choose(target, prompt)
        return super().start(prompt, target, costs)

    def choose(self, target: TreeModel, prompt: torch.Tensor) -> list[int]:
        """Chooses the layers by how the target continues `prompt` (length,); they are kept for all later texts."""
        _check(target)
        room = _SAMPLE if target.max_length is None else min(_SAMPLE, target.max_length - len(prompt))
        text = continued(target, prompt, max(0, room))
        self._skipped, self._expected = best_layers(target.model, text[-_LONGEST:], self.depth)
        return self._skipped

    def drafting_model(self, target: TreeModel) -> TreeModel:
        assert self._skipped is not None
        with self._choosing:
            if self._view is None or self._view[0] is not target.model:
                _check(target)
                last = target.config.num_hidden_layers - 1
                if not self._skipped or not all(0 < number <= last for number in self._skipped):
                    raise ValueError(
                        f"expected layers to skip from 1 to {last}, got {self.layers!r}; the first one has to stay"
                    )
                self._view = target.model, TreeModel(without_layers(target.model, self._skipped))
            return self._view[1]

    def step_cost(self, target: TreeModel, model: TreeModel) -> float:
        """Estimated by the weights that a pass reads."""
        assert self._skipped is not None
        return cost_without(target.model, self._skipped)

    def what(self) -> str:
        listed = " ".join(map(str, self._skipped or []))
        expected = f" (expected to be {self._expected:.2f} times as fast)" if self._expected is not None else ""
        return f"the target without layers {listed}{expected}"


def _check(target: TreeModel) -> None:
    reason = why_not(target)
    if reason is not None:
        raise UnsupportedModelError(f"layers cannot be skipped: {reason}")


def _numbers(layers: str | Sequence[int]) -> list[int]:
    """Layers as written, such as `4-9 12`; raises ValueError."""
    if not isinstance(layers, str):
        return sorted(set(layers))
    ranges = [re.fullmatch(r"(\d+)(?:-(\d+))?", part) for part in layers.split()]
    numbers = {n for found in ranges if found for n in range(int(found[1]), int(found[2] or found[1]) + 1)}
    if not numbers or None in ranges:
        raise ValueError(f"expected auto or layers such as '4-9 12', got {layers!r}")
    return sorted(numbers)
