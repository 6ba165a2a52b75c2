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
from ..options import Device, DType, Json, Model, ModelOptions, Threads

if TYPE_CHECKING:
    from ...training.continuations import Continuations

train = console.group("Trains what some drafters need beside a model.")

_WORK, _TEXTS, _CHECKPOINT = "training", "texts.safetensors", "checkpoint.pt"
"""Subfolder of a trained part, and files from which an interrupted run resumes."""

Files = Annotated[
    list[Path], typer.Argument(metavar="FILES...", help="Text files, or folders of them; - is standard input.")
]
Output = Annotated[Path, typer.Option(help="Folder to write to; an interrupted run goes on from what is there.")]
Texts = Annotated[int, typer.Option(min=2, help="Most outputs to generate.")]
PromptTokens = Annotated[int, typer.Option(min=1, help="Prompt tokens of each output, from FILES.")]
TextTokens = Annotated[int, typer.Option(min=2, help="Most new tokens of an output.")]
TextTemperature = Annotated[float, typer.Option(min=0, help="Sampling temperature of the outputs; 0 is greedy.")]
Steps = Annotated[int, typer.Option(min=1, help="Batches to train on.")]
Batch = Annotated[int, typer.Option(min=1, help="Outputs per batch.")]
Rate = Annotated[float, typer.Option(help="Highest learning rate.")]
Seed = Annotated[int, typer.Option(min=0, help="Random seed.")]
HeldOut = Annotated[float, typer.Option(help="Share of the texts that the part is measured on.")]

Prepared = tuple[Training, Callable[[TrainingRun], Trained]]
"""The options of a training, and the function that does the work."""


@dataclass(frozen=True)
class _Inputs:
    """What the three trainings share."""

    model: ModelOptions
    files: Sequence[Path]
    output: Path
    texts: TextOptions
    schedule: Schedule
    held_out: float
    as_json: bool
    draft: str | None = None
    """The draft model, if the part belongs to one."""


@train.command()
def eagle(
    model: Model,
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
    texts: Texts = 3000,
    prompt_tokens: PromptTokens = 64,
    text_tokens: TextTokens = 128,
    temperature: TextTemperature = 0.0,
    steps: Steps = 1000,
    batch: Batch = 4,
    rate: Rate = 1e-3,
    held_out: HeldOut = 0.0625,
    seed: Seed = 0,
    dtype: DType = None,
    device: Device = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Trains an EAGLE head on the target's continuations of pieces of FILES; use it as --drafter eagle:head=FOLDER."""

    def prepared() -> Prepared:
        from ...training.eagle import EagleTraining, train

        training = EagleTraining(version, vocabulary, intermediate, unrolled, batch=batch, seed=seed)
        return training, partial(train, training)

    options = ModelOptions(model, dtype, device, threads=threads)
    written = TextOptions(texts, prompt_tokens, text_tokens, temperature, seed)
    _run(prepared, _Inputs(options, files, output, written, Schedule(steps, rate), held_out, as_json))


@train.command()
def medusa(
    model: Model,
    files: Files,
    output: Output,
    heads: Annotated[int, typer.Option(min=1, help="Heads, each of which predicts one more token ahead.")] = 4,
    blocks: Annotated[int, typer.Option(min=1, help="Residual blocks of a head.")] = 1,
    own_output: Annotated[
        bool, typer.Option("--own-output", help="An output layer for each head, as in the paper: large.")
    ] = False,
    texts: Texts = 3000,
    prompt_tokens: PromptTokens = 64,
    text_tokens: TextTokens = 128,
    temperature: TextTemperature = 0.0,
    steps: Steps = 1000,
    batch: Batch = 2,
    rate: Rate = 3e-3,
    held_out: HeldOut = 0.0625,
    seed: Seed = 0,
    dtype: DType = None,
    device: Device = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Trains heads on the target's continuations of pieces of FILES; use them as --drafter medusa:heads=FOLDER."""

    def prepared() -> Prepared:
        from ...training.medusa import MedusaTraining, train

        training = MedusaTraining(heads, blocks, own_output, batch=batch, seed=seed)
        return training, partial(train, training)

    options = ModelOptions(model, dtype, device, threads=threads)
    written = TextOptions(texts, prompt_tokens, text_tokens, temperature, seed)
    _run(prepared, _Inputs(options, files, output, written, Schedule(steps, rate), held_out, as_json))


@train.command()
def specdec_pp(
    model: Model,
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
    texts: Texts = 3000,
    prompt_tokens: PromptTokens = 64,
    text_tokens: TextTokens = 128,
    temperature: TextTemperature = 1.0,
    steps: Steps = 500,
    batch: Batch = 16,
    rate: Rate = 3e-3,
    held_out: HeldOut = 0.0625,
    seed: Seed = 0,
    dtype: DType = None,
    device: Device = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Trains a head that predicts rejections on the target's continuations of pieces of FILES; use the draft model with
    it as --drafter specdec_pp:model=FOLDER.
    """

    def prepared() -> Prepared:
        from ...training.specdec_pp import SpecDecTraining, train

        training = SpecDecTraining(depth, rejection_weight, target_share, draft_temperature, batch, seed)
        return training, partial(train, training)

    options = ModelOptions(model, dtype, device, threads=threads)
    written = TextOptions(texts, prompt_tokens, text_tokens, temperature, seed)
    folder = output or _beside(draft)
    _run(prepared, _Inputs(options, files, folder, written, Schedule(steps, rate), held_out, as_json, draft))


def _run(prepared: Callable[[], Prepared], inputs: _Inputs) -> None:
    """Run a training from the user's files to the saved part; quick checks come first."""
    if not 0 < inputs.held_out < 1:
        raise ValueError(f"--held-out must be > 0 and < 1, got {inputs.held_out}")
    files = text_files(inputs.files)
    models = [inputs.model.name] if inputs.draft is None else [inputs.model.name, inputs.draft]
    for name in models:
        loading.check_source(name)
    with running.loading_shown(*models):
        from ...drafters._shared.pairing import paired
        from ...model.target import Target

        training, method = prepared()
        loaded = inputs.model.load()
        target = Target(loaded.model)
        drafting = None if inputs.draft is None else paired(inputs.draft, target)
    work = inputs.output / _WORK
    learned_from, measured_on = _texts(loaded, files, work / _TEXTS, inputs.texts).split(inputs.held_out)
    facts = {
        "trained_texts": len(learned_from),
        "held_out_texts": len(measured_on),
        "trained_tokens": sum(map(len, learned_from.texts)) - sum(learned_from.prompt_lengths),
        **asdict(inputs.texts),
        **asdict(training),
        **asdict(inputs.schedule),
        **({} if inputs.draft is None else {"target": inputs.model.name}),
    }
    run = TrainingRun(
        target,
        drafting,
        learned_from,
        measured_on,
        inputs.schedule,
        work / _CHECKPOINT,
        inputs.output,
        facts,
        console.reaching,
    )
    trained = method(run)
    if trained.calibration:
        _plot(inputs.output, trained)
    if inputs.as_json:
        console.print_json({"folder": str(inputs.output), **trained.measured, "training": facts})
    else:
        _show(inputs.output, trained)


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
