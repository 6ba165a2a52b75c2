"""The shapes of forward passes on an accelerator: few numbers of rows, of cache slots and of sequences.

An attention library plans its work anew for every shape (cuDNN: 23 to 37 ms of host time, kept for ever), a captured
graph and compiled code have one. So drafts are filled up to a bucket of rows, and attention runs over a band of slots:
the sequence, the draft, and slots that are masked. On a CPU rows cost time, and every pass has its exact shape.
"""

from __future__ import annotations

ROWS = (1, 8, 16, 32, 64, 96, 128, 192, 256)
"""Numbers of nodes, the root included, that drafts are filled up to; the paper's tree has 81."""
BATCHES = (1, 2, 4, 8, 16, 32)
"""Numbers of sequences of captured steps."""
SHORTEST_BAND = 1024
"""Slots that an accelerator reads in a hundredth of the time of a pass; fewer are not worth a shape."""


def rows_of(nodes: int) -> int:
    """The smallest bucket for `nodes` nodes; beyond the largest, multiples of it."""
    return next((bucket for bucket in ROWS if bucket >= nodes), -(-nodes // ROWS[-1]) * ROWS[-1])


def band_of(slots: int) -> int:
    """The band for `slots` slots: 1024, 2048, 3072, 4096, 6144, 8192, ..."""
    band = SHORTEST_BAND
    while band < slots:
        band = band * 3 // 2 if band & (band - 1) == 0 and band > SHORTEST_BAND else 1 << band.bit_length()
    return band


def batch_of(sequences: int) -> int | None:
    """The smallest batch for so many sequences; None where there are more than in the largest."""
    return next((batch for batch in BATCHES if batch >= sequences), None)
