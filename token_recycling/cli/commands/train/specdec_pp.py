"""`token-recycling train specdec-pp`: an acceptance head for the drafter specdec_pp."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ....model import loading
from ... import console, training
from ...options import Device, DTypeOption, Json, Model, Threads


def specdec_pp(
    model: Model,
    files: training.Files,
    draft: Annotated[str, typer.Option(metavar="MODEL", help="The draft model: a folder, or its name on the hub.")],
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write to, by default specdec_pp in that of the draft model; an interrupted run goes on "
            "from what is there."
        ),
    ] = None,
    depth: Annotated[int, typer.Option(min=0, help="Residual blocks.")] = 3,
    rejection_weight: Annotated[float, typer.Option(help="How much a rejection counts against an acceptance.")] = 6.0,
    target_share: Annotated[
        float, typer.Option(help="Share of the target's own tokens in what the head reads.")
    ] = 0.15,
    draft_temperature: Annotated[
        float, typer.Option(min=0, help="At which the draft model draws and is judged; 0: for greedy decoding.")
    ] = 1.0,
    texts: training.Texts = 3000,
    prompt_tokens: training.PromptTokens = 64,
    text_tokens: training.TextTokens = 128,
    temperature: training.Temperature = 1.0,
    steps: training.Steps = 500,
    batch: training.Batch = 16,
    rate: training.Rate = 3e-3,
    held_out: Annotated[float, typer.Option(help="Share of the texts that the head is judged by.")] = 0.0625,
    seed: training.Seed = 0,
    dtype: DTypeOption = None,
    device: Device = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Trains a head that foresees rejections on what the target says after pieces of FILES; use the draft model with
    it as --drafter specdec_pp:model=FOLDER.
    """
    found = training.checked(files, held_out, model, draft)
    folder = output or _beside(draft)
    with console.working(f"loading {model} and {draft}"):
        from ....drafters.draft_model.pairing import paired
        from ....drafters.specdec_pp.head import save_head
        from ....drafters.specdec_pp.train import SpecDecTraining, judged, labelled, train_head
        from ....model.tree_model import TreeModel
        from ....training.loop import Plan

        plan = Plan(steps, rate)
        how = SpecDecTraining(depth, rejection_weight, target_share, draft_temperature, batch, seed)
        loaded = loading.load(model, dtype and dtype.value, device, threads)
        target = TreeModel(loaded.model)
        drafting = paired(draft, target)
    work = folder / training.WORK
    texting = training.Texting(texts, prompt_tokens, text_tokens, temperature, seed)
    learned_from, judged_by = training.texts_of(loaded, found, work, texting).split(held_out)
    with console.reaching("labelling") as progress:
        known = labelled(target, drafting, learned_from, how, lambda done: progress(done, len(learned_from)))
    with console.reaching("training") as progress:
        head = train_head(
            drafting, known, how, plan, work / training.CHECKPOINT, lambda step, loss: progress(step, steps, loss)
        )
    with console.working("judging"):
        figures = {
            "trained_on": judged(head, drafting, known[: len(judged_by)], how),
            "held_out": judged(head, drafting, labelled(target, drafting, judged_by, how), how),
        }
    facts = {**training.facts(learned_from, judged_by, texting, how, plan), "target": model}
    save_head(folder, head, drafting.model, {"judged": figures, "training": facts})
    _plot(folder, figures["held_out"]["calibration"], rejection_weight)
    if as_json:
        console.print_json({"folder": str(folder), "judged": figures, "training": facts})
    else:
        _show(folder, figures, facts)


def _beside(draft: str) -> Path:
    from ....drafters.specdec_pp.head import KIND

    folder = Path(draft).expanduser()
    if not folder.is_dir():
        raise ValueError(f"expected --output with a folder for the head, since {draft} is on the hub, got none")
    return folder / KIND


def _plot(folder: Path, bins: Any, rejection_weight: float) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        console.note("the plot of the calibration needs matplotlib: pip install matplotlib")
        return
    from ....bench.report.plots.calibration import calibration

    console.note(f"written: {calibration(bins, rejection_weight).save(folder)}")


def _show(folder: Path, figures: dict[str, Any], facts: dict[str, Any]) -> None:
    out, table = Console(), Table("texts", "drafted tokens", "accepted", "KL", "KL of a constant")
    for name, said in (("trained on, some of them", "trained_on"), ("held out", "held_out")):
        found = figures[said]
        numbers = (f"{found['kl']:.4f}", f"{found['kl_of_a_constant']:.4f}")
        table.add_row(name, f"{found['tokens']:,}", console.percent(found["acceptance"]), *numbers)
    out.print(f"{folder}: a head trained on {facts['trained_texts']:,} texts; binary KL in nats a token:")
    out.print(table)
