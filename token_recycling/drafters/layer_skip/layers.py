"""A model without some of its layers, on the same weights; and which layers it can best do without.

The skipped layers are left out of a shallow copy: modules and weights are the model's own, which is not changed. The
search takes 2 n forward passes of a model of n layers over one sample text.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ...model.inspection import decoder_layers, input_device
from ...model.tree_model import TreeModel


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


def why_not(target: TreeModel) -> str | None:
    """Why no layers of a model can be skipped, or None if they can."""
    model, config, border = target.model, target.config, target.support.border
    if border is not None and border.changes_model:
        return f"expected rotary positions that no other pass over the model changes, got {type(model).__name__}"
    if target.support.recurrent:
        return f"expected layers that attend, got {type(model).__name__}, of which some keep states over the text"
    if config.num_hidden_layers < 2:
        return "expected a model of two layers or more, got one of one"
    if getattr(config, "num_kv_shared_layers", 0):
        return f"expected layers with keys and values of their own, got {type(model).__name__}, which shares them"
    names = decoder_layers(model)[0].split(".")
    if any("forward" in vars(model.get_submodule(".".join(names[:depth]))) for depth in range(len(names) + 1)):
        return "expected a model on one device, got one whose parts were wrapped to be moved around"
    return None


def without_layers(model: PreTrainedModel, skipped: Collection[int]) -> PreTrainedModel:
    """A shallow copy of the model without some of its layers, counted from 0. The first layer has to stay, since the
    length of the cache is read from it.
    """
    path, layers = decoder_layers(model)
    as_tuple = _returns_tuple(model, layers[0])
    shorter = torch.nn.ModuleList(
        [_Skipped(layer, as_tuple) if number in skipped else layer for number, layer in enumerate(layers)]
    )
    shorter.train(layers.training)
    view = copied = _shallow(model)
    *parents, last = path.split(".")
    for name in parents:
        copied._modules[name] = _shallow(copied._modules[name])
        copied = copied._modules[name]
    copied._modules[last] = shorter
    return view


def _shallow(module: Any) -> Any:
    """A copy with its own table of the same submodules."""
    made = copy.copy(module)
    made._modules = dict(module._modules)
    return made


@torch.no_grad()
def _returns_tuple(model: PreTrainedModel, layer: torch.nn.Module) -> bool:
    seen = []
    hook = layer.register_forward_hook(lambda module, args, output: seen.append(isinstance(output, tuple)))
    try:
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=input_device(model)), use_cache=False)
    finally:
        hook.remove()
    return seen[0]


@torch.no_grad()
def best_layers(model: PreTrainedModel, text: torch.Tensor, depth: int) -> tuple[list[int], float]:
    """Which layers to skip for the most tokens by cost, and the expected speed as a multiple of plain decoding.

    Layers are ranked by how seldom the model's choices after the tokens of `text` (length,) change without each of
    them. Of the sets of the first 1, 2, ... layers of that ranking the best is taken, at the best length of draft up
    to `depth`.
    """
    _, layers = decoder_layers(model)
    wanted = _choices(model, text)

    def agreement(skipped: Sequence[int]) -> float:
        return float((_choices(without_layers(model, skipped), text) == wanted).float().mean())

    ranked = sorted(range(1, len(layers)), key=lambda number: -agreement([number]))
    sets = [ranked[:size] for size in range(1, len(layers))]
    speeds = [speed(agreement(skipped), cost_without(model, skipped), depth) for skipped in sets]
    fastest = max(speeds)
    return sorted(sets[speeds.index(fastest)]), fastest


def _choices(model: PreTrainedModel, text: torch.Tensor) -> torch.Tensor:
    return model(input_ids=text[None], use_cache=False).logits[0].argmax(dim=-1)


def cost_without(model: PreTrainedModel, skipped: Collection[int]) -> float:
    """Cost of a forward pass without some layers, as a share of the whole: weights read, the output layer included."""
    sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in decoder_layers(model)[1]]
    head = model.get_output_embeddings()
    whole = sum(sizes) + (head.weight.numel() if head is not None else 0)
    return (whole - sum(sizes[number] for number in skipped)) / whole


def speed(agreement: float, cost: float, depth: int) -> float:
    """Expected tokens a step by its cost, for the best length of draft up to `depth` (Leviathan et al., 2211.17192,
    theorem 3.8), where a drafted token is right with probability `agreement` and costs `cost` of a forward pass.
    """
    lengths = range(1, depth + 1)
    return max(sum(agreement**place for place in range(n + 1)) / (1 + n * cost) for n in lengths)
