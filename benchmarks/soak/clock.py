"""`token-recycling` with a clock that jumps: `python -m benchmarks.soak.clock serve ...`.

The machine's own clock stays as it is: the time of day that this process sees is moved, by up to a day in either
direction, every few seconds. What measures lengths of time by it is found out so.
"""

from __future__ import annotations

import random
import time

_EVERY = 3.0
"""Seconds between two jumps."""
_FARTHEST = 86_400.0

_now, _draws = time.time, random.Random(0)
_jumped, _offset = time.monotonic(), 0.0


def jumping() -> float:
    """The time of day, moved."""
    global _jumped, _offset
    if time.monotonic() - _jumped > _EVERY:
        _jumped, _offset = time.monotonic(), _draws.uniform(-_FARTHEST, _FARTHEST)
    return _now() + _offset


if __name__ == "__main__":
    time.time = jumping
    from token_recycling.cli.app import app

    app()
