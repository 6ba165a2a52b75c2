"""Where the nodes of a fast step come from: a tree that the host sends, or a template that the device fills itself.

A tree that the host has grown is padded to a *bucket*, so that few sizes have to be captured; its tokens and parents
are one small copy. A template that is filled from an adjacency matrix needs no host at all: retrieval, and learning
from the step before, are part of the step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ..recycling.matrix import Retrieval
from ..trees.draft import Draft

BUCKETS = (1, 8, 16, 32, 64, 96, 128, 192, 256)
"""Numbers of nodes, the root included, that trees are filled up to; the paper's tree has 81."""
PADDING = -1
"""The token of a node that only fills up the bucket: a root of its own, at the position of the root, which is never
accepted.
"""


class TreeArrays(NamedTuple):
    """A tree's arrays on the device, n nodes in order of depth."""

    parents: torch.Tensor
    """(n,) int64; a root is its own parent."""
    ancestors: torch.Tensor
    """(n, n) bool."""
    depths: torch.Tensor
    """(n,) int64."""


def shape_of(parents: torch.Tensor) -> TreeArrays:
    """The arrays of a tree from its parents (n,) int64, without looking at them: reach is doubled until it is whole."""
    n = len(parents)
    nodes = torch.arange(n, device=parents.device)
    seen = ((nodes[:, None] == nodes) | (nodes == parents[:, None])).float()
    for _ in range(max(0, n - 2).bit_length()):
        seen = (seen @ seen).clamp(max=1)
    return TreeArrays(parents, seen > 0, seen.sum(dim=1).long() - 1)


def bucket_of(nodes: int) -> int:
    """The smallest bucket for `nodes` nodes; beyond the largest, multiples of it."""
    return next((bucket for bucket in BUCKETS if bucket >= nodes), -(-nodes // BUCKETS[-1]) * BUCKETS[-1])


class HostSource:
    """Trees of up to `nodes` nodes that come from the host."""

    def __init__(self, nodes: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._sent = torch.zeros(2, nodes, dtype=torch.long, pin_memory=pinned)
        self._given = self._sent.to(device) if device.type != "cpu" else torch.zeros_like(self._sent)
        self._cells = self._sent.numpy()
        self.nodes = self.depths = nodes

    def send(self, draft: Draft) -> None:
        """Copies a draft to the device without waiting. The step before must have been read, and with it the copy."""
        own = len(draft.tree)
        self._cells[0, :own], self._cells[0, own:] = draft.tokens.cpu().numpy(), PADDING
        self._cells[1] = np.arange(self.nodes)
        self._cells[1, 1:own] = draft.tree.parents[1:]
        self._given.copy_(self._sent, non_blocking=True)

    def draft(self, root: torch.Tensor) -> tuple[torch.Tensor, TreeArrays]:
        return self._given[0], shape_of(self._given[1])

    def note(self, tokens: torch.Tensor, candidates: torch.Tensor) -> None:
        """Nothing: the host learns."""

    def state(self) -> list[torch.Tensor]:
        """What a step changes: nothing."""
        return []


class DeviceSource:
    """A template filled from the rows of a matrix that lies on the device (Token Recycling, section 3.2 and 3.3). What
    a step has shown is written to the matrix at the beginning of the next one: by then the host knows whether the text
    has ended in it, and learns from the last step itself.
    """

    def __init__(self, retrieval: Retrieval, device: torch.device) -> None:
        self.retrieval, tree = retrieval, retrieval.tree
        self.nodes, self.depths = len(tree), tree.depth + 1
        arrays = tree.on(device)
        self._shape = TreeArrays(arrays.parents, arrays.ancestors, arrays.depths)
        retrieval.matrix.fill_by_layers(tree, torch.zeros(1, dtype=torch.long, device=device))  # makes the arrays
        self._tokens = torch.zeros(self.nodes, dtype=torch.long, device=device)
        self._candidates = torch.zeros(self.nodes, retrieval.matrix.k, dtype=torch.int32, device=device)
        self._pending = torch.zeros(1, dtype=torch.bool, device=device)

    def draft(self, root: torch.Tensor) -> tuple[torch.Tensor, TreeArrays]:
        matrix = self.retrieval.matrix
        rows = torch.where(self._pending, self._candidates, matrix.rows_of(self._tokens))
        matrix.write(self._tokens, rows, self.retrieval.update)
        return matrix.fill_by_layers(self.retrieval.tree, root), self._shape

    def note(self, tokens: torch.Tensor, candidates: torch.Tensor) -> None:
        self._tokens.copy_(tokens)
        self._candidates.copy_(candidates)
        self._pending.fill_(True)

    def forget(self) -> None:
        """The host has learned from the last step, or there is none."""
        self._pending.fill_(False)

    def state(self) -> list[torch.Tensor]:
        """What a step changes."""
        return [self._tokens, self._candidates, self._pending, self.retrieval.matrix.storage]


Source = HostSource | DeviceSource
"""Drafts tokens (n,) int64 below the root (1,), `PADDING` where there is none, with their arrays; is told of the nodes'
tokens and of the k likeliest tokens (n, k) after each, if the plan has any.
"""
