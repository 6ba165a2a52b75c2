"""Plain and recycled decoding of the same prompt: the same text or not, and what each took.

Plain is transformers' own `model.generate`; recycled is the same call of the accelerated model. Both are timed from the
call to the return, the prompt's forward included.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from transformers import PreTrainedModel

from ..drafter import Drafter
from ..hf.accelerate import accelerated
from ..model.architectures import UnsupportedModelError
from ..stats import Stats
from ..text_stream import StepRecorder


@dataclass(frozen=True)
class Run:
    """One decoding."""

    tokens: list[int]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second, the prompt's time included."""
        return len(self.tokens) / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """As plain numbers."""
        return {
            "tokens": len(self.tokens),
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass(frozen=True)
class Divergence:
    """Where two texts part."""

    position: int
    """Index of the first token that differs, counted from the end of the prompt."""
    plain: int | None
    recycled: int | None
    """The two tokens there; None where a text has ended."""
    margin: float
    """The model's largest logit there minus its second largest; where they nearly tie, rounding decides."""

    def __str__(self) -> str:
        return (
            f"token {self.position} is {self.plain} plain and {self.recycled} recycled, "
            f"where the model's best two logits are {self.margin:.3g} apart"
        )


@dataclass(frozen=True)
class Comparison:
    """Both decodings of one prompt."""

    name: str
    prompt: str
    plain: Run
    recycled: Run
    steps: list[list[int]]
    stats: Stats
    divergence: Divergence | None

    @property
    def identical(self) -> bool:
        return self.divergence is None

    @property
    def speedup(self) -> float:
        return self.recycled.tokens_per_second / self.plain.tokens_per_second

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "name": self.name,
            "steps": self.steps,
            "identical": self.identical,
            "divergence": None if self.divergence is None else vars(self.divergence),
            "plain": self.plain.as_dict(),
            "recycled": self.recycled.as_dict(),
            "speedup": self.speedup,
            "stats": self.stats.as_dict(),
        }


def compare(
    model: PreTrainedModel,
    arguments: dict[str, Any],
    drafter: Drafter,
    plain_first: bool,
    name: str = "",
    prompt: str = "",
) -> Comparison:
    """Decodes both ways with the same `arguments` of `model.generate`; `name` and `prompt` label the result."""
    if plain_first:
        plain = run_plain(model, arguments)
    recycled, steps, stats = run_recycled(model, arguments, drafter)
    if not plain_first:
        plain = run_plain(model, arguments)
    divergence = first_divergence(model, arguments["input_ids"], plain.tokens, recycled.tokens)
    return Comparison(name, prompt, plain, recycled, steps, stats, divergence)


def run_plain(model: PreTrainedModel, arguments: dict[str, Any]) -> Run:
    """transformers' own decoding."""
    return _timed(model, arguments)


def run_recycled(
    model: PreTrainedModel, arguments: dict[str, Any], drafter: Drafter
) -> tuple[Run, list[list[int]], Stats]:
    """The accelerated decoding, its tokens by step, and its statistics."""
    recorder = StepRecorder()
    with accelerated(model, drafter) as acceleration:
        run = _timed(model, {**arguments, "streamer": recorder})
        if acceleration.fallback is not None:
            raise UnsupportedModelError(acceleration.fallback)
    return run, recorder.steps, acceleration.stats


def _timed(model: PreTrainedModel, arguments: dict[str, Any]) -> Run:
    _wait(model.device)
    start = time.perf_counter()
    sequence = model.generate(**arguments)
    _wait(model.device)
    seconds = time.perf_counter() - start
    return Run(sequence[0, arguments["input_ids"].shape[1] :].tolist(), seconds)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@torch.no_grad()
def first_divergence(
    model: PreTrainedModel, prompt: torch.Tensor, plain: list[int], recycled: list[int]
) -> Divergence | None:
    """Where the two texts after `prompt` (1, length) part, or None if they do not."""
    for position, (one, other) in enumerate(zip_longest(plain, recycled)):
        if one != other:
            before = torch.cat([prompt, prompt.new_tensor([plain[:position]])], dim=1)
            best, second = model(input_ids=before).logits[0, -1].float().topk(2).values.tolist()
            return Divergence(position, one, other, best - second)
    return None


def summary(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """All prompts together, as plain numbers: total tokens over total time on both sides."""
    plain, recycled = (
        Run([token for run in runs for token in run.tokens], sum(run.seconds for run in runs))
        for runs in ([one.plain for one in comparisons], [one.recycled for one in comparisons])
    )
    stats = sum((one.stats for one in comparisons), Stats())
    return {
        "prompts": len(comparisons),
        "drafter": stats.drafter,
        "plain": plain.as_dict(),
        "recycled": recycled.as_dict(),
        "speedup": recycled.tokens_per_second / plain.tokens_per_second,
        "mat": stats.mat,
        "identical": all(one.identical for one in comparisons),
    }
