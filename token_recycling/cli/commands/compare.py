"""`token-recycling compare`: the same prompts plain and recycled, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ...model import loading
from .. import console, running
from ..options import Chat, Device, Drafting, DType, Json, MaxNewTokens, Model, Threads


def compare(
    model: Model,
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPTS]...", help="Texts to continue; - is standard input.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="File with a prompt, or folder of such files; - is standard input.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take the first N prompts only.")] = None,
    drafter: Drafting = "recycling",
    max_new_tokens: MaxNewTokens = 128,
    dtype: DType = None,
    device: Device = None,
    threads: Threads = None,
    chat: Chat = None,
    as_json: Json = False,
) -> None:
    """Decodes prompts plain and recycled: the same text or not, and how much faster. Exit status 1 if any differs."""
    given = loading.read_prompts(texts or [], prompts)[:limit]
    made, loaded = running.drafter_and_model(drafter, model, dtype, device, threads)
    encoded = running.encoded(loaded, given, chat)

    from ..._util.text_stream import decoded, pieces
    from ...drafters._registry import make_drafter
    from .. import side_by_side

    # First calls cost extra on both sides; what is learned here goes with the drafter that learned it.
    throw_away = make_drafter(drafter)
    with console.working("warming up"):
        short = loading.arguments(loaded, encoded[0], 16)
        warm = side_by_side.compare(loaded.model, short, throw_away, plain_first=True)
    out = Console()
    if not as_json:
        console.legend(out, warm.stats.drafter)
    found = []
    for place, (prompt, ids) in enumerate(zip(given, encoded, strict=True)):
        arguments = loading.arguments(loaded, ids, max_new_tokens)
        with console.working(f"prompt {place + 1} of {len(given)}, plain and recycled", len(given), place):
            plain_first = place % 2 == 0
            found.append(side_by_side.compare(loaded.model, arguments, made, plain_first, *prompt))
        if not as_json:
            title = f"{place + 1} of {len(given)}"
            console.print_comparison(out, title, found[-1], pieces(loaded.tokenizer, found[-1].steps))
    summary = side_by_side.summary(found)
    if as_json:
        rows = [{**one.as_dict(), "text": decoded(loaded.tokenizer, one.recycled.tokens[0])} for one in found]
        console.print_json({"prompts": rows, "summary": summary})
    else:
        console.print_summary(out, summary)
    if not summary["identical"]:
        raise typer.Exit(1)
