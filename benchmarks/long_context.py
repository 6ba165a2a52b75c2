"""Long contexts: what a step costs outside the model's forward pass, and a token against plain `generate`.

The shipped target reads this package's own source, with rotary positions stretched to the length asked for. What it
then writes is worth nothing, nor is the MAT of such a text; but what a step costs does not depend on it. Every round
measures all ways one after another, after a short text that warms them up, and the table has the medians of the rounds.
On a busy machine `--processor-time --threads 1` counts the time that this thread has run for, instead of the clock's.
The last line is one JSON object.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import token_recycling
from token_recycling import Stats, generate
from token_recycling.loop import stats

ROOT = Path(__file__).parent.parent
DRAFTERS = ("plain", "recycling", "published")


class Clock(BaseStreamer):
    """When the prompt was taken and when each token was there."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now, self.times = now, list[float]()

    def put(self, value: torch.Tensor) -> None:
        self.times.append(self.now())

    def end(self) -> None:
        """Nothing is held back."""


@dataclass
class Cost:
    """Of one way at one length of context, milliseconds."""

    context: int
    way: str
    token: float
    mat: float = 1.0
    forward: float | None = None
    outside: float | None = None

    @property
    def share(self) -> float | None:
        """Time of a step outside the forward pass, as a share of it."""
        return None if self.forward is None or self.outside is None else self.outside / self.forward


def main(
    model: Annotated[Path, typer.Argument(help="a local model folder")] = ROOT / "models" / "target",
    context: Annotated[list[int] | None, typer.Option(help="tokens of context; may be given again")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="tokens generated")] = 64,
    rounds: Annotated[int, typer.Option(help="how often everything is measured")] = 3,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 for torch's choice")] = 0,
    processor_time: Annotated[bool, typer.Option(help="time that one thread ran for, not the clock's")] = False,
) -> None:
    """Prints a row for every length of context and way of decoding."""
    if processor_time and threads != 1:
        raise typer.BadParameter(f"expected --threads 1 with --processor-time, got {threads}")
    if processor_time:
        stats.time = SimpleNamespace(perf_counter=time.thread_time)  # type: ignore[assignment]
    now = time.thread_time if processor_time else time.perf_counter
    transformers.utils.logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)
    contexts = context or [1000, 8000]
    target = stretched(model, max(contexts) + max_new_tokens)
    text = "\n".join(path.read_text() for path in sorted(Path(token_recycling.__file__).parent.rglob("*.py")))
    ids = AutoTokenizer.from_pretrained(model)(text, return_tensors="pt").input_ids
    if ids.shape[1] < max(contexts):
        raise typer.BadParameter(f"expected at most {ids.shape[1]} tokens of context, got {max(contexts)}")
    arguments = {"max_new_tokens": max_new_tokens, "do_sample": False, "eos_token_id": None}
    for drafter in DRAFTERS:
        accelerated(target, ids[:, :64], arguments, drafter)
    measured: dict[tuple[int, str], list[Cost]] = {}
    for _ in track(range(rounds), "measuring", console=Console(stderr=True)):
        for length in contexts:
            costs = [plain(target, ids[:, :length], arguments, now)]
            costs += [accelerated(target, ids[:, :length], arguments, drafter) for drafter in DRAFTERS]
            for cost in costs:
                measured.setdefault((length, cost.way), []).append(cost)
    report([sorted(costs, key=lambda cost: cost.share or cost.token)[rounds // 2] for costs in measured.values()])


def stretched(model: Path, length: int) -> PreTrainedModel:
    """The model in float32, its rotary positions interpolated so that `length` of them fit into those it knows."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = loaded.config
    factor = -(-length // config.max_position_embeddings)
    config.rope_parameters = {**config.rope_parameters, "rope_type": "linear", "factor": float(factor)}
    config.max_position_embeddings *= factor
    return AutoModelForCausalLM.from_pretrained(model, config=config, dtype=torch.float32).eval()


def plain(target: PreTrainedModel, ids: torch.Tensor, arguments: dict[str, Any], now: Callable[[], float]) -> Cost:
    """transformers' own decoding; the prompt and the first token, which comes with it, are left out."""
    clock = Clock(now)
    target.generate(ids, streamer=clock, **arguments)
    seconds = statistics.median(after - before for before, after in zip(clock.times[1:], clock.times[2:], strict=False))
    return Cost(ids.shape[1], "transformers generate", 1e3 * seconds)


def accelerated(target: PreTrainedModel, ids: torch.Tensor, arguments: dict[str, Any], drafter: str) -> Cost:
    """This loop, by its own statistics."""
    run = Stats()
    generate(target, ids, drafter=drafter, stats=run, **arguments)
    token, forward = 1e3 / run.tokens_per_second, 1e3 * run.seconds["forward"] / run.steps
    return Cost(ids.shape[1], drafter, token, run.mat, forward, forward * run.overhead)


def report(costs: list[Cost]) -> None:
    """The table, and the same figures as one JSON line."""
    table = Table(title=f"float32, {torch.get_num_threads()} threads, times in milliseconds")
    for column in ("context", "way", "forward", "outside", "share", "MAT", "a token"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for cost in costs:
        parts = (
            ("", "", "") if cost.share is None else (f"{cost.forward:.2f}", f"{cost.outside:.2f}", f"{cost.share:.1%}")
        )
        table.add_row(str(cost.context), cost.way, *parts, f"{cost.mat:.2f}", f"{cost.token:.2f}")
    Console(width=120).print(table)
    print(json.dumps([{**asdict(cost), "share": cost.share} for cost in costs]))


if __name__ == "__main__":
    typer.run(main)
