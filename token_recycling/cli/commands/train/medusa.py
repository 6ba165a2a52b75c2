"""`token-recycling train medusa`: heads for the drafter medusa."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ....model import loading
from ... import console, training
from ...options import Device, DTypeOption, Json, Model, Threads


def medusa(
    model: Model,
    files: training.Files,
    output: training.Output,
    heads: Annotated[int, typer.Option(min=1, help="How many tokens after the next one are foreseen.")] = 4,
    blocks: Annotated[int, typer.Option(min=1, help="Residual blocks of a head.")] = 1,
    own_output: Annotated[
        bool, typer.Option("--own-output", help="A whole output layer for each head, as in the paper: large.")
    ] = False,
    texts: training.Texts = 3000,
    prompt_tokens: training.PromptTokens = 64,
    text_tokens: training.TextTokens = 128,
    temperature: training.Temperature = 0.0,
    steps: training.Steps = 1000,
    batch: training.Batch = 2,
    rate: training.Rate = 3e-3,
    held_out: Annotated[float, typer.Option(help="Share of the texts that the accuracy is measured on.")] = 0.0625,
    seed: training.Seed = 0,
    dtype: DTypeOption = None,
    device: Device = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Trains heads on what the target says after pieces of FILES; use them as --drafter medusa:heads=FOLDER."""
    found = training.checked(files, held_out, model)
    with console.working(f"loading {model}"):
        from ....drafters.medusa.heads import save_heads
        from ....drafters.medusa.train import MedusaTraining, accuracy, train_medusa
        from ....training.loop import Plan

        plan, how = Plan(steps, rate), MedusaTraining(heads, blocks, own_output, batch=batch, seed=seed)
        loaded = loading.load(model, dtype and dtype.value, device, threads)
    work = output / training.WORK
    texting = training.Texting(texts, prompt_tokens, text_tokens, temperature, seed)
    learned_from, measured_on = training.texts_of(loaded, found, work, texting).split(held_out)
    with console.reaching("training") as progress:
        made = train_medusa(
            loaded.model,
            learned_from,
            how,
            plan,
            work / training.CHECKPOINT,
            lambda step, loss: progress(step, steps, loss),
        )
    made.bfloat16().float()
    with console.working("measuring"):
        measured = accuracy(loaded.model, made, measured_on)
    facts = training.facts(learned_from, measured_on, texting, how, plan)
    save_heads(output, made.bfloat16(), loaded.model, measured, training=facts)
    if as_json:
        console.print_json({"folder": str(output), "accuracy": measured, "training": facts})
    else:
        _show(output, measured, facts)


def _show(output: Any, measured: list[list[float]], facts: dict[str, Any]) -> None:
    out, table = Console(), Table("head", "token after the next", "top 1", "top 5", "top 10")
    for number, ranks in enumerate(measured, start=1):
        shares = [console.percent(sum(ranks[:most])) for most in (1, 5, 10)]
        table.add_row(str(number), f"+{number}", *shares)
    out.print(
        f"{output}: heads trained on {facts['trained_texts']:,} texts; right in {facts['held_out_texts']:,} held out:"
    )
    out.print(table)
