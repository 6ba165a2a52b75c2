"""Batches: plain `generate` against the accelerated one at batch sizes 1, 2, 4 and 8, on the same prompts in one run.

With more texts a forward pass has more rows, so that on a CPU every drafted node costs more: the table says where
drafting stops paying.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from token_recycling import Stats, generate, make_drafter

ROOT = Path(__file__).parent.parent


def main(
    model: Annotated[Path, typer.Argument(help="a local model folder")] = ROOT / "models" / "target",
    prompts: Annotated[Path, typer.Option(help="a folder of prompts, one a file")] = ROOT / "models" / "prompts",
    drafter: Annotated[str, typer.Option(help="the drafter to measure")] = "recycling",
    max_new_tokens: Annotated[int, typer.Option(help="tokens generated for each prompt")] = 96,
) -> None:
    """Prints one row per batch size."""
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    texts = [path.read_text() for path in sorted(path for path in prompts.iterdir() if path.is_file())][:16]
    arguments = {"max_new_tokens": max_new_tokens, "do_sample": False, "eos_token_id": None}
    table = Table("batch", "plain tokens/s", "recycled tokens/s", "speedup", "MAT", "identical")
    for size in track((1, 2, 4, 8), "measuring", console=Console(stderr=True)):
        batches = [
            tokenizer(texts[place : place + size], return_tensors="pt", padding=True) for place in range(0, 16, size)
        ]
        target.generate(**batches[0], **arguments)
        generate(target, **batches[0], **arguments, drafter=drafter)
        seconds, same, stats, made = [0.0, 0.0], True, Stats(), make_drafter(drafter)
        for inputs in batches:
            began = time.perf_counter()
            plain = target.generate(**inputs, **arguments)
            seconds[0] += time.perf_counter() - began
            began = time.perf_counter()
            ours = generate(target, **inputs, **arguments, drafter=made, stats=stats)
            seconds[1] += time.perf_counter() - began
            same &= torch.equal(plain, ours)
        plain_speed, our_speed = (16 * max_new_tokens / spent for spent in seconds)
        figures = (f"{plain_speed:.0f}", f"{our_speed:.0f}", f"{our_speed / plain_speed:.2f}", f"{stats.mat:.2f}")
        table.add_row(str(size), *figures, "yes" if same else "NO")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
