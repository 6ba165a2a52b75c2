"""`token-recycling train NAME`: train the part that a drafter needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..._util.extras import lacking
from ..._util.prompts import bytes_of, text_files
from ...model import loading
from ...training.declaration import Schedule, TextOptions, Trained, Training, TrainingRun
from .. import console, running
from ..options import DeviceOptions, Json, flattened

if TYPE_CHECKING:
    from ...training.continuations import Continuations

train = console.group("Trains what some drafters need beside a model.")

_WORK, _TEXTS, _CHECKPOINT = "training", "texts.safetensors", "checkpoint.pt"
"""Subfolder of a trained part, and files from which an interrupted run resumes."""

Files = Annotated[
    list[Path], typer.Argument(metavar="FILES...", help="Text files, or folders of them; - is standard input.")
]
Output = Annotated[Path, typer.Option(help="Folder to write to; an interrupted run goes on from what is there.")]

Prepared = tuple[Training, Callable[[TrainingRun], Trained]]
"""The options of a training, and the function that does the work."""


@dataclass(frozen=True)
class TrainingOptions:
    """The options of all trainings: the texts, the steps, and what is measured on."""

    texts: Annotated[int, typer.Option(min=2, help="Most outputs to generate.")] = 3000
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens of each output, from FILES.")] = 64
    text_tokens: Annotated[int, typer.Option(min=2, help="Most new tokens of an output.")] = 128
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature of the outputs; 0 is greedy.")] = 0.0
    steps: Annotated[int, typer.Option(min=1, help="Batches to train on.")] = 1000
    batch: Annotated[int, typer.Option(min=1, help="Outputs per batch.")] = 4
    rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 3e-3
    held_out: Annotated[float, typer.Option(help="Share of the texts that the part is measured on.")] = 0.0625
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0
    as_json: Json = False

    @property
    def outputs(self) -> TextOptions:
        """How the target's outputs are generated."""
        return TextOptions(self.texts, self.prompt_tokens, self.text_tokens, self.temperature, self.seed)

    @property
    def schedule(self) -> Schedule:
        """The steps of the training."""
        return Schedule(self.steps, self.rate)


@train.command()
@flattened
def eagle(
    model: DeviceOptions,
    files: Files,
    output: Output,
    version: Annotated[
        int, typer.Option(min=1, help="1: predicts hidden states (EAGLE-1 and -2); 3: predicts tokens (EAGLE-3).")
    ] = 3,
    vocabulary: Annotated[
        int, typer.Option(min=1, help="Tokens that a head of version 3 can predict: the most frequent ones.")
    ] = 32000,
    intermediate: Annotated[int, typer.Option(min=0, help="Width within the layer's network; 0: as the target's.")] = 0,
    unrolled: Annotated[
        int, typer.Option(min=0, help="Passes over its own outputs, each a token deeper; 0: as published, 1 or 7.")
    ] = 0,
    training: TrainingOptions = TrainingOptions(rate=1e-3),
) -> None:
    """Trains an EAGLE head on the target's continuations of pieces of FILES; use it as --drafter eagle:head=FOLDER."""

    def prepared() -> Prepared:
        from ...training.eagle import EagleTraining, train

        head = EagleTraining(
            version=version,
            vocabulary=vocabulary,
            intermediate=intermediate,
            unrolled=unrolled,
            batch=training.batch,
            seed=training.seed,
        )
        return head, partial(train, head)

    _run(prepared, model, files, output, training)


@train.command()
@flattened
def medusa(
    model: DeviceOptions,
    files: Files,
    output: Output,
    heads: Annotated[int, typer.Option(min=1, help="Heads, each of which predicts one more token ahead.")] = 4,
    blocks: Annotated[int, typer.Option(min=1, help="Residual blocks of a head.")] = 1,
    own_output: Annotated[
        bool, typer.Option("--own-output", help="An output layer for each head, as in the paper: large.")
    ] = False,
    training: TrainingOptions = TrainingOptions(batch=2),
) -> None:
    """Trains heads on the target's continuations of pieces of FILES; use them as --drafter medusa:heads=FOLDER."""

    def prepared() -> Prepared:
        from ...training.medusa import MedusaTraining, train

        medusa = MedusaTraining(
            heads=heads, blocks=blocks, own_output=own_output, batch=training.batch, seed=training.seed
        )
        return medusa, partial(train, medusa)

    _run(prepared, model, files, output, training)


@train.command()
@flattened
def specdec_pp(
    model: DeviceOptions,
    files: Files,
    draft: Annotated[str, typer.Option(metavar="MODEL", help="The draft model: a folder, or its name on the hub.")],
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write to, by default specdec_pp in that of the draft model; an interrupted run goes on "
            "from what is there."
        ),
    ] = None,
    depth: Annotated[int, typer.Option(min=0, help="Residual blocks.")] = 3,
    rejection_weight: Annotated[float, typer.Option(help="Weight of a rejection relative to an acceptance.")] = 6.0,
    target_share: Annotated[
        float, typer.Option(help="Share of the target's own tokens in what the head reads.")
    ] = 0.15,
    draft_temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature of the draft model; 0: for greedy decoding.")
    ] = 1.0,
    training: TrainingOptions = TrainingOptions(temperature=1.0, steps=500, batch=16),
) -> None:
    """Trains a head that predicts rejections on the target's continuations of pieces of FILES; use the draft model with
    it as --drafter specdec_pp:model=FOLDER.
    """

    def prepared() -> Prepared:
        from ...training.specdec_pp import SpecDecTraining, train

        head = SpecDecTraining(
            depth=depth,
            rejection_weight=rejection_weight,
            target_share=target_share,
            draft_temperature=draft_temperature,
            batch=training.batch,
            seed=training.seed,
        )
        return head, partial(train, head)

    _run(prepared, model, files, output or _beside(draft), training, draft)


def _run(
    prepared: Callable[[], Prepared],
    model: DeviceOptions,
    files: Sequence[Path],
    output: Path,
    options: TrainingOptions,
    draft: str | None = None,
) -> None:
    """Run a training from the user's files to the saved part, which may belong to a draft model; quick checks come
    first.
    """
    if not 0 < options.held_out < 1:
        raise ValueError(f"--held-out must be > 0 and < 1, got {options.held_out}")
    schedule, found = options.schedule, text_files(files)
    models = [model.model] if draft is None else [model.model, draft]
    for name in models:
        loading.check_source(name)
    with running.loading_shown(*models):
        from ...drafters._shared.pairing import paired
        from ...model.target import Target

        training, method = prepared()
        loaded = model.load()
        target = Target(loaded.model)
        drafting = None if draft is None else paired(draft, target)
    work = output / _WORK
    learned_from, measured_on = _texts(loaded, found, work / _TEXTS, options.outputs).split(options.held_out)
    facts = {
        "trained_texts": len(learned_from),
        "held_out_texts": len(measured_on),
        "trained_tokens": sum(map(len, learned_from.texts)) - sum(learned_from.prompt_lengths),
        **asdict(options.outputs),
        **asdict(training),
        **asdict(schedule),
        **({} if draft is None else {"target": model.model}),
    }
    run = TrainingRun(
        target,
        drafting,
        learned_from,
        measured_on,
        schedule,
        work / _CHECKPOINT,
        output,
        facts,
        console.reaching,
    )
    trained = method(run)
    if trained.calibration:
        _plot(output, trained)
    if options.as_json:
        console.print_json({"folder": str(output), **trained.measured, "training": facts})
    else:
        _show(output, trained)


def _beside(draft: str) -> Path:
    """Return the folder of a head within that of its draft model."""
    folder = Path(draft).expanduser()
    if not folder.is_dir():
        raise ValueError(f"--output is needed, a folder for the head: {draft} is no folder")
    return folder / "specdec_pp"


def _texts(loaded: loading.Loaded, files: Sequence[Path], path: Path, options: TextOptions) -> Continuations:
    """Return the target's continuations of pieces of `files`, kept in the file `path`; raises ValueError."""
    from ...hf.accelerate import generate
    from ...training.continuations import continuations, pieces
    from ...training.corpus import documents

    with console.working("reading", bytes_of(files)) as advance:
        texts = documents(files, loaded.tokenizer, advance)
        prompts = pieces(texts, options.prompt_tokens, options.texts, options.seed)
    with console.reaching("writing texts") as progress:
        return continuations(
            generate,
            loaded.model,
            prompts,
            path,
            max_new_tokens=options.text_tokens,
            temperature=options.temperature,
            seed=options.seed,
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
    out.print(f"{folder}: {trained.title}")
    out.print(table)
