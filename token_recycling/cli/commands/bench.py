"""`token-recycling bench`: methods against each other on the same prompts, and the report of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..._util.extras import lacking
from ...model import loading, sources
from .. import console, running
from ..options import Chat, Device, DType, Json, Model, Threads, completed_drafters

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
        loaded = loading.load(model, dtype, device, threads)
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
    if missing := lacking("bench", "pandas", "matplotlib", "jinja2"):
        console.note(f"writing the report's files {missing}")
    for text in (*plan.notes, *session.what_does_not_fit(config, questions)):
        console.note(text)

    from ...bench.run.measure import measure
    from ...bench.run.store import Store
    from ..measuring import measuring

    folder = output or Path("results") / Path(sources.title(model)).name
    store = Store(folder, session.settings(config, questions, plan, where), plan, fresh)
    total = len(list(plan.items()))
    if store.done:
        console.note(f"going on in {folder}: {store.done} of {total} prompts are measured")
    try:
        with measuring(plan, repeats, store.done) as on_event:
            measure(config, plan, store, where, on_event)
    except KeyboardInterrupt:
        console.note(f"stopped with {store.done} of {total} prompts; the same command goes on there")
        raise typer.Exit(130) from None
    _report(folder, store.path, as_json)


def _report(folder: Path, rows: Path, as_json: bool) -> None:
    from ...bench.report import require_extra

    require_extra()
    from ...bench.report import write as report

    written = report.write(folder, None if as_json else Console())
    if not as_json:
        for path in written:
            console.note(f"written: {path}")
        return
    measured = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    counts = {
        "rows": len(measured),
        "failures": sum(row["failure"] is not None for row in measured),
        "different_outputs": sum(row["identical"] is False for row in measured),
    }
    console.print_json({"folder": str(folder), **counts, "written": [str(path) for path in written]})
