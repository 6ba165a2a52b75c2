"""`make bench`: plain `generate`, transformers' prompt lookup, paper mode and the default, on the same prompts in one
run.

Every method decodes every prompt greedily, in an order that rotates from prompt to prompt, after a warm-up on a prompt
that is not measured with drafters that are thrown away. Outputs are compared token by token with plain `generate`.
Times are whole calls, prefill included. The last line is one JSON object.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import token_recycling
from token_recycling import Stats, make_drafter

ROOT = Path(__file__).parent.parent
PAPER = "recycling:tree=paper,learns_prompt=false"
"""Token Recycling as published."""
console = Console(width=120)


@dataclass
class Method:
    """One way of decoding: `run(ids, stats)` returns the text's ids; `stats` is None for what is not ours."""

    name: str
    run: Callable[[torch.Tensor], torch.Tensor]
    stats: Stats | None = None
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    forwards: int = 0
    different: int = 0

    @property
    def mat(self) -> float:
        """Emitted tokens per forward pass, the first pass over the prompt left out on both sides."""
        return self.stats.mat if self.stats else (self.tokens - len(self.seconds)) / (self.forwards - len(self.seconds))


def main(
    model: Annotated[Path, typer.Argument(help="a local model folder")] = ROOT / "models" / "target",
    prompts: Annotated[Path, typer.Option(help="a folder of prompts, one a file")] = ROOT / "models" / "prompts",
    limit: Annotated[int, typer.Option(help="only the first so many prompts")] = 24,
    max_new_tokens: Annotated[int, typer.Option(help="tokens generated for each prompt")] = 128,
    drafter: Annotated[list[str] | None, typer.Option(help="further drafters to measure")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 for torch's choice")] = 0,
) -> None:
    """Prints the table of docs/RESULTS.md."""
    transformers.utils.logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    target = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    files = sorted(path for path in prompts.iterdir() if path.is_file())[: limit + 1]
    encoded = [tokenizer(path.read_text(), return_tensors="pt").input_ids for path in files]
    arguments = {"max_new_tokens": max_new_tokens, "do_sample": False, "eos_token_id": None}

    def ours(spec: str) -> Method:
        made, stats = make_drafter(spec), Stats()
        return Method(
            spec, lambda ids: token_recycling.generate(target, ids, drafter=made, stats=stats, **arguments), stats
        )

    def methods() -> list[Method]:
        return [
            Method("transformers generate", lambda ids: target.generate(ids, **arguments)),
            Method(
                "transformers prompt lookup (10)",
                lambda ids: target.generate(ids, prompt_lookup_num_tokens=10, **arguments),
            ),
            *map(ours, ["plain", PAPER, "recycling", *(drafter or [])]),
        ]

    forwards = 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += 1

    target.register_forward_pre_hook(count)
    for method in methods():
        method.run(encoded[-1][:, :32])
    measured = methods()
    for index, ids in enumerate(track(encoded[:limit], "measuring", console=Console(stderr=True))):
        outputs: dict[str, torch.Tensor] = {}
        turn = index % len(measured)
        for method in measured[turn:] + measured[:turn]:
            forwards, began = 0, time.perf_counter()
            outputs[method.name] = method.run(ids)
            method.seconds.append(time.perf_counter() - began)
            method.tokens += outputs[method.name].shape[1] - ids.shape[1]
            method.forwards += forwards
        for method in measured:
            method.different += not torch.equal(outputs[method.name], outputs[measured[0].name])
    prompts_done, threads_used = len(measured[0].seconds), torch.get_num_threads()
    report(measured, f"{prompts_done} prompts x {max_new_tokens} tokens, greedy, float32, {threads_used} threads")


def report(measured: list[Method], title: str) -> None:
    """The table, and the same figures as one JSON line."""
    table = Table(title=title)
    for column in ("method", "tokens/s", "MAT", "speedup", "per prompt, min to max", "overhead", "identical"):
        table.add_column(column, justify="left" if column == "method" else "right")
    plain, rows = measured[0], []
    for method in measured:
        ratios = sorted(theirs / ours for theirs, ours in zip(plain.seconds, method.seconds, strict=True))
        row = {
            "method": method.name,
            "tokens_per_second": method.tokens / sum(method.seconds),
            "mat": method.mat,
            "speedup": sum(plain.seconds) / sum(method.seconds),
            "speedup_median_prompt": statistics.median(ratios),
            "speedup_range": [ratios[0], ratios[-1]],
            "overhead_share_of_forward": method.stats.overhead if method.stats else None,
            "different_outputs": method.different,
        }
        rows.append(row)
        table.add_row(
            method.name,
            f"{row['tokens_per_second']:.0f}",
            f"{row['mat']:.2f}",
            f"{row['speedup']:.2f}",
            f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
            f"{method.stats.overhead:.1%}" if method.stats else "",
            "yes" if not method.different else f"NO ({method.different})",
        )
    console.print(table)
    environment = {"machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
    print(json.dumps({"title": title, **environment, "transformers": transformers.__version__, "rows": rows}))


if __name__ == "__main__":
    typer.run(main)
