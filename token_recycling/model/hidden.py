"""Hidden states of a model and its layers, for drafters that need them.

Forward hooks read the hidden states, so any family works unchanged. If a family scales or caps logits after the output
layer, the order of candidates stays the same. Cost: some microseconds per forward pass to set the hooks.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from .compat import forward_hooks
from .parts import ATTRIBUTES_OF_TORCH, is_compiled


class NoHiddenStatesError(ValueError):
    """A model whose hidden states cannot be read."""


def last_state(layers: int) -> tuple[int, ...]:
    """Return the number of the hidden state after the final norm, in a model of `layers` layers; see `layer_states`."""
    return (layers,)


@contextlib.contextmanager
def layer_states(model: PreTrainedModel, numbers: Sequence[int]) -> Iterator[list[torch.Tensor]]:
    """Within the block, every forward pass of this thread appends the hidden states of its positions to the list: those
    numbered `numbers`, concatenated, (batch, n, states * hidden). As in `output_hidden_states`, number i is the input
    of layer i, and the number of layers is the output of the final norm. n counts all positions, or the last ones if a
    family leaves out those whose logits are not needed. Without `numbers` the list stays empty.

    Graphs of torch.compile bypass the hooks: call `parts.uncompiled(model)`. Raises NoHiddenStatesError if a model has
    no such layers, or they are compiled.
    """
    seen: list[torch.Tensor] = []
    if not numbers:
        yield seen
        return
    decoder, layers = _readable_layers(model, numbers)
    entered: dict[int, torch.Tensor] = {}
    thread = threading.get_ident()

    def enter(number: int, layer: Any, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any] | None = None) -> None:
        # A hook that is removed while another thread's pass is about to call it gets no keyword arguments.
        if kwargs is not None and threading.get_ident() == thread:
            entered[number] = args[0] if args else kwargs["hidden_states"]

    def leave(decoder: Any, args: Any, output: Any) -> None:
        if threading.get_ident() == thread:
            entered[len(layers)] = output[0]
            states = [entered[number].to(output[0].device) for number in numbers]
            entered.clear()
            if any(one.ndim != 3 for one in states):
                raise NoHiddenStatesError(
                    f"hidden states between the layers of {type(model).__name__} are not (batch, n, hidden); choose a "
                    "drafter that needs none"
                )
            n = min(one.shape[1] for one in states)
            seen.append(torch.cat([one[:, -n:] for one in states], dim=-1))

    hooks = [
        layers[number].register_forward_pre_hook(partial(enter, number), with_kwargs=True)
        for number in set(numbers) - {len(layers)}
    ]
    hooks.append(decoder.register_forward_hook(leave))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _readable_layers(
    model: PreTrainedModel, numbers: Sequence[int]
) -> tuple[torch.nn.Module, Sequence[torch.nn.Module]]:
    """Return the decoder of a model and its layers; raise NoHiddenStatesError if these hidden states cannot be read."""
    path, layers = decoder_layers(model)
    *above, _ = path.split(".")
    if any(not 0 <= number <= len(layers) for number in numbers):
        raise NoHiddenStatesError(
            f"{type(model).__name__} has hidden states 0 to {len(layers)}, got {list(numbers)}; choose a drafter that "
            "was made for this model"
        )
    if any(is_compiled(model.get_submodule(".".join(above[:depth]))) for depth in range(1, len(above) + 1)):
        raise NoHiddenStatesError(
            f"the layers of {type(model).__name__} are compiled and their hidden states cannot be read; load it "
            "without torch.compile, or choose a drafter that needs no hidden states"
        )
    return model.get_submodule(".".join(above)), [*layers]


def shallow_copy(module: torch.nn.Module) -> Any:
    """Return a copy with the same children, weights and hooks, whose children can be replaced."""
    plain = [value for name, value in vars(module).items() if name not in ATTRIBUTES_OF_TORCH]
    shared = (*module.children(), *module.parameters(), *module.buffers(), *forward_hooks(module), *plain)
    return copy.deepcopy(module, {id(value): value for value in shared})


def decoder_layers(model: PreTrainedModel) -> tuple[str, torch.nn.ModuleList]:
    """Return the path of the list of decoder layers, and that list; raise NoHiddenStatesError if there is none."""
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == layers
    ]
    # A vision or audio tower may have as many layers as the decoder, and may come first.
    decoder = {id(module) for module in model.get_decoder().modules()}
    for name, module in sorted(lists, key=lambda item: id(item[1]) not in decoder):
        return name, module
    raise NoHiddenStatesError(f"model must have a list of {layers} decoder layers, got {type(model).__name__}")


def output_layer(model: PreTrainedModel) -> torch.nn.Module:
    """Return the layer that computes logits from hidden states; raise NoHiddenStatesError if there is none."""
    layer = model.get_output_embeddings()
    if layer is None:
        raise NoHiddenStatesError(
            f"the output layer of {type(model).__name__} is not known; choose a drafter that needs no hidden states"
        )
    return layer


def output_width(model: PreTrainedModel) -> int:
    """Return the size of the hidden states that the output layer reads."""
    return int(output_layer(model).in_features)  # type: ignore[arg-type]
