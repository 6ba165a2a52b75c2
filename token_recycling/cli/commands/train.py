"""`token-recycling train NAME`: train the part that a drafter needs.

There is such a command for every drafter whose folder declares a training (`training.declaration`).
"""

from __future__ import annotations

import importlib
import inspect
import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from ... import drafters
from ..._util.extras import lacking
from ..._util.prompts import bytes_of, text_files
from ...drafters._shared.training.declaration import Schedule, TextOptions, Trained, Training, TrainingRun, option
from ...model import loading
from .. import console, running
from ..options import Device, DType, Json, Model, Threads

if TYPE_CHECKING:
    from ...drafters._shared.training.continuations import Continuations

_Options = TypeVar("_Options", TextOptions, Schedule, Training)

train = console.group("Trains what some drafters need beside a model.")

_WORK, _TEXTS, _CHECKPOINT = "training", "texts.safetensors", "checkpoint.pt"
"""Subfolder of a trained part, and files from which an interrupted run resumes."""

_Files = Annotated[
    list[Path], typer.Argument(metavar="FILES...", help="Text files, or folders of them; - is standard input.")
]
_Draft = Annotated[str, typer.Option(metavar="MODEL", help="The draft model: a folder, or its name on the hub.")]
_OUTPUT = "Folder to write to{}; an interrupted run goes on from what is there."
_HELD_OUT = 0.0625
_SHARED = ("texts", "prompt_tokens", "text_tokens", "temperature", "steps", "batch", "rate", "held_out", "seed")
"""Options of every training, in the order of its help, after the method's own."""


def _parameters(name: str, training: type[Training]) -> list[inspect.Parameter]:
    """Return the parameters of a training's command."""
    required = inspect.Parameter.empty
    found: dict[str, tuple[Any, Any]] = {"model": (Model, required), "files": (_Files, required)}
    if training.needs_draft:
        output = typer.Option(help=_OUTPUT.format(f", by default {name} in that of the draft model"))
        found |= {"draft": (_Draft, required), "output": (Annotated[Path | None, output], None)}
    else:
        found["output"] = Annotated[Path, typer.Option(help=_OUTPUT.format(""))], required
    known = {one.name: one for kind in (training, TextOptions, Schedule) for one in fields(kind) if one.metadata}
    known["held_out"] = option(_HELD_OUT, f"Share of the texts that {training.held_out_use}.")
    for each in sorted(known, key=lambda each: _SHARED.index(each) if each in _SHARED else -1):
        default = training.defaults.get(each, known[each].default)
        written = typer.Option(f"--{each.replace('_', '-')}", **known[each].metadata)  # no --no-... beside it
        found[each] = Annotated[type(default), written], default
    found |= {"dtype": (DType, None), "device": (Device, None), "threads": (Threads, None), "as_json": (Json, False)}
    kind = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(each, kind, default=value, annotation=hint) for each, (hint, value) in found.items()]


def command_for(name: str, path: Path) -> Callable[..., None]:
    """Return the command that trains the part of the drafter `name`, declared in the file `path`."""
    # Read without importing the drafter's package, which would import torch; help should not wait for it.
    declared = runpy.run_path(str(path), run_name=f"{drafters.__name__}.{name}.{path.stem}").values()
    (training,) = (kind for kind in declared if isinstance(kind, type) and Training in kind.__mro__[1:])

    def command(**given: Any) -> None:
        _run(name, training.__name__, **given)

    command.__doc__ = training.__doc__
    command.__signature__ = inspect.Signature(_parameters(name, training))  # type: ignore[attr-defined]
    return command


def _run(
    name: str,
    declared: str,
    *,
    model: str,
    files: Sequence[Path],
    draft: str | None = None,
    output: Path | None,
    held_out: float,
    dtype: Any,
    device: str | None,
    threads: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Run a training from the user's files to the saved part; quick checks come first."""
    if not 0 < held_out < 1:
        raise ValueError(f"--held-out must be > 0 and < 1, got {held_out}")
    found = text_files(files)
    models = [model] if draft is None else [model, draft]
    for each in models:
        loading.check_source(each)
    folder = output or _beside(draft, name)
    with running.loading_shown(*models):
        from ...drafters._shared.pairing import paired
        from ...model.tree_model import TreeModel

        package = f"{drafters.__name__}.{name}"
        method = importlib.import_module(f"{package}.train")
        training = _made(getattr(importlib.import_module(f"{package}.train_options"), declared), options)
        texting, schedule = _made(TextOptions, options), _made(Schedule, options)
        loaded = loading.load(model, dtype, device, threads)
        target = TreeModel(loaded.model)
        drafting = None if draft is None else paired(draft, target)
    work = folder / _WORK
    learned_from, measured_on = _texts(loaded, found, work / _TEXTS, texting).split(held_out)
    facts = {
        "trained_texts": len(learned_from),
        "held_out_texts": len(measured_on),
        "trained_tokens": sum(map(len, learned_from.texts)) - sum(learned_from.prompt_lengths),
        **asdict(texting),
        **asdict(training),
        **asdict(schedule),
        **({} if draft is None else {"target": model}),
    }
    run = TrainingRun(
        target, drafting, learned_from, measured_on, schedule, work / _CHECKPOINT, folder, facts, console.reaching
    )
    trained = method.train(training, run)
    if trained.calibration:
        _plot(folder, trained)
    if as_json:
        console.print_json({"folder": str(folder), **trained.measured, "training": facts})
    else:
        _show(folder, trained)


def _made(kind: type[_Options], given: Mapping[str, Any]) -> _Options:
    """Return a dataclass of options from the command's."""
    return kind(**{field.name: given[field.name] for field in fields(kind) if field.metadata})


def _beside(draft: str | None, name: str) -> Path:
    """Return the folder of a part within that of its draft model."""
    folder = Path(draft or "").expanduser()
    if not folder.is_dir():
        raise ValueError(f"--output is needed, a folder for the head: {draft} is no folder")
    return folder / name


def _texts(loaded: loading.Loaded, files: Sequence[Path], path: Path, how: TextOptions) -> Continuations:
    """Return the target's continuations of pieces of `files`, kept in the file `path`; raises ValueError."""
    from ...drafters._shared.training.continuations import continuations, pieces
    from ...drafters._shared.training.corpus import documents
    from ...hf.accelerate import generate

    with console.working("reading", bytes_of(files)) as advance:
        prompts = pieces(documents(files, loaded.tokenizer, advance), how.prompt_tokens, how.texts, how.seed)
    with console.reaching("writing texts") as progress:
        return continuations(
            generate,
            loaded.model,
            prompts,
            path,
            max_new_tokens=how.text_tokens,
            temperature=how.temperature,
            seed=how.seed,
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


for _path in sorted(Path(*drafters.__path__).glob("*/train_options.py")):
    train.command(_path.parent.name.replace("_", "-"))(command_for(_path.parent.name, _path))
