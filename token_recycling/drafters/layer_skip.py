"""Self-speculation: the target drafts without some of its layers (Zhang et al., 2309.08168).

No second model and no copy of weights, but a KV cache of its own. Whole layers are skipped; the paper skips attention
and feed-forward parts separately, found by a search of hours. Cost per step: a forward pass without these layers per
drafting step. Cost of the search, once: 64 tokens, and for every layer two passes over them and the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from .._util.locks import Lock
from ..model.hidden import decoder_layers, shallow_copy
from ..model.info import UnsupportedModelError
from ..model.inspection import input_device
from ..model.prefill import continued
from ..model.target import Target
from ._shared.draft_models import CausalDrafter, Mode, ModelSequence

_SAMPLE, _LONGEST = 64, 512
"""Tokens that the target appends to the first prompt for the search, and most tokens of both that are read."""


@dataclass(kw_only=True)
class LayerSkip(CausalDrafter):
    """Drafts one branch with the target, some of its layers skipped; it ends where the draft is unsure."""

    layers: str | Sequence[int] = "auto"
    """The layers to skip, counted from 0, never the first one: such as `4-9 12`. auto: chosen by a short search on the
    first prompt and the target's continuation; on a text of the target's own where sequences are isolated.
    """
    depth: int = 6
    """Maximum number of drafting steps."""
    theta_prob: float = 0.6
    """Drafting ends after a token of a lower probability."""
    # One branch, as in the paper: the options of draft models are fixed here.
    mode: ClassVar[Mode] = "tree"  # type: ignore[misc]
    k: ClassVar[int] = 1  # type: ignore[misc]
    theta_sib: ClassVar[float] = 0.0  # type: ignore[misc]
    tau: ClassVar[int] = 1  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._skipped = None if self.layers == "auto" else _numbers(self.layers)
        self._expected: float | None = None
        self._choosing = Lock()
        self._isolated: LayerSkip | None = None
        """The fork of all isolated sequences, whose layers no prompt chooses; None until there is one."""
        self._chooses_by_prompt = True

    def fork(self) -> LayerSkip:
        """Return itself once the layers are chosen: nothing else is learned. Before, one fork for all: it chooses by
        the target's own text, so that no sequence learns of the prompt of another.
        """
        with self._choosing:
            if self._skipped is not None or not self._chooses_by_prompt:
                return self
            if self._isolated is None:
                self._isolated = replace(self)
                self._isolated._chooses_by_prompt = False
            return self._isolated

    def fit(self, target: Target) -> None:
        _check(target)
        if self._skipped is not None:
            super().fit(target)

    def start(self, prompt: torch.Tensor, target: Target) -> ModelSequence:
        with self._choosing:
            if self._skipped is None:
                self.choose(target, prompt if self._chooses_by_prompt else _beginning(target))
        return super().start(prompt, target)

    def choose(self, target: Target, prompt: torch.Tensor) -> list[int]:
        """Choose the layers by the target's continuation of `prompt` (length,), once for all sequences."""
        _check(target)
        remaining = _SAMPLE if target.max_length is None else min(_SAMPLE, target.max_length - len(prompt))
        sequence = continued(target, prompt, max(0, remaining))
        self._skipped, self._expected = best_layers(target.model, sequence[-_LONGEST:], self.depth)
        return self._skipped

    def place(self, target: Target) -> Target:
        """Return the target without the layers; raises ValueError for a target that has not these."""
        _check(target)
        last = target.config.num_hidden_layers - 1
        if not self._skipped or not all(0 < number <= last for number in self._skipped):
            raise ValueError(f"layers must be from 1 to {last}, got {self.layers!r}; the first one cannot be skipped")
        return Target(without_layers(target.model, self._skipped))

    def step_cost(self, target: Target, model: Target) -> float:
        assert self._skipped is not None
        return cost_without(target.model, self._skipped)

    def model_in_words(self) -> str:
        listed = " ".join(map(str, self._skipped or []))
        expected = f" (expected to be {self._expected:.2f} times as fast)" if self._expected is not None else ""
        return f"the target without layers {listed}{expected}"


def _beginning(target: Target) -> torch.Tensor:
    """Return the token (1,) that begins a text of the target's own."""
    config = target.model.generation_config
    tokens = torch.tensor([0 if config is None or config.bos_token_id is None else config.bos_token_id])
    return tokens.flatten()[:1]


def _check(target: Target) -> None:
    reason = why_not(target)
    if reason is not None:
        raise UnsupportedModelError(f"layers cannot be skipped: {reason}")


def _numbers(layers: str | Sequence[int]) -> list[int]:
    if not isinstance(layers, str):
        return sorted(set(layers))
    ranges = [re.fullmatch(r"(\d+)(?:-(\d+))?", part) for part in layers.split()]
    numbers = {n for match in ranges if match for n in range(int(match[1]), int(match[2] or match[1]) + 1)}
    if not numbers or None in ranges:
        raise ValueError(f"layers must be auto or numbers such as '4-9 12', got {layers!r}")
    return sorted(numbers)


class _Skipped(torch.nn.Module):
    """Takes the place of a layer and returns its input; all other attributes are the layer's."""

    def __init__(self, layer: torch.nn.Module, as_tuple: bool) -> None:
        super().__init__()
        self.as_tuple = as_tuple
        self.__dict__["layer"] = layer  # not as a submodule

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        states = args[0] if args else kwargs["hidden_states"]
        return (states, None) if self.as_tuple else states


def why_not(target: Target) -> str | None:
    """Return why no layers of a model can be skipped, or None."""
    model, config, border = target.model, target.config, target.info.border
    if border is not None and border.changes_model:
        return f"{type(model).__name__} changes its rotary positions between forward passes"
    if target.info.recurrent:
        return f"{type(model).__name__} has recurrent layers"
    if config.num_hidden_layers < 2:
        return f"num_hidden_layers must be >= 2, got {config.num_hidden_layers}"
    if getattr(config, "num_kv_shared_layers", 0):
        return f"{type(model).__name__} shares keys and values between layers"
    names = decoder_layers(model)[0].split(".")
    if any("forward" in vars(model.get_submodule(".".join(names[:depth]))) for depth in range(len(names) + 1)):
        return "the model must be on one device: some of its modules are wrapped to be moved between devices"
    return None


def without_layers(model: PreTrainedModel, skipped: Collection[int]) -> PreTrainedModel:
    """Return a shallow copy on the same weights. The first layer must stay: it holds the length of the cache."""
    path, layers = decoder_layers(model)
    as_tuple = _returns_tuple(model, layers[0])
    shorter = torch.nn.ModuleList(
        [_Skipped(layer, as_tuple) if number in skipped else layer for number, layer in enumerate(layers)]
    )
    shorter.train(layers.training)
    view = copied = shallow_copy(model)
    *parents, last = path.split(".")
    for name in parents:
        setattr(copied, name, shallow_copy(getattr(copied, name)))
        copied = getattr(copied, name)
    setattr(copied, last, shorter)
    return view


@torch.no_grad()
def _returns_tuple(model: PreTrainedModel, layer: torch.nn.Module) -> bool:
    tuples = []
    hook = layer.register_forward_hook(lambda module, args, output: tuples.append(isinstance(output, tuple)))
    try:
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=input_device(model)), use_cache=False)
    finally:
        hook.remove()
    return tuples[0]


@torch.no_grad()
def best_layers(model: PreTrainedModel, sequence: torch.Tensor, depth: int) -> tuple[list[int], float]:
    """Return the layers to skip for the most tokens per cost, and the expected speedup over plain decoding.

    Layers are ranked by how seldom the model's choices in `sequence` (length,) change without each; of the first 1, 2,
    ... layers in this order the best set is taken, at the best draft length up to `depth`.
    """
    _, layers = decoder_layers(model)
    choices = _choices(model, sequence)

    def agreement(skipped: Sequence[int]) -> float:
        return float((_choices(without_layers(model, skipped), sequence) == choices).float().mean())

    ranked = sorted(range(1, len(layers)), key=lambda number: -agreement([number]))
    sets = [ranked[:size] for size in range(1, len(layers))]
    speeds = [speed(agreement(skipped), cost_without(model, skipped), depth) for skipped in sets]
    fastest = max(speeds)
    return sorted(sets[speeds.index(fastest)]), fastest


def _choices(model: PreTrainedModel, sequence: torch.Tensor) -> torch.Tensor:
    return model(input_ids=sequence[None], use_cache=False).logits[0].argmax(dim=-1)


def cost_without(model: PreTrainedModel, skipped: Collection[int]) -> float:
    """Return the cost of a forward pass without some layers relative to a full one: weights read, the output layer
    included.
    """
    sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in decoder_layers(model)[1]]
    head = model.get_output_embeddings()
    whole = sum(sizes) + (sum(weight.numel() for weight in head.parameters()) if head is not None else 0)
    return (whole - sum(sizes[number] for number in skipped)) / whole


def speed(agreement: float, cost: float, depth: int) -> float:
    """Return expected tokens per step / cost of a step, for the best draft length up to `depth` (Leviathan et al.,
    2211.17192, theorem 3.8), where a drafted token is right with probability `agreement` and costs `cost` of a forward
    pass.
    """
    lengths = range(1, depth + 1)
    return max(sum(agreement**place for place in range(n + 1)) / (1 + n * cost) for n in lengths)
