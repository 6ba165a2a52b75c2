"""t(n) / t(1): what a forward pass over n nodes costs, by which the default drafter sizes its trees.

    python -m benchmarks.pass_times MODEL --dtype bfloat16 --length 1000

Chains of n nodes after a prompt, in processor time of one thread, the median of the rounds, all sizes in turn.
"""

from __future__ import annotations

import time
from typing import Annotated

import numpy as np
import pandas as pd
import torch
import typer

from token_recycling import load
from token_recycling.bench.tables import Table
from token_recycling.model.kv_cache import TreeCache
from token_recycling.model.prefill import prefill
from token_recycling.model.support import ready
from token_recycling.model.target import Target
from token_recycling.trees.draft import Draft

SIZES = (1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64)


def main(
    model: Annotated[str, typer.Argument(help="a model folder, file or hub name")],
    dtype: Annotated[str, typer.Option(help="of the weights")] = "float32",
    length: Annotated[int, typer.Option(help="tokens of the prompt")] = 200,
    rounds: Annotated[int, typer.Option(help="passes of each size")] = 9,
    threads: Annotated[int, typer.Option(help="CPU threads; processor time is that of one")] = 1,
) -> None:
    """Prints a table."""
    torch.set_num_threads(threads)
    times = pass_seconds(ready(load(model, dtype=dtype).model), length, rounds)
    cells = {"nodes": list(SIZES), "ms": [f"{1000 * one:.2f}" for one in times]}
    ratios = [f"{one / times[0]:.2f}" for one in times]
    print(Table("t(n)", pd.DataFrame({**cells, "t(n) / t(1)": ratios})).markdown())


def pass_seconds(target: Target, length: int, rounds: int) -> np.ndarray:
    """(sizes,) processor seconds of a forward pass over a chain of each of `SIZES` nodes after `length` tokens."""
    cache = target.new_cache()
    with torch.inference_mode(False), torch.no_grad():
        prefill(target, [torch.randint(0, target.vocab_size, (length,))], cache)
        kept, times = TreeCache(cache), np.empty((rounds, len(SIZES)))
        for turn in range(rounds):
            for place, size in enumerate(SIZES):
                draft = Draft.chain(np.zeros(size))
                began = time.process_time()
                target.forward(target.inputs.of([draft], [length - 1], length - 1), cache)
                times[turn, place] = time.process_time() - began
                kept.keep(length - 1, [length - 1], [[]])
    return np.median(times, axis=0)


if __name__ == "__main__":
    typer.run(main)
