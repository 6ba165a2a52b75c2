"""`token-recycling bench`: measure methods on the same prompts, and write a report."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..._util.text_stream import one_line
from ...bench import missing_libraries, require_extra
from ...bench.data import OWN_METHODS, runs_of
from ...model import loading
from .. import console, running
from ..options import Chat, DeviceOptions, Json, Prepack, completed_drafters

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID

    from ...bench.measure import BenchmarkPlan, Event


def completed_methods(typed: str) -> list[str]:
    """Return completions of a method name, transformers' own methods included."""
    return [name for name in OWN_METHODS if name.startswith(typed)] + completed_drafters(typed)


def bench(
    model: DeviceOptions,
    scenario: Annotated[
        Path | None, typer.Option(help="YAML file with the options below, for one or more runs; the command line wins.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|PATH|NAME=PATH", help="spec_bench, mbpp, a .jsonl or text file, or a folder of texts."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take the first N questions of every category.")] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            autocompletion=completed_methods,
            help="Drafter with options, plain, generate, prompt_lookup_hf:n=10, assisted:model=FOLDER or "
            "oracle:model=FOLDER; cold:SPEC is reset after every prompt, forced:SPEC decodes generate's tokens; "
            "repeatable.",
        ),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Measurements per prompt, of which medians are reported; default 3.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of new tokens per turn; default 128.")
    ] = None,
    replay: Annotated[
        bool | None,
        typer.Option("--replay/--no-replay", help="Also replay reference text; default if there is any."),
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Measure batches of this size; repeatable.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Sampling temperature; 0, the default, is greedy.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for results; default results/MODEL. An interrupted run is resumed.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the rows of an earlier run in the folder.")] = False,
    prepack: Prepack = None,
    chat: Chat = None,
    as_json: Json = False,
) -> None:
    """Measure methods on the same prompts, and write a report. An estimate of the run time comes first; Ctrl-C loses no
    results.
    """
    repeated = {"data": data, "methods": method, "batches": batch}
    stated = {
        **{name: tuple(value) if value else None for name, value in repeated.items()},
        **{"limit": limit, "repeats": repeats, "max_new_tokens": max_new_tokens, "replay": replay},
        **{
            "temperature": temperature,
            "dtype": model.dtype,
            "threads": model.threads,
            "prepack": prepack,
            "chat": chat,
        },
    }
    runs = runs_of(scenario, stated)
    loading.check_source(model.model)
    folder = output or Path("results") / Path(loading.title(model.model)).name
    with running.loading_progress(model.model):
        from ...bench.session import Session

        # In reverse order, so that the model of the first run is still loaded when measuring starts.
        sessions = [Session(model.model, runs[name], folder / name, model.device, fresh) for name in reversed(runs)][
            ::-1
        ]
    if missing := missing_libraries():
        console.note(f"writing the report {missing}")
    for text in dict.fromkeys(note for session in sessions for note in session.notes):
        console.note(text)
    items, done = (sum(getattr(session, name) for session in sessions) for name in ("items", "done"))
    if done:
        console.note(f"resumed in {folder}: {done} of {items} prompts are already measured")
    seconds = sum(session.seconds_left for session in sessions)
    console.note(f"this takes about {_duration(seconds)} if every method is as fast as generate")
    try:
        for session in sessions:
            with console.progress_bar("", 1, 0, *_columns()) as (progress, task):
                session.measure(partial(_hook, progress, task, session.options.repeats))
    except KeyboardInterrupt:
        console.note(
            f"stopped with {sum(session.done for session in sessions)} of {items} prompts; the same command resumes"
        )
        raise typer.Exit(130) from None
    _report(folder, [session.folder for session in sessions], as_json)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{max(1, minutes)} min"


def _report(folder: Path, runs: Sequence[Path], as_json: bool) -> None:
    require_extra()
    from ...bench.report import write

    text, written = write(folder)
    if not as_json:
        print(text)
        console.note(f"wrote {written[0]} and {len(written) - 1} plots")
        return
    from ...bench.store import ROWS

    lines = (line for run in runs for line in (run / ROWS).read_text(encoding="utf-8").splitlines())
    measured = [json.loads(line) for line in lines]
    counts = {
        "rows": len(measured),
        "failures": sum(row["failure"] is not None for row in measured),
        "different_outputs": sum(row["identical"] is False for row in measured),
    }
    console.print_json({"folder": str(folder), **counts, "written": [str(path) for path in written]})


def _columns() -> tuple[ProgressColumn, ...]:
    from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

    return BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()


def _hook(progress: Progress, task: TaskID, repeats: int, plan: BenchmarkPlan, done: int) -> Callable[[Event], None]:
    """Return a hook that advances a progress bar with every call and notes failures in the warm-up."""
    total = plan.calls(repeats)
    progress.update(task, total=total, completed=total - plan.calls(repeats, done))

    def on_event(event: Event) -> None:
        if event.outcomes is None:
            phase = "" if event.phase == "measuring" else f" ({event.phase})"
            progress.update(task, description=f"{event.workload.mode}: {event.method.label}{phase}")
        elif event.phase == "measuring":
            progress.advance(task)
        elif event.phase == "warming up" and isinstance(event.outcomes, Exception):
            console.note(f"{event.method.spec} fails: {one_line(event.outcomes)}")

    return on_event
