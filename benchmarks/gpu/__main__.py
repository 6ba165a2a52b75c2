"""Run all GPU measurements, stage by stage: `make bench-gpu`, or `python -m benchmarks.gpu`.

    python -m benchmarks.gpu --dry-run             prints the plan with estimated times, and runs each stage with a tiny
                                                   model on the CPU
    python -m benchmarks.gpu --minutes 9           stops after that time; started again, it resumes

Each stage is a separate program that writes rows immediately, so an interrupted stage loses one measurement. A stage
that runs out of memory is retried with smaller batches, then with a smaller model. `stages.jsonl` records the stages
that are done on this commit and their sizes. A failed stage does not stop the others.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.real_model import NoRealModelError, fetched
from token_recycling.bench.environment import commit

from .stages import ROOT, Command, Stage, rehearsal, stages

OUT_OF_MEMORY = "out of memory"
"""Part of torch's error message."""
_FEW_LINES = 15
MORE_TO_DO = 3
"""Exit status if the time ran out."""


class TimeUpError(Exception):
    """The time is up, so no more stages can run."""


def run(todo: Iterable[Stage], output: Path, until: float = float("inf")) -> bool:
    """Run the stages that are not done yet; return True if none failed. Raises TimeUpError."""
    output.mkdir(parents=True, exist_ok=True)
    path, good = output / "stages.jsonl", True
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {row["stage"] for row in rows if row["status"] == "done" and row["commit"] == commit()}
    for stage in todo:
        if stage.name in done:
            print(f"{stage.name}: done before", flush=True)
            continue
        if stage.missing:
            print(f"{stage.name}: skipped, not installed: {', '.join(stage.missing)}", flush=True)
            continue
        began = time.monotonic()
        status, size, log = _run_stage(stage, output, until)
        row = {"stage": stage.name, "status": status, "size": size, "commit": commit()}
        with path.open("a") as file:
            file.write(json.dumps({**row, "seconds": round(time.monotonic() - began, 1)}) + "\n")
        print(f"{stage.name}: {status}, size {size + 1} of {len(stage.sizes)}", flush=True)
        if status != "done":
            good = False
            print(*log.splitlines()[-_FEW_LINES:], sep="\n", flush=True)
    return good


def _run_stage(stage: Stage, output: Path, until: float) -> tuple[str, int, str]:
    """Run a stage in the largest size that fits into memory; return the outcome, the size, and the last output."""
    for size, commands in enumerate(stage.sizes):
        print(f"{stage.name}: size {size + 1} of {len(stage.sizes)}", flush=True)
        for command in commands:
            code, log = _called(command, output / "logs" / f"{stage.name.replace(' ', '-')}.log", until)
            if code:
                break
        else:
            return "done", size, log
        if OUT_OF_MEMORY not in log:
            return f"failed with exit status {code}", size, log
    return OUT_OF_MEMORY, len(stage.sizes) - 1, log


def _called(command: Command, log: Path, until: float) -> tuple[int, str]:
    """Return exit status and output of a command; if the time runs out, interrupt it and raise TimeUpError."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("a") as file:
        begun = file.tell()
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            code = process.wait(None if until == float("inf") else max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
            raise TimeUpError from None
    with log.open() as file:
        file.seek(begun)
        return code, file.read()


def _model_and_data() -> tuple[str, str]:
    """Return the real model and Spec-Bench, or without a network the model and prompts of the repository."""
    try:
        return str(fetched()), "spec_bench"
    except NoRealModelError as error:
        print(f"{error}; measuring the shipped models/target instead", flush=True)
        return str(ROOT / "models" / "target"), str(ROOT / "models" / "prompts")


def _plan(todo: list[Stage]) -> None:
    for stage in todo:
        sizes = f"{len(stage.sizes)} sizes" if len(stage.sizes) > 1 else "one size"
        missing = f", not installed: {', '.join(stage.missing)}" if stage.missing else ""
        print(f"{stage.name:32} {stage.minutes:4.0f} min, {sizes}{missing}")
        for command in stage.sizes[0]:
            print("   ", " ".join(command).replace(sys.executable, "python").replace(f"{ROOT}/", ""))
    print(f"{'in all':32} {sum(stage.minutes for stage in todo if not stage.missing):4.0f} min", flush=True)


def main(
    stage: Annotated[list[str] | None, typer.Option(help="prefix of a stage's name; repeatable")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the plan, and run each stage with a tiny model on the CPU")
    ] = False,
    minutes: Annotated[float, typer.Option(help="total time; a later run resumes")] = float("inf"),
    model: Annotated[str | None, typer.Option(help="folder or .gguf file of a llama; default SmolLM2-135M")] = None,
    data: Annotated[str | None, typer.Option(help="prompts, as for `bench`; default Spec-Bench")] = None,
    output: Annotated[Path, typer.Option(help="folder for rows and reports")] = ROOT / "docs" / "results" / "gpu",
) -> None:
    """Run the stages that are not done yet. Exit status 1 if one failed, 3 if the time ran out."""
    if not dry_run and not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device found; --dry-run runs every stage on the CPU")
    own_model, own_data = (model, data) if model and data else _model_and_data()
    until = time.monotonic() + 60 * minutes

    def chosen(all_stages: Iterable[Stage]) -> list[Stage]:
        return [one for one in all_stages if not stage or one.name.startswith(tuple(stage))]

    todo = chosen(stages(output, model or own_model, data or own_data))
    _plan(todo)
    try:
        if not dry_run:
            good = run(todo, output, until)
        else:
            with tempfile.TemporaryDirectory() as folder:
                good = run(chosen(rehearsal(Path(folder))), Path(folder), until)
    except TimeUpError:
        print("the time is up: run it again", flush=True)
        raise typer.Exit(MORE_TO_DO) from None
    if not good:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
