"""Decode one prompt in three ways and compare: whether the texts are equal, and what each took.

Plain is transformers' own `model.generate`; lookup is the same with its own prompt lookup; recycled is the same call of
the accelerated model. All are timed from the call to the return, the prompt's forward included, as the benchmark times
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

from transformers import PreTrainedModel

from ..bench.run.divergence import Divergence, first_divergence
from ..bench.run.outcome import Outcome
from ..bench.run.runners import DraftedRunner, Runner, TransformersRunner
from ..drafters._base import Drafter
from ..loop.stats import Stats
from ..model.loading import first_line

WAYS = ("plain", "lookup", "recycled")
LOOKUP = {"prompt_lookup_num_tokens": 10}
"""Arguments of `generate` for transformers' prompt lookup, as its documentation sets them."""


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
    """Tokens and seconds of each way, total tokens over total time, the speedup over plain decoding, and the fastest
    way; None for what was not measured. Prompts without an answer are left out.
    """
    answers = [one for one in found if one.answered]
    ways = {way: _speed([one.outcomes[way] for one in answers if way in one.outcomes]) for way in WAYS}
    rates = {way: speed["tokens_per_second"] for way, speed in ways.items() if speed is not None}
    return {
        **ways,
        "speedup": rates["recycled"] / rates["plain"] if rates else None,
        "fastest": max(rates, key=lambda way: rates[way]) if rates else None,
    }


def _speed(outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    if not outcomes:
        return None
    tokens, seconds = sum(len(one.tokens[0]) for one in outcomes), sum(one.total_seconds for one in outcomes)
    return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}


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
