"""`token-recycling warm`: generate text with the model, and save what a drafter learns from it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import console, running
from ..options import Drafting, Json, ModelOptions, checked_seed


def warm(
    model: ModelOptions,
    minutes: Annotated[float, typer.Option(help="Minutes of generation.")] = 1.0,
    output: Annotated[
        Path | None, typer.Option(help="Matrix file to write; default: where recycling:warmed=true finds it.")
    ] = None,
    drafter: Drafting = "recycling",
    history: Annotated[bool, typer.Option("--history", help="Also keep the outputs in the history.")] = False,
    seed: Annotated[int, typer.Option(help="Random seed of the outputs.", callback=checked_seed)] = 0,
    as_json: Json = False,
) -> None:
    """Let the model generate text without a prompt, and save what a drafter learns from it. Ctrl-C stops and saves."""
    if not minutes > 0:
        raise ValueError(f"--minutes must be > 0, got {minutes}")
    if output is not None and output.is_dir():
        raise ValueError(f"--output must be a file, got the folder {output}")
    new_drafter, loaded = running.drafter_and_model(drafter, model)

    from ...hf.warm import warm as warmed

    with console.working(f"generating for {minutes:g} minutes"):
        result = warmed(loaded.model, loaded.tokenizer, new_drafter, minutes, seed=seed, output=output, history=history)
    if as_json:
        console.print_json({**result._asdict(), "file": str(result.file)})
    else:
        print(f"{result.tokens:,} tokens of {result.texts} outputs in {result.seconds:.0f} s: {result.file}")
