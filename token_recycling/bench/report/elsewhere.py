"""What to expect on other machines: speedups reckoned from tokens a step here and the cost of a step there.

    speedup = MAT(n) / (t(n) / t(1))

for trees of a fixed size, whose MAT does not depend on the machine; n are the nodes of a step, the root included.
Of the two GPUs no curve of t(n) is published, but MAT and speedup of methods whose passes have a known size are, by
which a step of n nodes costs MAT / speedup steps of plain decoding, drafting included: Spec-Bench's leaderboard
(github.com/hemingkx/Spec-Bench, Leaderboard.md, 22 April 2025; Vicuna-7B-v1.3, float16, greedy, batches of 1). Prompt
lookup has at most 10 tokens and the root, Lookahead (N 5, W 7, G 7) 56 tokens, Token Recycling 80 nodes and the root.
The CPU's curve is of forward passes alone, measured by this project. Between the points a curve is taken as straight,
and as flat after the last.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from . import words
from .summary import Comparison
from .table import Table
from .tables import table_of

CURVES = {
    "A100": {1: 1.0, 11: 1.75 / 1.66, 56: 1.64 / 1.34, 81: 2.73 / 2.22},
    "RTX 3090": {1: 1.0, 11: 1.73 / 1.64, 56: 1.64 / 1.13, 81: 2.73 / 1.40},
    "CPU": {1: 1.0, 2: 0.97, 4: 0.99, 8: 1.10, 12: 1.19, 16: 1.35, 24: 1.42, 32: 1.70, 48: 2.15, 64: 2.53, 81: 2.90},
}
"""t(n) / t(1) by nodes; of the GPUs MAT / speedup."""
_FIXED = r"published$|recycling:(?:.*,)?tree="
"""Methods whose trees have the same size on every machine."""
_NOTE = (
    "Reckoned, not measured: tokens a step as measured here, by what a step of so many nodes costs there, over plain "
    "decoding there. The best of a column is marked for each kind of text. A100 and RTX 3090: the cost of a step is "
    "MAT / speedup of prompt lookup, Lookahead and Token Recycling with Vicuna-7B in float16 on Spec-Bench's "
    "leaderboard (github.com/hemingkx/Spec-Bench, 22 April 2025). CPU: forward passes of SmolLM2-135M-Instruct in "
    "bfloat16 on two cores. The prompt's own pass is left out; other models and texts have other costs."
)


def relative_cost(machine: str, nodes: float) -> float:
    """t(n) / t(1) of a machine of `CURVES`."""
    curve = CURVES[machine]
    return float(np.interp(nodes, list(curve), list(curve.values())))


def reckoned(found: Comparison) -> pd.DataFrame:
    """Speedups to expect by kind of text and method: columns `category`, `method`, `nodes`, `MAT` and the machines."""
    whole = pd.concat({"all": found.figures}, names=["category", "method"])
    every = pd.concat([whole, found.by_category])["mat"].dropna().rename("MAT").reset_index()
    # A tree is as large for every kind of text, but for the end of a text.
    every["nodes"] = every["method"].map(found.figures["drafted"]) + 1
    every = every[every["method"].str.match(_FIXED)].dropna()
    for machine in CURVES:
        every[machine] = every["MAT"] / [relative_cost(machine, nodes) for nodes in every["nodes"]]
    return every.sort_values("nodes", kind="stable").reset_index(drop=True)


def elsewhere_table(found: Comparison) -> Table | None:
    """What `reckoned` says, kind by kind; None where no tree of a fixed size was measured."""
    every = reckoned(found).rename(columns={"MAT": "mat"})
    if every.empty:
        return None
    kinds = [*found.categories, *["all"] * (len(found.categories) > 1)]
    every = pd.concat([every[every["category"] == kind] for kind in kinds])
    every = every.assign(category=every["category"].map(words.heading), label=every["method"].map(found.labels))
    names = {"kind of text": "category", "method": "label"}
    return table_of(
        "What to expect elsewhere", every, ["nodes", "MAT", *CURVES], _NOTE, names, [*CURVES], within="category"
    )
