"""From outcomes to rows: one line of JSON for a method and a prompt, whatever the number of repeats and turns.

`docs/benchmark.md` lists the keys. Counts are those of the repeat whose whole call took the median time; all repeats
must have given the same text as the baseline to count as identical.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ...stats import Stats
from ...tree import RankPath
from .courses import Contender, Course, Item
from .outcome import Outcome
from .prompts import Setup
from .repetition import in_loops, repeated_4grams

VERSION = 1
_MOST_PATHS = 500
Attempt = list[Outcome]
"""One decoding of an item: an outcome for each turn."""

_MEASUREMENTS = (
    *("prompt_tokens", "tokens", "steps", "mat", "loop_tokens", "loop_steps", "repeated_4grams"),
    *("seconds", "prefill_seconds", "total_seconds", "parts", "drafted", "discarded"),
    *("lengths", "nodes", "tried", "accepted", "paths", "identical", "divergence"),
)


def row(
    setup: Setup,
    course: Course,
    contender: Contender,
    item: Item,
    attempts: Sequence[Attempt | Exception],
    baseline: Attempt | Exception | None,
    environment: dict[str, Any],
) -> dict[str, Any]:
    """One row; `attempts` has every repeat, `baseline` what the output is to equal, if anything."""
    sampled = contender.temperature > 0
    failure = next((one for one in attempts if isinstance(one, Exception)), None)
    found: dict[str, Any] = {
        "version": VERSION,
        "mode": course.mode,
        "study": course.study,
        "point": contender.point,
        "method": contender.method.spec,
        "label": contender.method.label,
        "prompt": item.name,
        "category": item.category,
        "batch": item.size,
        **dict.fromkeys(_MEASUREMENTS),
        "failure": None if failure is None else f"{type(failure).__name__}: {' '.join(str(failure).split())}",
        "temperature": contender.temperature,
        "max_new_tokens": setup.max_new_tokens,
        "seed": setup.seed if sampled else None,
        "environment": environment,
    }
    done = [one for one in attempts if not isinstance(one, Exception)]
    if failure is None:
        found.update(_measured(done))
        if isinstance(baseline, list) and not sampled and course.baseline(contender) != contender:
            divergence = next(filter(None, (_divergence(setup.model, baseline, one) for one in done)), None)
            found.update(identical=divergence is None, divergence=divergence)
    return found


def total_seconds(attempt: Attempt) -> float:
    """Of all turns."""
    return sum(outcome.total_seconds for outcome in attempt)


def _measured(attempts: Sequence[Attempt]) -> dict[str, Any]:
    median = sorted(attempts, key=total_seconds)[(len(attempts) - 1) // 2]
    texts = [text for outcome in median for text in outcome.tokens]
    tokens, steps = sum(map(len, texts)), sum(outcome.steps for outcome in median)
    return {
        "prompt_tokens": sum(len(prompt) for outcome in median for prompt in outcome.prompts),
        "tokens": tokens,
        "steps": steps,
        "mat": tokens / steps,
        **_loops(median),
        "repeated_4grams": repeated_4grams(texts),
        "seconds": [sum(outcome.seconds for outcome in one) for one in attempts],
        "prefill_seconds": [sum(outcome.prefill_seconds for outcome in one) for one in attempts],
        "total_seconds": [total_seconds(one) for one in attempts],
        **_drafting(median),
    }


def _loops(attempt: Attempt) -> dict[str, int]:
    """Nothing for batches, where it is not known which step emitted which token."""
    loop_tokens = loop_steps = 0
    for outcome in attempt:
        if outcome.lengths is None:
            return {}
        tokens, steps = in_loops(outcome.tokens[0], outcome.lengths)
        loop_tokens += tokens
        loop_steps += steps
    return {"loop_tokens": loop_tokens, "loop_steps": loop_steps}


def _drafting(attempt: Attempt) -> dict[str, Any]:
    """What only our own loop counts; of others the lengths of their steps."""
    counted = [outcome.stats for outcome in attempt if outcome.stats is not None]
    if not counted:
        lengths = [length for outcome in attempt for length in outcome.lengths or ()]
        return {"lengths": {str(one): lengths.count(one) for one in sorted(set(lengths))} or None}
    stats = sum(counted, Stats())
    return {
        "parts": stats.seconds,
        "drafted": stats.drafted,
        "discarded": stats.discarded,
        "lengths": {str(length): count for length, count in sorted(stats.lengths.items())},
        "nodes": {str(nodes): count for nodes, count in sorted(stats.nodes.items())},
        "tried": [[*place, count] for place, count in sorted(stats.tried.items())],
        "accepted": [[*place, count] for place, count in sorted(stats.accepted.items())],
        "paths": _paths(attempt),
    }


def _paths(attempt: Attempt) -> list[list[Any]] | None:
    """Tried and accepted nodes by rank path, those tried most first; trees that change have very many."""
    tried, accepted = Counter[RankPath](), Counter[RankPath]()
    for outcome in attempt:
        for path, counts in (outcome.paths or {}).items():
            tried[path] += counts[0]
            accepted[path] += counts[1]
    most = tried.most_common(_MOST_PATHS)
    return [[".".join(map(str, path)), count, accepted[path]] for path, count in most] or None


def _divergence(model: PreTrainedModel, baseline: Attempt, attempt: Attempt) -> dict[str, Any] | None:
    """Where the first differing turn, or text of a batch, parts from the baseline's."""
    for turn, (wanted, found) in enumerate(zip(baseline, attempt, strict=True)):
        for place, (prompt, one, other) in enumerate(zip(wanted.prompts, wanted.tokens, found.tokens, strict=True)):
            if one != other:
                return {"turn": turn if len(wanted.tokens) == 1 else place, **_parting(model, prompt, one, other)}
    return None


@torch.no_grad()
def _parting(model: PreTrainedModel, prompt: torch.Tensor, expected: list[int], got: list[int]) -> dict[str, Any]:
    """The first place where two texts after `prompt` (length,) differ, and how far apart the model's logits of the two
    tokens are there; where one text has ended there is no token and no margin.
    """
    pairs = zip([*expected, None], [*got, None], strict=False)
    place, (one, other) = next((place, pair) for place, pair in enumerate(pairs) if pair[0] != pair[1])
    margin = None
    if one is not None and other is not None:
        text = torch.cat([prompt, prompt.new_tensor(expected[:place])])
        logits = model(input_ids=text[None].to(model.device), use_cache=False).logits[0, -1].float()
        margin = float(logits[one] - logits[other])
    return {"place": place, "margin": margin, "expected": one, "got": other}
