"""`token-recycling compare`: decode the same prompts with `generate`, with prompt lookup and accelerated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..._util.options import SWITCH
from ..._util.prompts import read_prompts
from ...model import loading
from .. import console, running
from ..options import Chat, DecodingOptions, Json, ModelOptions


def compare(
    model: ModelOptions,
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPTS]...", help="Texts to continue; - is standard input.")
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="File with a prompt, or folder of such files; - is standard input; may be repeated."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take the first N prompts only.")] = None,
    decoding: DecodingOptions = DecodingOptions(max_new_tokens=128),
    chat: Chat = None,
    as_json: Json = False,
) -> None:
    """Decode prompts with generate, with transformers' prompt lookup, and accelerated. Reports whether outputs are
    identical, and the speed of each method; on a CPU also the speed of the first prompts in bfloat16, unless --dtype is
    given. Exit status 1 if any output differs.
    """
    questions = read_prompts(texts or [], prompts or [])[:limit]
    drafter, max_new_tokens = decoding.drafter, decoding.max_new_tokens
    _, loaded = running.drafter_and_model(drafter, model)
    running.encoded(loaded, questions, chat)  # refuses prompts that the model cannot continue, before decoding starts

    from ..._util.text_stream import decoded, pieces
    from .. import comparison

    through_template = loading.uses_chat(loaded, chat)
    with console.working("warming up"):
        measured = comparison.Comparison(
            loaded, drafter, questions, max_new_tokens, through_template, fast=SWITCH[decoding.fast]
        )
    if measured.no_lookup is not None:
        console.note(f"transformers' prompt lookup fails with this model: {measured.no_lookup}")
    out, compared, rows = Console(), [], []
    with console.working("decoding each prompt by each method", len(questions)) as advance:
        for number, result in enumerate(measured, start=1):
            advance(1)
            compared.append(result)
            rows.append({**result.as_dict(), "text": decoded(loaded.tokenizer, result.tokens)})
            if not as_json:
                if number == 1:
                    comparison.print_legend(out, result.stats.drafter)
                comparison.print_prompt(
                    out, f"{number} of {len(questions)}", result, pieces(loaded.tokenizer, result.steps)
                )
    summary = {
        "model": running.described(loaded, model.model),
        "warm_up_seconds": measured.warm_up_seconds,
        **comparison.summary(compared),
    }
    if model.dtype is None and comparison.may_try_bfloat16(loaded.model):
        with console.working("trying bfloat16"):
            other = replace(model, dtype="bfloat16").load()
            first_questions = questions[: comparison.BFLOAT16_PROMPTS]
            ours = [comparison.ACCELERATED]
            bfloat16 = comparison.Comparison(other, drafter, first_questions, max_new_tokens, through_template, ours)
            summary["bfloat16"] = comparison.bfloat16_speedup(bfloat16, compared)
    if as_json:
        console.print_json({"prompts": rows, "summary": summary})
    else:
        comparison.print_summary(out, rows, summary)
    if not summary["identical"]:
        raise typer.Exit(1)
