"""`token-recycling compare`: the same prompts plain and recycled, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..._util.prompts import read_prompts
from ...model import loading
from .. import console, running
from ..options import Chat, Device, DeviceMap, Drafting, DType, FastOption, Json, MaxNewTokens, Model, Prepack, Threads


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
    fast: FastOption = "auto",
    chat: Chat = None,
    as_json: Json = False,
) -> None:
    """Decodes prompts plainly, with transformers' prompt lookup, and recycled: the same text or not, and which is how
    fast; on a CPU the first ones in bfloat16 too, unless --dtype is given. Exit status 1 if any text differs.
    """
    given = read_prompts(texts or [], prompts or [])[:limit]
    _, loaded = running.drafter_and_model(drafter, model, dtype, device, threads, prepack, device_map=device_map)
    running.encoded(loaded, given, chat)  # what the model cannot continue is refused before anything is decoded

    from ..._util.text_stream import decoded, pieces
    from ...cuda_graphs import FAST
    from .. import side_by_side

    through_template = loading.uses_chat(loaded, chat)
    with console.working("warming up"):
        comparing = side_by_side.Comparing(loaded, drafter, given, max_new_tokens, through_template, fast=FAST[fast])
    if comparing.no_lookup is not None:
        console.note(f"transformers' prompt lookup fails with this model: {comparing.no_lookup}")
    out, found, rows = Console(), [], []
    with console.working("decoding each prompt in each way", len(given)) as advance:
        for place, one in enumerate(comparing, start=1):
            advance(1)
            found.append(one)
            rows.append({**one.as_dict(), "text": decoded(loaded.tokenizer, one.tokens)})
            if not as_json:
                if place == 1:
                    side_by_side.legend(out, one.stats.drafter)
                side_by_side.print_comparison(out, f"{place} of {len(given)}", one, pieces(loaded.tokenizer, one.steps))
    summary = {"model": running.described(loaded, model), **side_by_side.summary(found)}
    if dtype is None and side_by_side.may_try_bfloat16(loaded.model):
        with console.working("trying bfloat16"):
            other = loading.load(model, "bfloat16", device, threads, prepack, device_map=device_map)
            some = given[: side_by_side.TRIED]
            recycled = side_by_side.Comparing(other, drafter, some, max_new_tokens, through_template, ["recycled"])
            summary["bfloat16"] = side_by_side.in_bfloat16(recycled, found)
    if as_json:
        console.print_json({"prompts": rows, "summary": summary})
    else:
        side_by_side.print_summary(out, rows, summary)
    if not summary["identical"]:
        raise typer.Exit(1)
