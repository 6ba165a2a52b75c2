"""t(n) as a picture of text: a column for each size of tree, as high as its pass takes long."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

_COLUMNS, _ROWS = 64, 8
_EIGHTHS = " ▁▂▃▄▅▆▇█"


def picture(times: Mapping[int, float], marked: Iterable[int]) -> str:
    """Draws t(n) / t(1), given for some n and between them on straight lines, with an arrow under each size of
    `marked`. Where there are more sizes than columns, a column stands for the last of several.
    """
    largest, highest = max(times), max(times.values())
    each = math.ceil(largest / _COLUMNS)
    sizes = np.arange(each, largest + 1, each)
    unit = 2.0 ** math.ceil(math.log2(highest / _ROWS))
    heights = np.interp(sizes, list(times), list(times.values())) / unit
    lines = []
    for row in reversed(range(math.ceil(highest / unit))):
        eighths = np.clip(np.rint(8 * (heights - row)), 0, 8).astype(int)
        lines.append(f"{unit * (row + 1):>6g} │{''.join(_EIGHTHS[filled] for filled in eighths)}")
    named = {(n - 1) // each: str(n) for n in (max(1, largest * part // 4) for part in range(5))}
    arrows = {(n - 1) // each: "▲" for n in sorted(marked)}
    lines += [f"{'':6} └{'─' * len(sizes)}", f"{'n':>6}  {_placed(named)}", f"{'':6}  {_placed(arrows)}"]
    return "\n".join(line.rstrip() for line in lines)


def _placed(signs: Mapping[int, str]) -> str:
    """A line with each sign at its column; columns ascend."""
    line = ""
    for column, sign in signs.items():
        line = f"{line:<{column}}{sign}"
    return line
