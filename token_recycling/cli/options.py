"""Arguments and options that several commands take."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from ..drafters._registry import drafter_names


def completed_drafters(typed: str) -> list[str]:
    """What a shell offers for a drafter: its options are for the user to write."""
    return [name for name in drafter_names() if name.startswith(typed)]


Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a model, .gguf file, or name on the hub.")]
Drafting = Annotated[
    str,
    typer.Option(
        "--drafter",
        metavar="SPEC",
        help="Drafter with options, such as recycling:k=16,tree=paper.",
        autocompletion=completed_drafters,
    ),
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Most tokens to generate.")]
DType = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"] | None,
    typer.Option(help="Type of the weights; default float32 on a CPU, else auto, the file's."),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; default the accelerator if there is one.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; default torch's choice.")]
Chat = Annotated[
    bool | None,
    typer.Option("--chat/--raw", help="Put prompts into the chat template; default if the tokenizer has one."),
]
Temperature = Annotated[float, typer.Option(min=0, help="0 is greedy; above, tokens are drawn.")]
TopP = Annotated[float | None, typer.Option(min=0, max=1, help="Draw from the likeliest with this share.")]
TopK = Annotated[int | None, typer.Option(min=1, help="Draw from this many likeliest tokens.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the draws.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
