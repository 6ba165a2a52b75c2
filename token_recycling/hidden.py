"""The last hidden states: what a model's output layer is given, whatever the architecture does before and after it.

A hook on the output layer sees them, exactly as they are turned into logits: after the last norm, scaled where a family
scales them. Where a family scales or caps the logits afterwards, the order of candidates stays. Cost: none where nobody
asks; else setting the hook, some microseconds a pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel


class NoHiddenStatesError(ValueError):
    """A model whose last hidden states cannot be seen."""


@contextlib.contextmanager
def hidden_states(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Within it every forward pass adds its (batch, n, hidden) to the list: of the positions whose logits are made.

    Raises NoHiddenStatesError where a model has no output layer of its own, or is compiled with it: a graph that was
    made without the hook would be used again.
    """
    if getattr(model, "_compiled_call_impl", None) or hasattr(model.forward, "_torchdynamo_orig_callable"):
        raise NoHiddenStatesError(
            f"expected a model whose hidden states can be seen, got {type(model).__name__} compiled as a whole; "
            "compile what is before its output layer (`model.model = torch.compile(model.model)`), or choose a drafter "
            "that needs no hidden states"
        )
    seen: list[torch.Tensor] = []
    hook = output_layer(model).register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        hook.remove()


def output_layer(model: PreTrainedModel) -> torch.nn.Module:
    """What makes logits of hidden states; raises NoHiddenStatesError where a model has none of its own."""
    layer = model.get_output_embeddings()
    if layer is None:
        raise NoHiddenStatesError(
            f"expected a model whose output layer is known, got {type(model).__name__} without; "
            "choose a drafter that needs no hidden states"
        )
    return layer
