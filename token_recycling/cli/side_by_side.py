"""Decode prompts in three ways and compare: whether the outputs are equal, what each took, and how a person sees it.

Plain is transformers' own `model.generate`; lookup is the same with its own prompt lookup; recycled is the same call of
the accelerated model. They are methods of the benchmark, measured and written to rows as it does.
"""

from __future__ import annotations

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
from ..bench.row_format import BASELINE
from ..bench.run.data import Question
from ..bench.run.items import Conversation
from ..bench.run.measure import Event, WorkloadRun
from ..bench.run.methods import Drafted, parse
from ..bench.run.outcome import Outcome
from ..bench.run.plan import Entry, Workload
from ..bench.run.prompts import BenchmarkConfig
from ..cuda_graphs import Fast
from ..loop.stats import Stats
from ..model.loading import Loaded
from .console import SEPARATOR, by_step, has_colours, say

Row = dict[str, Any]
METHODS = {"plain": BASELINE, "lookup": "prompt_lookup_hf:n=10", "recycled": ""}
"""Methods of the benchmark by way; recycled is the user's drafter."""
WAYS = tuple(METHODS)
ROWS = 12
"""Prompts that have a line each in the table at the end, at most."""
_SHARE_OF_MEMORY = 8
"""The weights in float32 take at most this part of all memory where bfloat16 is tried."""
TRIED = 3
"""Prompts that are tried in bfloat16, at most."""
_NO_ANSWER = "no answer: the model ends the text at once"


@dataclass(frozen=True)
class SideBySide:
    """One prompt, decoded in all ways."""

    name: str
    prompt: str
    rows: dict[str, Row]
    """Of the benchmark, by way; without `lookup` where transformers has none for the model."""
    recycled: Outcome
    answered: bool
    """False where the model ends the text at once: that is no speed."""

    @property
    def stats(self) -> Stats:
        """Of the recycled decoding."""
        assert self.recycled.stats is not None
        return self.recycled.stats

    @property
    def tokens(self) -> list[int]:
        """Of the recycled decoding."""
        return self.recycled.tokens[0]

    @property
    def steps(self) -> list[list[int]]:
        """Tokens of the recycled decoding by step."""
        ends = accumulate(self.recycled.lengths or (), initial=0)
        return [self.tokens[start:end] for start, end in pairwise(ends)]

    @property
    def identical(self) -> bool:
        return bool(self.rows["recycled"]["identical"])

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "name": self.name,
            "steps": self.steps,
            "identical": self.identical,
            "answered": self.answered,
            "divergence": self.rows["recycled"]["divergence"],
            **speeds([self]),
            "stats": self.stats.as_dict(),
        }


class Comparing:
    """A model whose prompts are decoded in all ways, or recycled alone; what the drafter learns stays."""

    def __init__(
        self,
        loaded: Loaded,
        spec: str,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        chat: bool,
        ways: Sequence[str] = WAYS,
        fast: Fast = "auto",
    ) -> None:
        """Warms up, with a drafter that is thrown away."""
        self.loaded, self._prompts = loaded, prompts
        self.no_lookup: str | None = None
        """Why transformers' prompt lookup cannot decode with this model."""
        self._found: dict[str, Outcome] = {}
        methods = {way: parse(METHODS[way]) if METHODS[way] else Drafted(spec, fast) for way in ways}
        self._entries = {way: Entry(method) for way, method in methods.items()}
        config = BenchmarkConfig(loaded.model, loaded.tokenizer, max_new_tokens, chat)
        items = tuple(Conversation((Question(name, "", (text,), "prompt"),)) for name, text in prompts)
        self._run = WorkloadRun(config, self._workload(items), {}, self._heard)
        self._run.prepare(0)
        if self.no_lookup is not None:
            del self._entries["lookup"]
            self._run = WorkloadRun(config, self._workload(items), {}, self._heard)
            self._run.prepare(0)

    def _workload(self, items: tuple[Conversation, ...]) -> Workload:
        return Workload("generate", tuple(self._entries.values()), items)

    def _heard(self, event: Event) -> None:
        if event.found is None:
            return
        way = next(way for way, entry in self._entries.items() if entry is event.entry)
        if isinstance(event.found, Exception):
            if way != "lookup":
                raise event.found
            self.no_lookup = first_line(event.found)
        elif event.phase == "measuring":
            (self._found[way],) = event.found

    def __iter__(self) -> Iterator[SideBySide]:
        """One prompt after another; the order of the ways rotates."""
        eos = self.loaded.model.generation_config.eos_token_id
        ends = set(eos if isinstance(eos, list) else [eos])
        for place, (name, prompt) in enumerate(self._prompts):
            rows = dict(zip(self._entries, self._run.rows_of(place), strict=True))
            first = self._found.get("plain", self._found["recycled"])
            answered = not ends.issuperset(first.tokens[0])
            yield SideBySide(name, prompt, rows, self._found["recycled"], answered)


def speeds(found: Sequence[SideBySide]) -> dict[str, Any]:
    """Return for each way the tokens and seconds of whole calls and the tokens per second of decoding, the end-to-end
    speedup over plain decoding, and the way that is fastest end to end; None for what was not measured. Prompts without
    an answer are left out.
    """
    answers = [one for one in found if one.answered]
    ways = {way: _speed([one.rows[way] for one in answers if way in one.rows]) for way in WAYS}
    rates = {way: _end_to_end(speed) for way, speed in ways.items() if speed is not None}
    return {
        **ways,
        "speedup": rates["recycled"] / rates["plain"] if "plain" in rates else None,
        "fastest": max(rates, key=lambda way: rates[way]) if rates else None,
    }


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


def _end_to_end(speed: dict[str, Any]) -> float:
    """Return the tokens per second of whole calls."""
    return float(speed["tokens"] / speed["seconds"])


def summary(found: Sequence[SideBySide]) -> dict[str, Any]:
    """All prompts together, as plain numbers."""
    stats = sum((one.stats for one in found), Stats())
    return {
        "prompts": len(found),
        "unanswered": sum(not one.answered for one in found),
        "drafter": stats.drafter,
        **speeds(found),
        "mat": stats.mat,
        "identical": all(one.identical for one in found),
    }


def may_try_bfloat16(model: PreTrainedModel) -> bool:
    """Whether another copy of a model in float32 on a CPU, in bfloat16, takes little of the memory."""
    nbytes = sum(weight.nbytes for weight in model.parameters())
    on_cpu = model.device.type == "cpu" and model.dtype == torch.float32
    return on_cpu and nbytes <= memory(model.device) // _SHARE_OF_MEMORY


def in_bfloat16(other: Comparing, found: Sequence[SideBySide]) -> float | None:
    """How many times as fast the first prompts are recycled in bfloat16 as they were; None if none has an answer."""
    pairs = [pair for pair in zip(other, found, strict=False) if pair[1].answered]
    speed, before = ([one.rows["recycled"] for one in each] for each in zip(*pairs, strict=True)) if pairs else ([], [])
    now, then = _speed(speed), _speed(before)
    return _end_to_end(now) / _end_to_end(then) if now and then else None


def tail(text: str, lines: int = 8) -> str:
    """The last lines of a text."""
    kept = text.split("\n")
    return text if len(kept) <= lines else "\n".join(["…", *kept[-lines:]])


def legend(console: Console, drafter: str) -> None:
    """How to read the texts that follow."""
    how = "the two tints take turns" if has_colours(console) else f"a {SEPARATOR} stands before each"
    say(
        console,
        f"> a prompt; the answer stands below `answer:`. Tokens of one step came together; {how} ({drafter})\n",
        "dim",
    )


def print_comparison(console: Console, place: str, found: SideBySide, pieces: Sequence[str]) -> None:
    """One prompt: its end, the answer by steps, and what it took in each way."""
    console.rule(Text(f"{place}: {found.name}"), align="left", characters="─", style="dim")
    for line in tail(found.prompt).split("\n"):
        say(console, f"> {line}", "dim")
    say(console, "\nanswer:", "dim")
    colours = has_colours(console)
    console.print(Text.assemble("" if colours else SEPARATOR, by_step(pieces, colours)), soft_wrap=True)
    console.print()
    if (parting := found.rows["recycled"]["divergence"]) is not None:
        gap = "" if parting["margin"] is None else f", whose logits are {parting['margin']:.3g} apart"
        say(
            console,
            f"differs: token {parting['place']} is {parting['expected']} plain and {parting['got']} recycled{gap}",
        )
    measured = found.as_dict()
    rates = [f"{way} {_rate(measured[way])} tokens/s" for way in _ways(measured)] or [_NO_ANSWER]
    speedup = [f"speedup {measured['speedup']:.2f}"] if found.answered else []
    parts = [f"identical: {_yes(found.identical)}", *rates, *speedup, f"MAT {found.stats.mat:.2f}"]
    say(console, f"{', '.join(parts)} ({found.stats.tokens} tokens in {found.stats.steps} steps)\n")


def print_summary(console: Console, rows: Sequence[dict[str, Any]], summary: dict[str, Any]) -> None:
    """The end of a comparison: a line for each prompt, if they are few, and one for all."""
    columns = ("tokens", *WAYS, "speedup", "MAT", "identical")
    right = (Column(name, justify="right", no_wrap=True) for name in columns)
    table = Table(Column("prompt", no_wrap=True, max_width=17), *right, box=SIMPLE, padding=(0, 1, 0, 0))
    for row in rows if 1 < len(rows) <= ROWS else ():
        table.add_row(*_cells(row["name"].removesuffix(".txt"), row, row["stats"]["mat"], row["stats"]["tokens"]))
    table.add_section()
    tokens = sum(row["stats"]["tokens"] for row in rows)
    table.add_row(*_cells(f"all {summary['prompts']}", summary, summary["mat"], tokens))
    console.print(table)
    say(console, "tokens/s of decoding; plain: transformers' generate, lookup: its prompt lookup of 10 tokens")
    say(console, "speedup: end to end over plain, prefill included")
    lines = [("model", summary["model"]), ("drafter", summary["drafter"])]
    if summary["unanswered"]:
        lines.append(("left out", f"speeds of {summary['unanswered']} prompts with {_NO_ANSWER}"))
    if summary["fastest"]:
        lines.append(("fastest", _fastest(summary)))
    if summary.get("bfloat16"):
        lines.append(
            (
                "bfloat16",
                f"{summary['bfloat16']:.2f} times as fast recycled as float32; texts may part where candidates tie",
            )
        )
    for name, value in lines:
        say(console, f"{name + ':':<9} {value}")
    say(console, f"identical: {_yes(summary['identical'])}", "bold")


def _ways(measured: dict[str, Any]) -> list[str]:
    """The ways that were measured."""
    return [way for way in WAYS if measured[way] is not None]


def _fastest(summary: dict[str, Any]) -> str:
    first = summary["fastest"]
    rates = {way: _end_to_end(summary[way]) for way in _ways(summary)}
    others = [f"{rates[first] / rate:.2f}x {way}" for way, rate in rates.items() if way != first]
    return f"{first}, {', '.join(others)}"


def _cells(name: str, measured: dict[str, Any], mat: float, tokens: int) -> list[Text]:
    speedup = "-" if measured["speedup"] is None else f"{measured['speedup']:.2f}"
    rates = [_rate(measured[way]) for way in WAYS]
    return [Text(cell) for cell in (name, f"{tokens:,}", *rates, speedup, f"{mat:.2f}", _yes(measured["identical"]))]


def _rate(speed: dict[str, Any] | None) -> str:
    return "-" if speed is None else f"{speed['tokens_per_second']:.1f}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
