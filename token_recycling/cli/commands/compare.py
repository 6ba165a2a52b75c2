"""`token-recycling compare`: the same prompts plain and recycled, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..._util.prompts import read_prompts
from ...model import loading
from .. import console, running
from ..options import Chat, Device, DeviceMap, Drafting, DType, Json, MaxNewTokens, Model, Prepack, Threads


def compare(
    model: Model,
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPTS]...", help="Texts to continue; - is standard input.")
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="File with a prompt, or folder of such files; - is standard input; may be repeated."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take the first N prompts only.")] = None,
    drafter: Drafting = "recycling",
    max_new_tokens: MaxNewTokens = 128,
    dtype: DType = None,
    device: Device = None,
    device_map: DeviceMap = None,
    threads: Threads = None,
    prepack: Prepack = None,
    chat: Chat = None,
    as_json: Json = False,
) -> None:
    """Decodes prompts plainly, with transformers' prompt lookup, and recycled: the same text or not, and which is how
    fast; on a CPU the first ones in bfloat16 too, unless --dtype is given. Exit status 1 if any text differs.
    """
    given = read_prompts(texts or [], prompts or [])[:limit]
    made, loaded = running.drafter_and_model(drafter, model, dtype, device, threads, prepack, device_map=device_map)
    encoded = running.encoded(loaded, given, chat)

    from ..._util.text_stream import decoded, pieces
    from ...drafters._registry import make_drafter
    from .. import side_by_side

    # First calls cost extra on all sides; what is learned here goes with the drafter that learned it.
    throw_away = make_drafter(drafter)
    with console.working("warming up"):
        short = loading.arguments(loaded, encoded[0], 16)
        no_lookup = side_by_side.why_no_lookup(loaded.model, short)
        warm = side_by_side.compare(loaded.model, short, throw_away, lookup=False)
    if no_lookup is not None:
        console.note(f"transformers' prompt lookup fails with this model: {no_lookup}")
    out = Console()
    if not as_json:
        side_by_side.legend(out, warm.stats.drafter)
    found, rows, ways = [], [], len(side_by_side.WAYS)
    for place, (prompt, ids) in enumerate(zip(given, encoded, strict=True)):
        arguments, title = loading.arguments(loaded, ids, max_new_tokens), f"{place + 1} of {len(given)}"
        with console.working(f"prompt {title}, in each way", ways * len(given), ways * place) as advance:
            one = side_by_side.compare(
                loaded.model, arguments, made, place, *prompt, no_lookup is None, lambda: advance(1)
            )
        found.append(one)
        rows.append({**one.as_dict(), "text": decoded(loaded.tokenizer, one.tokens)})
        if not as_json:
            side_by_side.print_comparison(out, title, one, pieces(loaded.tokenizer, one.steps))
    summary = {"model": running.described(loaded, model), **side_by_side.summary(found)}
    if dtype is None and side_by_side.may_try_bfloat16(loaded.model):
        with console.working("trying bfloat16"):
            other = loading.load(model, "bfloat16", device, threads, prepack, device_map=device_map)
            some = [loading.arguments(other, ids, max_new_tokens) for ids in encoded[: side_by_side.TRIED]]
            summary["bfloat16"] = side_by_side.in_bfloat16(other.model, short, some, make_drafter(drafter), found)
    if as_json:
        console.print_json({"prompts": rows, "summary": summary})
    else:
        side_by_side.print_summary(out, rows, summary)
    if not summary["identical"]:
        raise typer.Exit(1)
