"""Draft trees of a batch, sent to the device in one copy.

All inputs of a forward pass over drafts and of their acceptance are in one byte buffer: lengths, tokens, parents,
depths, ancestors. Trees are padded to equal size with nodes that are never accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from .draft import Draft

PADDING = -1
"""Token of a padding node: its own root, at the position of the root, never accepted."""


class PackedTrees(NamedTuple):
    """Trees of b sequences, padded to n nodes each, on one device; `Draft` is the form on the host."""

    lengths: torch.Tensor
    """(b,) int64: tokens of each sequence before its root."""
    tokens: torch.Tensor
    """(b, n) int64; `PADDING` where there is no node."""
    parents: torch.Tensor
    """(b, n) int64; a root is its own parent."""
    depths: torch.Tensor
    """(b, n) int64."""
    ancestors: torch.Tensor
    """(b, n, n) bool; row i marks the nodes that node i attends to: its ancestors and itself."""

    def of(self, row: int) -> PackedTrees:
        """Return the tree of a single sequence."""
        return PackedTrees(*(part[row : row + 1] for part in self))

    @property
    def positions(self) -> torch.Tensor:
        """(b, n) int64: position of every node in its sequence."""
        return self.depths + self.lengths[:, None]


def packed_size(batch: int, nodes: int) -> int:
    """Return the bytes of a buffer for `batch` trees of up to `nodes` nodes."""
    return 8 * batch * (1 + 3 * nodes) + batch * nodes * nodes


def pack(drafts: Sequence[Draft], lengths: Sequence[int], nodes: int, buffer: torch.Tensor) -> None:
    """Write drafts that follow the first `lengths[row]` tokens of each sequence into a buffer (packed_size,) uint8 on
    the host.
    """
    batch, whole = len(drafts), buffer.numpy()
    end = 8 * batch * (1 + 3 * nodes)
    numbers = whole[:end].view(np.int64).reshape(batch, 1 + 3 * nodes)
    ancestors = whole[end:].view(np.bool_).reshape(batch, nodes, nodes)
    numbers[:, 0] = lengths
    ancestors[:] = np.eye(nodes, dtype=bool)
    for row, draft in enumerate(drafts):
        own = len(draft)
        tokens, parents, depths = numbers[row, 1:].reshape(3, nodes)
        tokens[:own], tokens[own:] = draft.tokens, PADDING
        parents[:] = np.arange(nodes)
        parents[1:own] = draft.parents[1:]
        depths[:own], depths[own:] = draft.depths, 0
        ancestors[row, :own, :own] = draft.ancestors


def unpack(buffer: torch.Tensor, batch: int, nodes: int) -> PackedTrees:
    """Return the trees in a buffer (packed_size,) uint8, as views of it, on its device."""
    end = 8 * batch * (1 + 3 * nodes)
    numbers = buffer[:end].view(torch.int64).view(batch, 1 + 3 * nodes)
    tokens, parents, depths = numbers[:, 1:].view(batch, 3, nodes).unbind(1)
    return PackedTrees(numbers[:, 0], tokens, parents, depths, buffer[end:].view(torch.bool).view(batch, nodes, nodes))


def send(drafts: Sequence[Draft], lengths: Sequence[int], nodes: int, device: torch.device) -> PackedTrees:
    """Return the trees of `drafts` on `device`, sent by one copy that the host does not wait for."""
    size = packed_size(len(drafts), nodes)
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda" and torch.cuda.is_available())
    pack(drafts, lengths, nodes, buffer)
    return unpack(buffer.to(device, non_blocking=True), len(drafts), nodes)
