"""Step times of Llama shapes with random weights, against `generate`: `python -m benchmarks.gpu.steps`.

No download is needed. For every shape and context length it measures a token of transformers' own `generate`, eager
and compiled with a static cache; eager, captured, and captured and compiled steps of 1 to 256 nodes; the forward pass
of a step alone; and how long the device works and waits in each. Then it writes a table with the bars to pass.

Every measurement is a row of `rows.jsonl`, written at once. A run that is stopped, or whose time is up (`--seconds`),
resumes when it is started again; rows of another machine or commit are measured again. A shape that does not fit into
memory ends the program with the error; what was measured before stays.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console

from token_recycling.model.target import Target

from .measurements import EVERYTHING, FEW, Measurement, Wanted, measurements
from .report import write_report
from .rows import Row, Rows, opened
from .shapes import SHAPES, made

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Job:
    """A run of this program."""

    rows: Rows
    contexts: list[int]
    device: torch.device
    dtype: torch.dtype
    until: float
    wanted: Wanted
    say: Console

    def measure(self, shape: str) -> bool:
        """Measures what is missing of a shape; False if the time was up before."""
        wanted = [one for context in self.contexts for one in measurements(shape, context, self.wanted)]
        missing = [(key, run) for key, run in wanted if not self.rows.has(**key)]
        if not missing:
            return True
        if time.monotonic() > self.until:
            return False
        self.say.print(f"{shape}: {len(missing)} measurements to do", highlight=False)
        longest = max(self.contexts) + 2 * self.wanted.sizes[-1]
        target = Target(made(shape, longest, self.device, self.dtype))
        for key, run in missing:
            if time.monotonic() > self.until:
                return False
            found = self._measured(target, key["context"], run)
            self.rows.add({**key, **found})
            short = {name: value for name, value in {**key, **found}.items() if name != "longest"}
            self.say.print(*short.values(), highlight=False)
        return True

    def _measured(self, target: Target, context: int, run: Measurement) -> Row:
        """Run one measurement; an error is its row and does not stop the others."""
        try:
            return run(target, context)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


def main(
    shape: Annotated[list[str] | None, typer.Option(help="8B, 3B, 1B, 7B or tiny; repeatable")] = None,
    context: Annotated[list[int] | None, typer.Option(help="tokens of context; repeatable")] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the program")] = "cuda",
    dtype: Annotated[str, typer.Option(help="type of the weights")] = "bfloat16",
    seconds: Annotated[
        float, typer.Option(help="no measurement begins after this many seconds; run again to go on")
    ] = 480,
    few: Annotated[bool, typer.Option("--few", help="few sizes and no compiler, to try the program")] = False,
    output: Annotated[Path, typer.Option(help="folder of rows.jsonl and report.md")] = ROOT
    / "docs"
    / "results"
    / "gpu",
) -> None:
    """Measures what is missing, and writes the report. Exit status 3 if there is more to do."""
    until, say = time.monotonic() + seconds, Console(stderr=True, width=120)
    shapes, contexts = shape or ["8B", "3B", "1B", "7B"], sorted(context or [512, 2048, 8192])
    unknown = sorted({*shapes} - {*SHAPES})
    if unknown:
        raise typer.BadParameter(f"unknown shape {', '.join(unknown)}; choose from {', '.join(SHAPES)}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter(f"no CUDA device for --device {device}; --device cpu --shape tiny tries the program")
    transformers.utils.logging.set_verbosity_error()
    rows, where = opened(output, torch.device(device), getattr(torch, dtype))
    job = Job(rows, contexts, torch.device(device), getattr(torch, dtype), until, FEW if few else EVERYTHING, say)
    done = all(list(map(job.measure, shapes)))
    command = "python -m benchmarks.gpu.steps " + " ".join(sys.argv[1:])
    write_report(output, rows, where, command.strip())
    say.print(f"{output / 'report.md'}: " + ("all measured" if done else "there is more to measure: run it again"))
    if not done:
        raise typer.Exit(3)


if __name__ == "__main__":
    typer.run(main)
