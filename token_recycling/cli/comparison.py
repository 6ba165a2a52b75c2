"""Decode prompts with `generate`, with prompt lookup and accelerated, and compare outputs and times.

All three are methods of the benchmark and are measured the same way: `generate` is transformers' own, prompt lookup is
`generate` with transformers' prompt lookup, accelerated is `generate` of the accelerated model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from transformers import PreTrainedModel

from .._util.device import memory
from .._util.prompts import Prompt
from .._util.text_stream import first_line
from ..bench.data import BASELINE, Question
from ..bench.measure import Event, Item, Workload, WorkloadRun
from ..bench.methods import Drafted, Method, Outcome, parse
from ..bench.prompts import BenchmarkConfig
from ..bench.store import Row
from ..loop.stats import Stats
from ..model.backend import Fast
from ..model.loading import Loaded
from .console import SEPARATOR, by_step, has_colors, say

LOOKUP, ACCELERATED = "prompt_lookup", "accelerated"
METHODS = {BASELINE: BASELINE, LOOKUP: "prompt_lookup_hf:n=10"}
"""Benchmark methods by name; "accelerated" is the user's drafter."""
NAMES = (*METHODS, ACCELERATED)
MOST_ROWS = 12
"""Maximum number of prompts that get their own line in the table."""
BFLOAT16_PROMPTS = 3
"""Number of prompts decoded in bfloat16."""
_SHARE_OF_MEMORY = 8
"""bfloat16 is measured if the float32 weights take at most 1 / this of all memory."""
_NO_ANSWER = "no answer: the model ends the output immediately"


@dataclass(frozen=True)
class ComparedPrompt:
    """One prompt, decoded by every method."""

    name: str
    prompt: str
    rows: dict[str, Row]
    """Benchmark rows by method; prompt lookup is missing where transformers does not support it for the model."""
    accelerated: Outcome
    answered: bool
    """False if the model ends its output immediately: such a time does not measure speed."""

    @property
    def stats(self) -> Stats:
        """Statistics of the accelerated call."""
        assert self.accelerated.stats is not None
        return self.accelerated.stats

    @property
    def tokens(self) -> list[int]:
        """Output tokens of the accelerated call."""
        return self.accelerated.tokens[0]

    @property
    def steps(self) -> list[list[int]]:
        """Tokens of the accelerated call by step."""
        ends = accumulate(self.accelerated.lengths or (), initial=0)
        return [self.tokens[start:end] for start, end in pairwise(ends)]

    @property
    def identical(self) -> bool:
        return bool(self.rows[ACCELERATED]["identical"])

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        return {
            "name": self.name,
            "steps": self.steps,
            "identical": self.identical,
            "answered": self.answered,
            "divergence": self.rows[ACCELERATED]["divergence"],
            **speeds([self]),
            "stats": self.stats.as_dict(),
        }


class Comparison:
    """Decodes prompts by every method, or only by the given ones; the drafter keeps learning across prompts."""

    def __init__(
        self,
        loaded: Loaded,
        drafter: str,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        chat: bool,
        methods: Sequence[str] = NAMES,
        fast: Fast = "auto",
    ) -> None:
        """Warm up with a separate drafter, which is discarded."""
        self.loaded, self._prompts = loaded, prompts
        self.no_lookup: str | None = None
        """Reason why transformers' prompt lookup cannot decode with this model, or None."""
        self._outcomes: dict[str, Outcome] = {}
        self._drafter, self._fast = drafter, fast
        self._names = list(methods)
        self._config = BenchmarkConfig(loaded.model, loaded.tokenizer, max_new_tokens, chat)
        start = time.perf_counter()
        self._run = self._prepared()
        if self.no_lookup is not None:
            self._names.remove(LOOKUP)
            self._run = self._prepared()
        self.warm_up_seconds = time.perf_counter() - start
        """Time for compilation, prepacking and other first calls; measured times exclude it."""

    def _prepared(self) -> WorkloadRun:
        items = tuple(Item((Question(name, "", (text,), "prompt"),)) for name, text in self._prompts)
        workload = Workload("generate", tuple(METHODS.get(name, name) for name in self._names), items)
        run = WorkloadRun(self._config, workload, {}, self._on_event, self._make)
        run.prepare(0)
        return run

    def _make(self, spec: str) -> Method:
        return Drafted(self._drafter, self._fast) if spec == ACCELERATED else parse(spec)

    def _on_event(self, event: Event) -> None:
        name = next((name for name, spec in METHODS.items() if spec == event.method.spec), ACCELERATED)
        if isinstance(event.outcomes, Exception):
            if name != LOOKUP:
                raise event.outcomes
            self.no_lookup = first_line(event.outcomes)
        elif event.outcomes is not None and event.phase == "measuring":
            (self._outcomes[name],) = event.outcomes

    def __iter__(self) -> Iterator[ComparedPrompt]:
        """Decode one prompt after another; the order of the methods rotates."""
        eos = self.loaded.model.generation_config.eos_token_id
        ends = set(eos if isinstance(eos, list) else [eos])
        for index, (name, prompt) in enumerate(self._prompts):
            rows = dict(zip(self._names, self._run.rows_of(index), strict=True))
            ours = self._outcomes[ACCELERATED]
            answered = not ends.issuperset(self._outcomes.get(BASELINE, ours).tokens[0])
            yield ComparedPrompt(name, prompt, rows, ours, answered)


def speeds(compared: Sequence[ComparedPrompt]) -> dict[str, Any]:
    """Return each method's tokens, seconds of whole calls and decoding tokens/s, and the end-to-end speedup of
    accelerated calls over every other method; None for values that were not measured. Prompts without an answer are
    excluded.
    """
    answers = [prompt for prompt in compared if prompt.answered]
    measured = {name: _speed([prompt.rows[name] for prompt in answers if name in prompt.rows]) for name in NAMES}
    rates = {name: speed["tokens"] / speed["seconds"] for name, speed in measured.items() if speed is not None}
    speedup = {name: rates[ACCELERATED] / rates[name] if name in rates else None for name in METHODS}
    return {**measured, "speedup": speedup}


def _speed(rows: Sequence[Row]) -> dict[str, Any] | None:
    if not rows:
        return None
    tokens, decoding = sum(row["tokens"] for row in rows), sum(row["seconds"][0] for row in rows)
    decoded = tokens - sum(row["first_tokens"] for row in rows)
    return {
        "tokens": tokens,
        "seconds": sum(row["total_seconds"][0] for row in rows),
        "tokens_per_second": decoded / decoding if decoded else 0.0,
    }


def summary(compared: Sequence[ComparedPrompt]) -> dict[str, Any]:
    """Return the figures over all prompts, as plain values."""
    stats = sum((prompt.stats for prompt in compared), Stats())
    return {
        "prompts": len(compared),
        "unanswered": sum(not prompt.answered for prompt in compared),
        "drafter": stats.drafter,
        **speeds(compared),
        "mat": stats.mat,
        "identical": all(prompt.identical for prompt in compared),
    }


def may_try_bfloat16(model: PreTrainedModel) -> bool:
    """Return whether a bfloat16 copy of a float32 model on a CPU takes little of the memory."""
    nbytes = sum(weight.nbytes for weight in model.parameters())
    on_cpu = model.device.type == "cpu" and model.dtype == torch.float32
    return on_cpu and nbytes <= memory(model.device) // _SHARE_OF_MEMORY


def bfloat16_speedup(bfloat16: Comparison, compared: Sequence[ComparedPrompt]) -> float | None:
    """Decode the first prompts in bfloat16; return the speedup over accelerated float32, or None without an answer."""
    pairs = [pair for pair in zip(bfloat16, compared, strict=False) if pair[1].answered]
    now, before = (_speed([pair[which].rows[ACCELERATED] for pair in pairs]) for which in (0, 1))
    if now is None or before is None:
        return None
    return float(now["tokens"] / now["seconds"] / (before["tokens"] / before["seconds"]))


def print_legend(console: Console, drafter: str) -> None:
    """Print how to read the outputs that follow."""
    steps = "share a tint" if has_colors(console) else f"follow a {SEPARATOR}"
    say(console, f"> a prompt; its output is below. Tokens of one step {steps} ({drafter})\n", "dim")


def print_prompt(console: Console, place: str, compared: ComparedPrompt, pieces: Sequence[str]) -> None:
    """Print the end of one prompt, its output with visible steps, and the figures of each method."""
    console.rule(Text(f"{place}: {compared.name}"), align="left", characters="─", style="dim")
    for line in _tail(compared.prompt).split("\n"):
        say(console, f"> {line}", "dim")
    colors = has_colors(console)
    say(console, "\noutput:", "dim")
    console.print(Text.assemble("" if colors else SEPARATOR, by_step(pieces, colors)), soft_wrap=True)
    console.print()
    if (divergence := compared.rows[ACCELERATED]["divergence"]) is not None:
        margin = "" if divergence["margin"] is None else f"; their logits differ by {divergence['margin']:.3g}"
        difference = f"token {divergence['place']} is {divergence['got']}, with generate {divergence['expected']}"
        say(console, f"first divergence: {difference}{margin}")
    measured = compared.as_dict()
    rates = [f"{_title(name)} {_rate(measured[name])} tokens/s" for name in NAMES if measured[name]] or [_NO_ANSWER]
    speedup = [f"speedup {measured['speedup'][BASELINE]:.2f}"] if compared.answered else []
    parts = [f"identical: {_yes(compared.identical)}", *rates, *speedup, f"MAT {compared.stats.mat:.2f}"]
    say(console, f"{', '.join(parts)} ({compared.stats.tokens} tokens in {compared.stats.steps} steps)\n")


def print_summary(console: Console, rows: Sequence[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Print a table with one line per prompt, if there are few, and one for all, then the conclusions."""
    columns = ("tokens", *map(_title, NAMES), "speedup", "MAT", "identical")
    right = (Column(name, justify="right", no_wrap=True) for name in columns)
    table = Table(Column("prompt", no_wrap=True, max_width=11), *right, box=SIMPLE, padding=(0, 1, 0, 0))
    for row in rows if 1 < len(rows) <= MOST_ROWS else ():
        table.add_row(*_cells(row["name"].removesuffix(".txt"), row, row["stats"]["mat"], row["stats"]["tokens"]))
    table.add_section()
    tokens = sum(row["stats"]["tokens"] for row in rows)
    table.add_row(*_cells(f"all {summary['prompts']}", summary, summary["mat"], tokens))
    console.print(table)
    say(console, "tokens/s exclude the prefill; lookup: transformers' prompt lookup, 10 tokens")
    lines = [("model", summary["model"]), ("drafter", summary["drafter"])]
    lines.append(("warm-up", f"{summary['warm_up_seconds']:.1f} s, not included in any time above"))
    if summary["unanswered"]:
        lines.append(("excluded", f"speeds of {summary['unanswered']} prompts with {_NO_ANSWER}"))
    over = [f"{ratio:.2f} over {_title(name)}" for name, ratio in summary["speedup"].items() if ratio is not None]
    if over:
        lines.append(("speedup", f"{', '.join(over)}; end to end, prefill included"))
    if summary.get("bfloat16"):
        note = "accelerated; outputs may differ at near-ties"
        lines.append(("bfloat16", f"{summary['bfloat16']:.2f} times the speed of float32, {note}"))
    for name, value in lines:
        say(console, f"{name + ':':<9} {value}")
    say(console, f"identical: {_yes(summary['identical'])}", "bold")


def _title(name: str) -> str:
    return "lookup" if name == LOOKUP else name


def _tail(text: str, lines: int = 8) -> str:
    every_line = text.split("\n")
    return text if len(every_line) <= lines else "\n".join(["…", *every_line[-lines:]])


def _cells(name: str, measured: dict[str, Any], mat: float, tokens: int) -> list[Text]:
    speedup = measured["speedup"][BASELINE]
    rates = [_rate(measured[method]) for method in NAMES]
    shown = "-" if speedup is None else f"{speedup:.2f}"
    return [Text(cell) for cell in (name, f"{tokens:,}", *rates, shown, f"{mat:.2f}", _yes(measured["identical"]))]


def _rate(speed: dict[str, Any] | None) -> str:
    return "-" if speed is None else f"{speed['tokens_per_second']:.1f}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
