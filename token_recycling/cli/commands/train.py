"""`token-recycling train NAME`: train the heads that a drafter needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..._util.extras import lacking
from ..._util.prompts import bytes_of, text_files
from ...model import loading
from ...training.declaration import (
    EagleTraining,
    MedusaTraining,
    Schedule,
    SpecDecTraining,
    TextOptions,
    Trained,
    Training,
    TrainingRun,
)
from .. import console, running
from ..options import DeviceOptions, Json, flattened

if TYPE_CHECKING:
    from ...training.continuations import Continuations

train = console.group("Train heads for medusa, eagle and specdec_pp.")

_WORK, _TEXTS, _CHECKPOINT = "training", "texts.safetensors", "checkpoint.pt"
"""Subfolder in the folder of a trained head, and the files in it from which an interrupted run resumes."""

Files = Annotated[
    list[Path], typer.Argument(metavar="FILES...", help="Text files, or folders of them; - is standard input.")
]
Output = Annotated[Path, typer.Option(help="Folder to write to; an interrupted run in this folder is resumed.")]


@train.command()
@flattened
def eagle(
    model: DeviceOptions,
    files: Files,
    output: Output,
    head: EagleTraining,
    texts: TextOptions,
    schedule: Schedule = Schedule(rate=1e-3),
    as_json: Json = False,
) -> None:
    """Train an EAGLE head on the target's continuations of excerpts from FILES; use it as
    --drafter eagle:head=FOLDER.
    """

    def work(run: TrainingRun) -> Trained:
        from ...training.eagle import train

        return train(head, run)

    _run(work, head, model, files, output, texts, schedule, as_json)


@train.command()
@flattened
def medusa(
    model: DeviceOptions,
    files: Files,
    output: Output,
    heads: MedusaTraining,
    texts: TextOptions,
    schedule: Schedule,
    as_json: Json = False,
) -> None:
    """Train heads on the target's continuations of excerpts from FILES; use them as --drafter medusa:heads=FOLDER."""

    def work(run: TrainingRun) -> Trained:
        from ...training.medusa import train

        return train(heads, run)

    _run(work, heads, model, files, output, texts, schedule, as_json)


@train.command()
@flattened
def specdec_pp(
    model: DeviceOptions,
    files: Files,
    draft: Annotated[str, typer.Option(metavar="MODEL", help="The draft model: a folder or a hub name.")],
    head: SpecDecTraining,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write to; default: specdec_pp in the draft model's folder. An interrupted run in this "
            "folder is resumed."
        ),
    ] = None,
    texts: TextOptions = TextOptions(temperature=1.0),
    schedule: Schedule = Schedule(steps=500),
    as_json: Json = False,
) -> None:
    """Train a head that predicts rejections, on the target's continuations of excerpts from FILES; use it with the
    draft model as --drafter specdec_pp:model=FOLDER.
    """

    def work(run: TrainingRun) -> Trained:
        from ...training.specdec_pp import train

        return train(head, run)

    _run(work, head, model, files, output or _beside(draft), texts, schedule, as_json, draft)


@contextlib.contextmanager
def _resumable() -> Iterator[None]:
    """After Ctrl-C, tell that the run can be resumed."""
    try:
        yield
    except KeyboardInterrupt:
        console.note("stopped; the same command resumes")
        raise typer.Exit(130) from None


@_resumable()
def _run(
    work: Callable[[TrainingRun], Trained],
    training: Training,
    model: DeviceOptions,
    files: Sequence[Path],
    output: Path,
    texts: TextOptions,
    schedule: Schedule,
    as_json: bool,
    draft: str | None = None,
) -> None:
    """Run a training from the user's files to the saved heads, which may belong to a draft model; quick checks come
    first.
    """
    paths = text_files(files)
    models = [model.model] if draft is None else [model.model, draft]
    for name in models:
        loading.check_source(name)
    with running.loading_progress(*models):
        from ...drafters._shared.pairing import paired
        from ...model.target import Target

        loaded = model.load()
        target = Target(loaded.model)
        drafting = None if draft is None else paired(draft, target)
    folder = output / _WORK
    outputs = _outputs(loaded, paths, folder / _TEXTS, texts, training.seed)
    learned_from, measured_on = outputs.split(texts.held_out)
    facts = {
        "trained_texts": len(learned_from),
        "held_out_texts": len(measured_on),
        "trained_tokens": sum(map(len, learned_from.texts)) - sum(learned_from.prompt_lengths),
        **asdict(texts),
        **asdict(training),
        **asdict(schedule),
        **({} if draft is None else {"target": model.model}),
    }
    checkpoint = folder / _CHECKPOINT
    trained = work(
        TrainingRun(target, drafting, learned_from, measured_on, schedule, checkpoint, output, facts, console.reaching)
    )
    if trained.calibration:
        _plot(output, trained)
    if as_json:
        console.print_json({"folder": str(output), **trained.measured, "training": facts})
    else:
        _show(output, trained)


def _beside(draft: str) -> Path:
    """Return the folder of a head within the folder of its draft model."""
    folder = Path(draft).expanduser()
    if not folder.is_dir():
        raise ValueError(f"--output is required, since {draft} is not a folder; give a folder for the head")
    return folder / "specdec_pp"


def _outputs(
    loaded: loading.Loaded, files: Sequence[Path], path: Path, options: TextOptions, seed: int
) -> Continuations:
    """Return the target's continuations of excerpts from `files`, cached in the file `path`; raises ValueError."""
    from ...hf.accelerate import generate
    from ...training.continuations import continuations, pieces
    from ...training.corpus import documents

    with console.working("reading", bytes_of(files)) as advance:
        texts = documents(files, loaded.tokenizer, advance)
        prompts = pieces(texts, options.prompt_tokens, options.texts, seed)
    with console.reaching("generating continuations") as progress:
        return continuations(
            generate,
            loaded.model,
            prompts,
            path,
            max_new_tokens=options.text_tokens,
            temperature=options.temperature,
            seed=seed,
            progress=progress,
        )


def _plot(folder: Path, trained: Trained) -> None:
    if missing := lacking("bench", "matplotlib"):
        console.note(f"the plot of the calibration {missing}")
        return
    from ...bench.plots import calibration

    console.note(f"written: {calibration(trained.calibration, trained.rejection_weight).save(folder)}")


def _show(folder: Path, trained: Trained) -> None:
    out, table = Console(), Table(*trained.headings)
    for row in trained.rows:
        table.add_row(*(cell if isinstance(cell, str) else console.percent(cell) for cell in row))
    console.say(out, f"{folder}: {trained.title}")
    out.print(table)
