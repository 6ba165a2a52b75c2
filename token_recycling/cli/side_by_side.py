"""Plain and recycled decoding of the same prompt: the same text or not, and what each took.

Plain is transformers' own `model.generate`; recycled is the same call of the accelerated model. Both are timed from the
call to the return, the prompt's forward included, as the benchmark times them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

from transformers import PreTrainedModel

from ..bench.run.divergence import Divergence, first_divergence
from ..bench.run.outcome import Outcome
from ..bench.run.runners import DraftedRunner, TransformersRunner
from ..drafters._base import Drafter
from ..loop.stats import Stats


@dataclass(frozen=True)
class SideBySide:
    """Both decodings of one prompt."""

    name: str
    prompt: str
    plain: Outcome
    recycled: Outcome
    divergence: Divergence | None

    @property
    def stats(self) -> Stats:
        """Of the recycled decoding."""
        assert self.recycled.stats is not None
        return self.recycled.stats

    @property
    def steps(self) -> list[list[int]]:
        """Tokens of the recycled decoding by step."""
        ends = accumulate(self.recycled.lengths or (), initial=0)
        return [self.recycled.tokens[0][start:end] for start, end in pairwise(ends)]

    @property
    def speeds(self) -> dict[str, Any]:
        """What both ways took, and the speedup."""
        return total_speeds([self])

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
            "divergence": divergence,
            **self.speeds,
            "stats": self.stats.as_dict(),
        }


def compare(
    model: PreTrainedModel,
    arguments: dict[str, Any],
    drafter: Drafter,
    plain_first: bool,
    name: str = "",
    prompt: str = "",
) -> SideBySide:
    """Decodes both ways with the same `arguments` of `model.generate`; `name` and `prompt` label the result."""
    ours, theirs = DraftedRunner(model, drafter, time_parts=False), TransformersRunner(model, {})
    if plain_first:
        plain = theirs.generate(arguments)
    recycled = ours.generate(arguments)
    if not plain_first:
        plain = theirs.generate(arguments)
    divergence = first_divergence(model, plain.prompts[0], plain.tokens[0], recycled.tokens[0])
    return SideBySide(name, prompt, plain, recycled, divergence)


def total_speeds(found: Sequence[SideBySide]) -> dict[str, Any]:
    """Tokens and time of both ways, and the speedup: total tokens over total time on both sides."""
    plain, recycled = _speed([one.plain for one in found]), _speed([one.recycled for one in found])
    speedup = recycled["tokens_per_second"] / plain["tokens_per_second"]
    return {"plain": plain, "recycled": recycled, "speedup": speedup}


def _speed(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    tokens, seconds = sum(len(one.tokens[0]) for one in outcomes), sum(one.total_seconds for one in outcomes)
    return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}


def summary(found: Sequence[SideBySide]) -> dict[str, Any]:
    """All prompts together, as plain numbers."""
    stats = sum((one.stats for one in found), Stats())
    return {
        "prompts": len(found),
        "drafter": stats.drafter,
        **total_speeds(found),
        "mat": stats.mat,
        "identical": all(one.identical for one in found),
    }
