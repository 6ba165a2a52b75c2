"""Decode one prompt in three ways and compare: whether the texts are equal, what each took, and how a person sees it.

Plain is transformers' own `model.generate`; lookup is the same with its own prompt lookup; recycled is the same call of
the accelerated model. All are timed from the call to the return, the prompt's forward included, as the benchmark times
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from transformers import PreTrainedModel

from .._util.device import memory
from .._util.text_stream import first_line
from ..bench.run.divergence import Divergence, first_divergence
from ..bench.run.outcome import Outcome
from ..bench.run.runners import DraftedRunner, Runner, TransformersRunner
from ..drafters._base import Drafter
from ..loop.stats import Stats
from .console import SEPARATOR, by_step, has_colours, say

WAYS = ("plain", "lookup", "recycled")
LOOKUP = {"prompt_lookup_num_tokens": 10}
"""Arguments of `generate` for transformers' prompt lookup, as its documentation sets them."""
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
    outcomes: dict[str, Outcome]
    """By way; without `lookup` where transformers has none for the model."""
    divergence: Divergence | None
    """Where the recycled text parts from the plain one."""
    answered: bool
    """False where the model ends the text at once: that is no speed."""

    @property
    def stats(self) -> Stats:
        """Of the recycled decoding."""
        stats = self.outcomes["recycled"].stats
        assert stats is not None
        return stats

    @property
    def tokens(self) -> list[int]:
        """Of the recycled decoding."""
        return self.outcomes["recycled"].tokens[0]

    @property
    def steps(self) -> list[list[int]]:
        """Tokens of the recycled decoding by step."""
        ends = accumulate(self.outcomes["recycled"].lengths or (), initial=0)
        return [self.tokens[start:end] for start, end in pairwise(ends)]

    @property
    def identical(self) -> bool:
        return self.divergence is None

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        divergence = self.divergence and asdict(self.divergence)
        if divergence:
            del divergence["between"]
        return {
            "name": self.name,
            "steps": self.steps,
            "identical": self.identical,
            "answered": self.answered,
            "divergence": divergence,
            **speeds([self]),
            "stats": self.stats.as_dict(),
        }


def why_no_lookup(model: PreTrainedModel, arguments: dict[str, Any]) -> str | None:
    """Why transformers' prompt lookup cannot decode with this model, or None if it can: it is tried."""
    try:
        TransformersRunner(model, LOOKUP).generate(arguments)
    except Exception as error:  # whatever it is, the other two ways are compared
        return first_line(error)
    return None


def compare(
    model: PreTrainedModel,
    arguments: dict[str, Any],
    drafter: Drafter,
    turn: int = 0,
    name: str = "",
    prompt: str = "",
    lookup: bool = True,
    on_way: Callable[[], Any] = lambda: None,
) -> SideBySide:
    """Decodes in all ways with the same `arguments` of `model.generate`, beginning with another way each `turn`.

    `name` and `prompt` label the result; `on_way` is called after each way.
    """
    runners: dict[str, Runner] = {
        "plain": TransformersRunner(model, {}),
        "lookup": TransformersRunner(model, LOOKUP),
        "recycled": DraftedRunner(model, drafter, time_parts=False),
    }
    outcomes = {}
    for place in range(len(WAYS)):
        way = WAYS[(turn + place) % len(WAYS)]
        if lookup or way != "lookup":
            outcomes[way] = runners[way].generate(arguments)
        on_way()
    plain, recycled = outcomes["plain"], outcomes["recycled"]
    divergence = first_divergence(model, plain.prompts[0], plain.tokens[0], recycled.tokens[0])
    eos = model.generation_config.eos_token_id
    ends = set(eos if isinstance(eos, list) else [eos])
    return SideBySide(name, prompt, outcomes, divergence, answered=not ends.issuperset(plain.tokens[0]))


def speeds(found: Sequence[SideBySide]) -> dict[str, Any]:
    """Return for each way the tokens and seconds of whole calls and the tokens per second of decoding, the end-to-end
    speedup over plain decoding, and the way that is fastest end to end; None for what was not measured. Prompts without
    an answer are left out.
    """
    answers = [one for one in found if one.answered]
    ways = {way: _speed([one.outcomes[way] for one in answers if way in one.outcomes]) for way in WAYS}
    rates = {way: _end_to_end(speed) for way, speed in ways.items() if speed is not None}
    return {
        **ways,
        "speedup": rates["recycled"] / rates["plain"] if rates else None,
        "fastest": max(rates, key=lambda way: rates[way]) if rates else None,
    }


def _speed(outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    if not outcomes:
        return None
    tokens, decoding = sum(len(one.tokens[0]) for one in outcomes), sum(one.seconds for one in outcomes)
    decoded = tokens - sum(one.first_tokens for one in outcomes)
    return {
        "tokens": tokens,
        "seconds": sum(one.total_seconds for one in outcomes),
        "tokens_per_second": decoded / decoding if decoded else 0.0,
    }


def _end_to_end(speed: dict[str, Any]) -> float:
    """Return the tokens per second of whole calls."""
    return speed["tokens"] / speed["seconds"]


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


def in_bfloat16(
    model: PreTrainedModel,
    warming: dict[str, Any],
    prompts: Sequence[dict[str, Any]],
    drafter: Drafter,
    found: Sequence[SideBySide],
) -> float | None:
    """How many times as fast the first prompts are recycled by the model in bfloat16 as they were; None if none of them
    has an answer. `warming` and `prompts` are arguments of `model.generate`.
    """
    runner = DraftedRunner(model, drafter, time_parts=False)
    runner.generate(warming)
    answered = [(arguments, one) for arguments, one in zip(prompts, found, strict=False) if one.answered]
    speed = _speed([runner.generate(arguments) for arguments, _ in answered])
    before = _speed([one.outcomes["recycled"] for _, one in answered])
    return _end_to_end(speed) / _end_to_end(before) if speed and before else None


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
    if found.divergence is not None:
        say(console, f"differs: {found.divergence}")
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
