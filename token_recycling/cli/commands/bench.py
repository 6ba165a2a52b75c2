"""`token-recycling bench`: methods against each other on the same prompts, and the report of it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..._util.extras import lacking
from ..._util.text_stream import one_line
from ...model import loading, sources
from .. import console, running
from ..options import Chat, Device, DType, Json, Model, Prepack, Threads, completed_drafters

if TYPE_CHECKING:
    from ...bench.run.measure import Event
    from ...bench.run.plan import BenchmarkPlan

TRANSFORMERS_METHODS = "assisted", "generate", "oracle", "prompt_lookup_hf"


def completed_methods(typed: str) -> list[str]:
    """What a shell offers for a method: transformers' own too."""
    return [name for name in TRANSFORMERS_METHODS if name.startswith(typed)] + completed_drafters(typed)


def bench(
    model: Model,
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
            "oracle:model=FOLDER; repeatable.",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often each prompt is measured; medians are reported.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate for a turn.")] = 128,
    replay: Annotated[
        bool | None, typer.Option("--replay/--no-replay", help="Also take held-out text as the output; default yes.")
    ] = None,
    study: Annotated[
        list[str] | None,
        typer.Option(
            help="A study instead: breadth, depth, update, order, hot, parts, k, temperature; or specdec-pp, of "
            "--method specdec_pp:model=FOLDER."
        ),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="So many prompts at once instead; may be given repeatedly.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of results; default results/MODEL. A run that stopped goes on there.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the rows of an earlier run in the folder.")] = False,
    dtype: DType = None,
    device: Device = None,
    threads: Threads = None,
    prepack: Prepack = None,
    chat: Chat = None,
    as_json: Json = False,
) -> None:
    """Measures methods against each other on the same prompts, and writes a report; Ctrl-C loses nothing."""
    if not data:
        raise ValueError("expected --data, such as spec_bench, mbpp, a .jsonl file or a folder of texts, got none")
    sources.check_source(model)
    with running.loading_shown(model):
        from ...bench.run import session
        from ...bench.run.data import load
        from ...bench.run.environment import environment
        from ...bench.run.methods import Assisted, Oracle
        from ...bench.run.prompts import BenchmarkConfig

        methods = session.methods(method or [])
        for one in methods:
            if isinstance(one, (Assisted, Oracle)):
                sources.check_source(one.folder)
        questions = load(data, limit)
        plan = session.plan(methods, questions, replay, study or [], batch or [])
        loaded = loading.load(model, dtype, device, threads, prepack)
        through_template = loading.uses_chat(loaded, chat)
        if through_template:  # a file is a prompt then, as `compare` takes it
            questions = load(data, limit, files="prompt")
            plan = session.plan(methods, questions, replay, study or [], batch or [])
        config = BenchmarkConfig(loaded.model, loaded.tokenizer, max_new_tokens, through_template, repeats)
        where = environment(loaded.model, model)
    if through_template and chat is None:
        running.note_template()
    if own := session.without_own_choices(loaded.model):
        console.note(f"left out of the model's own generation configuration: {', '.join(own)}")
    if missing := lacking("bench", "pandas", "tabulate", "scipy", "matplotlib"):
        console.note(f"writing the report's files {missing}")
    for text in (*plan.notes, *session.what_does_not_fit(config, questions)):
        console.note(text)

    from ...bench.run.measure import measure
    from ...bench.run.store import Store

    folder = output or Path("results") / Path(sources.title(model)).name
    store = Store(folder, session.settings(config, questions, plan, where), plan, fresh)
    total = len(list(plan.items()))
    if store.done:
        console.note(f"going on in {folder}: {store.done} of {total} prompts are measured")
    try:
        with _measuring(plan, repeats, store.done) as on_event:
            measure(config, plan, store, where, on_event)
    except KeyboardInterrupt:
        console.note(f"stopped with {store.done} of {total} prompts; the same command goes on there")
        raise typer.Exit(130) from None
    _report(folder, store.path, as_json)


def _report(folder: Path, rows: Path, as_json: bool) -> None:
    from ...bench.report import require_extra

    require_extra()
    from ...bench.report import page

    text, written = page.write(folder)
    if not as_json:
        print(text)
        console.note(f"wrote {written[0]} and {len(written) - 1} plots")
        return
    measured = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    counts = {
        "rows": len(measured),
        "failures": sum(row["failure"] is not None for row in measured),
        "different_outputs": sum(row["identical"] is False for row in measured),
    }
    console.print_json({"folder": str(folder), **counts, "written": [str(path) for path in written]})


@contextmanager
def _measuring(plan: BenchmarkPlan, repeats: int, done: int) -> Iterator[Callable[[Event], None]]:
    """A bar on standard error, if that is a terminal; the function it gives is called with every event. It also notes
    what fails early. `done` items of the plan are measured already.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

    from ...bench.run.measure import calls

    total = calls(plan, repeats)
    tokens: dict[Any, int] = defaultdict(int)
    seconds: dict[Any, float] = defaultdict(float)
    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    measured = total - calls(plan, repeats, done)
    with console.progress_bar("", total, measured, *columns) as (progress, task):

        def on_event(event: Event) -> None:
            key = event.workload.mode, event.entry
            if event.found is None:
                rate = f", {tokens[key] / seconds[key]:.0f} tokens/s" if seconds[key] else ""
                phase = "" if event.phase == "measuring" else f" ({event.phase})"
                point = "" if event.entry.point is None else f" at {event.entry.point}"
                text = f"{event.workload.title}: {event.entry.method.label}{point}{rate}{phase}"
                progress.update(task, description=text)
            elif event.phase == "measuring":
                progress.advance(task)
                if not isinstance(event.found, Exception):
                    tokens[key] += sum(len(text) for outcome in event.found for text in outcome.tokens)
                    seconds[key] += sum(outcome.total_seconds for outcome in event.found)
            elif event.phase == "warming up" and isinstance(event.found, Exception):
                console.note(f"{event.entry.method.spec} fails: {one_line(event.found)}")

        yield on_event
