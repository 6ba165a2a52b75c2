"""What the fast path is worth on an accelerator: t(n) of llama shapes with random weights, against eager `generate`.

What a step costs does not depend on what the weights say, so that no download is needed. For every shape and length of
context it measures a token of transformers' own eager `generate`, steps of 1 to 256 nodes, and the forward pass of a
step alone; then it writes a table with the bars that the fast path is to pass.

Every measurement is a row of `rows.jsonl`, written at once. A run that is stopped, or whose time is up (`--seconds`),
goes on where it was when it is started again; rows of another machine or commit are measured anew. Nothing is measured
on texts here: `token-recycling bench` does that, and `make bench-gpu` runs both.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import transformers
import typer
from gpu_report import ALONE, Row, page
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from token_recycling.bench.run.environment import environment
from token_recycling.cuda_graphs.runner import StepRunner
from token_recycling.cuda_graphs.support import runner_or_reason
from token_recycling.cuda_graphs.timing import forward_alone, timed
from token_recycling.files import replacing
from token_recycling.model.pass_costs import filled
from token_recycling.model.tree_model import TreeModel
from token_recycling.stats import synchronize

ROOT = Path(__file__).parent.parent
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 96, "vocab_size": 512},
    "1B": {
        "hidden_size": 2048,
        "layers": 16,
        "heads": 32,
        "kv_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
    },
    "7B": {
        "hidden_size": 4096,
        "layers": 32,
        "heads": 32,
        "kv_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
    },
    "13B": {
        "hidden_size": 5120,
        "layers": 40,
        "heads": 40,
        "kv_heads": 40,
        "intermediate_size": 13824,
        "vocab_size": 32000,
    },
}
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256)
_GENERATED = 24


class Rows:
    """The rows of this machine and commit, in a file that only grows."""

    def __init__(self, folder: Path, setting: dict[str, Any]) -> None:
        self.path, self.setting = folder / "rows.jsonl", setting
        folder.mkdir(parents=True, exist_ok=True)
        kept = [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []
        self.rows: list[Row] = [row for row in kept if row["setting"] == setting]

    def has(self, **key: Any) -> bool:
        return any(all(row[name] == value for name, value in key.items()) for row in self.rows)

    def add(self, row: Row) -> None:
        self.rows.append({**row, "setting": self.setting})
        with self.path.open("a") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")


class Arrivals(BaseStreamer):
    """When each token was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


def made(shape: str, longest: int, device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
    """A llama of that shape with random weights."""
    of = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=of["vocab_size"],
        hidden_size=of["hidden_size"],
        intermediate_size=of["intermediate_size"],
        num_hidden_layers=of["layers"],
        num_attention_heads=of["heads"],
        num_key_value_heads=of["kv_heads"],
        max_position_embeddings=longest + 2 * SIZES[-1],
        bos_token_id=None,
        eos_token_id=None,
        dtype=dtype,
    )
    torch.manual_seed(0)
    with _defaults(device, dtype):
        return LlamaForCausalLM(config).eval()


@contextmanager
def _defaults(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def eager_generate(target: TreeModel, length: int) -> float:
    """Seconds of a token of transformers' own `generate` after `length` tokens: the median between two of them."""
    cache = filled(target, length)
    ids = torch.ones(1, length + 1, dtype=torch.long, device=target.device)
    arrivals = Arrivals()
    target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=_GENERATED,
        do_sample=False,
        streamer=arrivals,
    )
    synchronize(target.device)
    gaps = np.diff(arrivals.times[2:])  # the prompt, and a token that warms up
    return statistics.median(gaps.tolist())


Measurement = Callable[[TreeModel, StepRunner], float]


def measurements(shape: str, context: int) -> Iterator[tuple[Row, Measurement | None]]:
    """What is to be measured, and how; of steps that are captured, if not of eager decoding (None)."""
    at = {"shape": shape, "context": context}
    yield {**at, "what": "generate", "kind": "eager", "nodes": 1}, None

    def step(nodes: int) -> Measurement:
        return lambda target, runner: timed(target, runner, context, [nodes], 2.0)[nodes]

    def forward(nodes: int) -> Measurement:
        return lambda target, runner: forward_alone(target, runner, context, nodes)

    for nodes in SIZES:
        yield {**at, "what": "step", "kind": "captured", "nodes": nodes}, step(nodes)
    for nodes in ALONE:
        yield {**at, "what": "forward", "kind": "captured", "nodes": nodes}, forward(nodes)


@dataclass(frozen=True)
class Job:
    """A run of this program."""

    rows: Rows
    contexts: list[int]
    device: torch.device
    dtype: torch.dtype
    until: float
    say: Console

    def measure(self, shape: str) -> bool:
        """Measures what is missing of a shape; False if the time was up before."""
        wanted = [one for context in self.contexts for one in measurements(shape, context)]
        missing = [(key, run) for key, run in wanted if not self.rows.has(**key)]
        if not missing:
            return True
        if time.monotonic() > self.until:
            return False
        self.say.print(f"{shape}: {len(missing)} measurements to do", highlight=False)
        target = TreeModel(made(shape, max(self.contexts), self.device, self.dtype))
        for key, run in missing:
            if time.monotonic() > self.until:
                return False
            self.rows.add({**key, **self._measured(target, key, run)})
            self.say.print(*list(self.rows.rows[-1].values())[:-1], highlight=False)
        return True

    def _measured(self, target: TreeModel, key: Row, run: Measurement | None) -> Row:
        try:
            if run is None:
                return {"seconds": eager_generate(target, key["context"])}
            runner = runner_or_reason(target)
            return {"error": runner} if isinstance(runner, str) else {"seconds": run(target, runner)}
        except torch.OutOfMemoryError as error:
            return {"error": f"out of memory: {error}"}


def main(
    shape: Annotated[list[str] | None, typer.Option(help="1B, 7B, 13B or tiny; may be given again")] = None,
    context: Annotated[list[int] | None, typer.Option(help="tokens of context; may be given again")] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the program")] = "cuda",
    dtype: Annotated[str, typer.Option(help="type of the weights")] = "bfloat16",
    seconds: Annotated[
        float, typer.Option(help="no measurement begins after this many seconds; run again to go on")
    ] = 480,
    output: Annotated[Path, typer.Option(help="folder of rows.jsonl and report.md")] = ROOT
    / "docs"
    / "results"
    / "gpu",
) -> None:
    """Measures what is missing, and writes the report. Exit status 3 if there is more to do."""
    until, say = time.monotonic() + seconds, Console(stderr=True, width=120)
    shapes, contexts = shape or ["7B", "1B", "13B"], sorted(context or [512, 2048, 8192])
    unknown = sorted({*shapes} - {*SHAPES})
    if unknown:
        raise typer.BadParameter(f"expected shapes of {', '.join(SHAPES)}, got {', '.join(unknown)}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter("expected a CUDA device, got none; --device cpu --shape tiny tries the program")
    transformers.utils.logging.set_verbosity_error()
    where = environment(made("tiny", 1, torch.device(device), getattr(torch, dtype)), "llama shapes, random weights")
    setting = {
        name: where[name] for name in ("accelerator", "cpu", "threads", "dtype", "torch", "transformers", "commit")
    }
    rows = Rows(output, {**setting, "system": platform.system()})
    job = Job(rows, contexts, torch.device(device), getattr(torch, dtype), until, say)
    done = all(list(map(job.measure, shapes)))
    command = "python benchmarks/gpu.py " + " ".join(sys.argv[1:])
    with replacing(output / "report.md") as temporary:
        Path(temporary).write_text(page(rows.rows, where, command.strip(), list(SHAPES)))
    say.print(f"{output / 'report.md'}: " + ("all measured" if done else "there is more to measure: run it again"))
    if not done:
        raise typer.Exit(3)


if __name__ == "__main__":
    typer.run(main)
