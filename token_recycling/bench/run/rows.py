"""Rows: one line of JSON per method and item, for all repetitions and turns.

`docs/benchmarks.md` lists the keys. Counts are those of the repetition with the median time; outputs are identical if
those of all repetitions equal the baseline's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from ...loop.stats import Stats
from ..row_format import VERSION
from .divergence import first_divergence
from .items import Item
from .outcome import Outcome
from .plan import Entry, Workload
from .prompts import BenchmarkConfig
from .repetition import in_loops, repeated_4grams

Repetition = list[Outcome]
"""One decoding of an item: an outcome per turn."""

_CLOCKS = ("seconds", "prefill_seconds", "total_seconds", "processor_seconds")
_MEASUREMENTS = (
    *("prompt_tokens", "tokens", "first_tokens", "steps", "mat", "loop_tokens", "loop_steps", "repeated_4grams"),
    *(*_CLOCKS, "turns", "last_prefill_seconds", "parts", "drafted", "discarded"),
    *("lengths", "nodes", "tried", "accepted", "identical", "divergence"),
)


def row(
    config: BenchmarkConfig,
    workload: Workload,
    entry: Entry,
    item: Item,
    repetitions: Sequence[Repetition | Exception],
    baseline: Repetition | Exception | None,
    environment: dict[str, Any],
) -> dict[str, Any]:
    """Return one row; `repetitions`: all repetitions; `baseline`: the outcome to compare with, if any."""
    sampled = entry.temperature > 0
    failure = next((one for one in repetitions if isinstance(one, Exception)), None)
    found: dict[str, Any] = {
        "version": VERSION,
        "mode": workload.mode,
        "method": entry.method.spec,
        "label": entry.method.label,
        "prompt": item.name,
        "category": item.category,
        "batch": item.size,
        **dict.fromkeys(_MEASUREMENTS),
        "failure": None if failure is None else f"{type(failure).__name__}: {' '.join(str(failure).split())}",
        "temperature": entry.temperature,
        "max_new_tokens": config.max_new_tokens,
        "seed": config.seed if sampled else None,
        "environment": environment,
    }
    done = [one for one in repetitions if not isinstance(one, Exception)]
    if failure is None:
        found.update(_measured(done))
        if isinstance(baseline, list) and not sampled and workload.baseline != entry:
            divergence = next(filter(None, (_divergence(config.model, baseline, one) for one in done)), None)
            found.update(identical=divergence is None, divergence=divergence)
    return found


def _measured(repetitions: Sequence[Repetition]) -> dict[str, Any]:
    median = sorted(repetitions, key=lambda one: _summed(one, "total_seconds"))[(len(repetitions) - 1) // 2]
    texts = [text for outcome in median for text in outcome.tokens]
    tokens, steps = sum(map(len, texts)), sum(outcome.steps for outcome in median)
    return {
        "prompt_tokens": sum(len(prompt) for outcome in median for prompt in outcome.prompts),
        "tokens": tokens,
        "first_tokens": sum(outcome.first_tokens for outcome in median),
        "steps": steps,
        "mat": tokens / steps,
        **_loops(median),
        "repeated_4grams": repeated_4grams(texts),
        **{clock: [_summed(one, clock) for one in repetitions] for clock in _CLOCKS},
        "turns": len(median),
        "last_prefill_seconds": [one[-1].prefill_seconds for one in repetitions],
        **_drafting(median),
    }


def _summed(repetition: Repetition, clock: str) -> float:
    return sum(getattr(outcome, clock) for outcome in repetition)


def _loops(repetition: Repetition) -> dict[str, int]:
    """Return loop counts; none for batches, where tokens are not known by step."""
    known = [(outcome.tokens[0], outcome.lengths) for outcome in repetition if outcome.lengths is not None]
    if len(known) < len(repetition):
        return {}
    found = [in_loops(tokens, lengths) for tokens, lengths in known]
    return {"loop_tokens": sum(tokens for tokens, _ in found), "loop_steps": sum(steps for _, steps in found)}


def _drafting(repetition: Repetition) -> dict[str, Any]:
    """Return counts of our own loop; of other decoding only the lengths of steps."""
    counted = [outcome.stats for outcome in repetition if outcome.stats is not None]
    if not counted:
        lengths = Counter(length for outcome in repetition for length in outcome.lengths or ())
        return {"lengths": _by_number(lengths) or None}
    stats = sum(counted, Stats())
    return {
        "parts": stats.seconds,
        "drafted": stats.drafted,
        "discarded": stats.discarded,
        "lengths": _by_number(stats.lengths),
        "nodes": _by_number(stats.nodes),
        "tried": [[*place, count] for place, count in sorted(stats.tried.items())],
        "accepted": [[*place, count] for place, count in sorted(stats.accepted.items())],
    }


def _by_number(counts: Counter[int]) -> dict[str, int]:
    return {str(number): count for number, count in sorted(counts.items())}


def _divergence(model: PreTrainedModel, baseline: Repetition, repetition: Repetition) -> dict[str, Any] | None:
    """Return the first divergence from the baseline in any turn, or sequence of a batch."""
    for turn, (wanted, found) in enumerate(zip(baseline, repetition, strict=True)):
        for place, texts in enumerate(zip(wanted.prompts, wanted.tokens, found.tokens, strict=True)):
            divergence = first_divergence(model, *texts)
            if divergence is not None:
                return {
                    "turn": turn if len(wanted.tokens) == 1 else place,
                    "place": divergence.position,
                    "margin": divergence.between,
                    "expected": divergence.expected,
                    "got": divergence.got,
                }
    return None
