"""Forward passes of fixed shapes over the drafts of a batch, on an accelerator.

Attention libraries plan every shape once (cuDNN: 23 to 37 ms of host time, kept forever), and so do captured graphs and
compiled code. So drafts are padded to a bucket of rows (`rows_of`), and attention runs over a band of slots
(`band_of`): the sequence, the draft, and masked slots. On a CPU rows cost time, and every forward pass has its exact
shape (`target.TreeInputs`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..trees.packed import PackedTrees
from .architectures import Reach
from .kv_cache import TreeCache
from .target import Masks, PassInputs, Target, masks
from .tree_layer import Frame, window_band, window_start

ROWS = (1, 8, 16, 32, 64, 96, 128, 192, 256)
"""Numbers of nodes, root included, to which drafts are padded; the paper's tree has 81."""
BATCHES = (1, 2, 4, 8, 16, 32)
"""Numbers of sequences of captured passes."""
SHORTEST_BAND = 1024
"""Slots that an accelerator reads in a hundredth of the time of a pass; fewer do not justify another shape."""


def rows_of(nodes: int) -> int:
    """Return the smallest bucket for `nodes` nodes; beyond the largest, multiples of it."""
    return next((bucket for bucket in ROWS if bucket >= nodes), -(-nodes // ROWS[-1]) * ROWS[-1])


def band_of(slots: int) -> int:
    """Return the band for `slots` slots: 1024, 2048, 3072, 4096, 6144, 8192, ..."""
    band = SHORTEST_BAND
    while band < slots:
        band = band * 3 // 2 if band & (band - 1) == 0 and band > SHORTEST_BAND else 1 << band.bit_length()
    return band


def batch_of(sequences: int) -> int:
    """Return the smallest batch for this many sequences; beyond the largest, multiples of it."""
    return next((batch for batch in BATCHES if batch >= sequences), -(-sequences // BATCHES[-1]) * BATCHES[-1])


def packed_inputs(target: Target, trees: PackedTrees, band: int, cache: TreeCache) -> PassInputs:
    """Return the inputs of a fixed-shape pass over packed trees. The nodes of each take the slots after its sequence,
    and attention runs over the first `band` slots; in layers with a window, over those that are kept. Only numbers on
    the device change from pass to pass, so that a pass can be captured. The cache must take frames, and must have
    dropped only slots before windows of `trees.lengths` tokens.
    """
    n, layers, windowed = trees.tokens.shape[1], target.info.layers, cache.windowed
    behind = trees.lengths[:, None] + torch.arange(n, device=target.device)
    frame, mask = Frame(behind, band), tree_masks(layers, trees, band, target.dtype)
    if windowed is not None:
        starts, few = window_start(trees.lengths, windowed.window), min(band, window_band(windowed.window, n))
        frame = Frame(behind, band, windowed=Frame(behind - starts[:, None], few))
        near = tree_masks(layers, trees, few, target.dtype, starts)
        if isinstance(mask, dict) and isinstance(near, dict):
            mask = {kind: (mask if reach == Reach() else near)[kind] for kind, reach in layers.items()}
        else:
            mask = near
    tokens = trees.tokens.where(trees.tokens >= 0, trees.tokens[:, :1])
    return PassInputs(tokens, mask, trees.positions, frame)


def tree_masks(
    layers: Mapping[str, Reach],
    trees: PackedTrees,
    band: int,
    dtype: torch.dtype,
    starts: torch.Tensor | None = None,
) -> Masks:
    """Return masks (batch, 1, n, band) of trees whose nodes have the slots after their sequences: a node sees the
    tokens of its sequence and its ancestors. The first slot of the band is number `starts` (batch,) of its sequence.
    """
    n = trees.tokens.shape[1]
    slots = torch.arange(band, device=trees.tokens.device)[None]
    if starts is not None:
        slots = slots + starts[:, None]
    nodes = slots - trees.lengths[:, None]
    drafted = (nodes >= 0) & (nodes < n)
    nodes = nodes.clamp(0, n - 1).expand(len(trees.tokens), -1)
    ancestors = trees.ancestors.gather(2, nodes[:, None].expand(-1, n, -1))
    visible = (slots < trees.lengths[:, None])[:, None] | (drafted[:, None] & ancestors)
    keys = torch.where(drafted, trees.positions.gather(1, nodes), slots)
    return masks(layers, visible[:, None], trees.positions, keys, dtype)
