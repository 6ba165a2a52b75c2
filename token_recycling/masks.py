"""What a model adds to its attention scores so that every node sees the text and its own ancestors, as far as the
layer reaches.

Positions, not cache slots, decide what is within a window or a chunk: nodes of one depth lie in different slots and
have the same position. Rows may differ, so that the same code serves several texts with holes in their caches.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .architectures import Reach

Masks = torch.Tensor | dict[str, torch.Tensor]
"""One mask for all layers, or one by type of layer."""


def masks(
    layers: Mapping[str, Reach],
    visible: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    dtype: torch.dtype,
) -> Masks:
    """Masks to be added, (batch or 1, 1, n, length + n) each: 0 where a query sees a key, else the lowest number.

    `visible` (batch or 1, 1, n, length + n) bool says what may be seen at all: no padding, no holes, no strangers.
    Positions are (batch or 1, n) and (batch or 1, length + n). Layers of one reach share one mask; if all do, it is
    returned alone.
    """
    made: dict[Reach, torch.Tensor] = {}
    for reach in layers.values():
        if reach not in made:
            within = reach.of(query_positions, key_positions)
            seen = visible if within is None else visible & within
            made[reach] = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            made[reach].masked_fill_(~seen, torch.finfo(dtype).min)
    if len(made) == 1:
        return next(iter(made.values()))
    return {kind: made[reach] for kind, reach in layers.items()}


def moves_with_text(layers: Mapping[str, Reach]) -> bool:
    """Whether the mask of a longer text is that of a shorter one with more columns before it; chunks lie fixed."""
    return all(reach.kind != "chunked" for reach in layers.values())


def windowed(mask: Masks, start: int, length: int) -> Masks:
    """Columns `start` to `start + length` of every mask, as views; a shared mask stays shared."""
    if isinstance(mask, torch.Tensor):
        return mask.narrow(3, start, length)
    views = {id(whole): whole.narrow(3, start, length) for whole in mask.values()}
    return {kind: views[id(whole)] for kind, whole in mask.items()}
