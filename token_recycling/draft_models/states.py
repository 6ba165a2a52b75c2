"""The last hidden states of a model: what its output layer is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel


@contextmanager
def last_states(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """A list that every forward pass within the block adds its last hidden states to, (batch, n, hidden size).

    They are taken where the output layer reads them, so that they are the same for every architecture: behind the last
    norm, and of the positions alone whose logits are made. Raises ValueError for a model without an output layer.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"expected a model with an output layer, got {type(model).__name__}")
    seen: list[torch.Tensor] = []
    handle = head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    try:
        yield seen
    finally:
        handle.remove()


def state_size(model: PreTrainedModel) -> int:
    """The size of these states."""
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"expected a model with an output layer, got {type(model).__name__}")
    return head.weight.shape[1]
