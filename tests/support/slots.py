"""Comparison of two caches, slot by slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import Cache, DynamicCache


def assert_same_slots(
    ours: Cache, wanted: Cache, paddings: Sequence[int] | None = None, atol: float = 1e-4, rtol: float = 1e-4
) -> None:
    """Assert that two caches of one type have equal content, except for `paddings` slots at the start of each row."""
    assert type(ours) is type(wanted)
    length = int(wanted.get_seq_length())
    assert int(ours.get_seq_length()) == length
    for own, theirs in zip(ours.layers, wanted.layers, strict=True):
        assert type(own) is type(theirs) or type(ours) is DynamicCache
        if getattr(theirs, "keys", None) is None:  # the layer shares keys of another one, or has none
            continue
        assert own.keys.shape == theirs.keys.shape
        dropped = max(0, length - own.keys.shape[2])
        for name in ("keys", "values", "indexer_keys"):
            if getattr(theirs, name, None) is None:
                continue
            for row, padding in enumerate(paddings or [0] * len(theirs.keys)):
                states = [
                    getattr(layer, name)[row, ..., max(0, padding - dropped) :, :].cpu() for layer in (own, theirs)
                ]
                torch.testing.assert_close(*states, atol=atol, rtol=rtol)
