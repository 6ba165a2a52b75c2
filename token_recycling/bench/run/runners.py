"""Runners decode one prompt after another by `model.generate`, with the same call and the same clock.

All time whole calls, with the device synchronized at both ends. The prefill is the time to the end of the first forward
pass, which emits the first tokens; our loop reports it. So steps are all forward passes, and decoding time lacks that
of the first. On an accelerator our loop synchronizes after every part of a step, which costs a little.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..._util.text_stream import StepRecorder
from ...cuda_graphs import Fast
from ...drafters._base import Drafter
from ...hf.accelerate import accelerated
from ...loop.hints import NO_HINTS, Hints
from ...model.info import UnsupportedModelError
from ...model.prefixes import PrefixCache, default_budget
from ...model.self_test import ready
from .outcome import Outcome, Stopwatch
from .replay import replay


@dataclass
class Runner:
    """A method on one model: it decodes prompts in turn and keeps what it learns."""

    model: PreTrainedModel

    def generate(self, arguments: dict[str, Any], hints: Hints = NO_HINTS) -> Outcome:
        """Decode with these arguments of `model.generate`."""
        raise NotImplementedError

    def hints(self, prediction: torch.Tensor | None, turns: int) -> Hints:
        """Return hints for a conversation of that many turns, with perhaps a predicted answer (n,)."""
        return NO_HINTS

    def replay(self, prompt: torch.Tensor, text: torch.Tensor) -> Outcome:
        """Decode `text` (length,) after `prompt` (length,) as if the model had chosen it."""
        raise AssertionError("transformers' own decoding chooses its tokens itself")


@dataclass
class DraftedRunner(Runner):
    """A drafter in our loop; it keeps what it learns from prompt to prompt."""

    drafter: Drafter
    time_parts: bool = True
    """Synchronize with the device after every part of a step, so that its times are true."""
    fast: Fast = "auto"
    """See `accelerate`."""

    def generate(self, arguments: dict[str, Any], hints: Hints = NO_HINTS) -> Outcome:
        recorder = None if len(arguments["input_ids"]) > 1 else StepRecorder()
        with accelerated(self.model, self.drafter, fast=self.fast) as acceleration:
            acceleration.stats.synchronize, acceleration.hints = self.time_parts, hints
            tokens, seconds, used = _generated(self.model, {**arguments, "streamer": recorder})
            stats = acceleration.stats
            if acceleration.fallback is not None:
                raise UnsupportedModelError(f"left to transformers: {acceleration.fallback}")
        return Outcome(
            prompts=_prompts(arguments),
            tokens=tokens,
            lengths=None if recorder is None else [len(step) for step in recorder.steps],
            steps=stats.steps,
            prefill_seconds=stats.prefill_seconds,
            seconds=stats.decode_seconds,
            total_seconds=seconds,
            processor_seconds=used,
            stats=stats,
        )

    def hints(self, prediction: torch.Tensor | None, turns: int) -> Hints:
        """Return the prediction, if the drafter takes one, and a prefix cache for later turns."""
        prefixes = None
        if turns > 1:
            target = ready(self.model)
            prefixes = PrefixCache(target, default_budget(target)).of("")
        return Hints(prefixes=prefixes, prediction=prediction if self.drafter.traits.predictions else None)

    def replay(self, prompt: torch.Tensor, text: torch.Tensor) -> Outcome:
        return replay(self.model, self.drafter, prompt, text)


@dataclass
class TransformersRunner(Runner):
    """transformers' own decoding with `more` arguments of `generate`; nothing is kept."""

    more: dict[str, Any]

    def generate(self, arguments: dict[str, Any], hints: Hints = NO_HINTS) -> Outcome:
        # Every step of plain decoding emits one token per sequence; other methods report theirs to a streamer.
        recorder = StepRecorder() if self.more else None
        prefill: list[float] = []

        def passed(*_: Any) -> None:
            hook.remove()
            prefill.append(watch.read()[0])

        hook = self.model.register_forward_hook(passed)
        try:
            watch = Stopwatch(self.model.device)
            tokens, seconds, used = _generated(self.model, {**arguments, **self.more, "streamer": recorder})
        finally:
            hook.remove()
        lengths = [1] * len(tokens[0]) if recorder is None else [len(step) for step in recorder.steps]
        return Outcome(
            prompts=_prompts(arguments),
            tokens=tokens,
            lengths=lengths if len(tokens) == 1 else None,
            steps=sum(map(len, tokens)) if recorder is None else len(lengths),
            prefill_seconds=prefill[0],
            seconds=seconds - prefill[0],
            total_seconds=seconds,
            processor_seconds=used,
            stats=None,
        )


def _generated(model: PreTrainedModel, arguments: dict[str, Any]) -> tuple[list[list[int]], float, float]:
    """Return the new tokens of every sequence, end of sequence included, elapsed and processor seconds."""
    watch = Stopwatch(model.device)
    sequences = model.generate(**arguments)
    seconds, used = watch.read()
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    rows = []
    for row in sequences[:, arguments["input_ids"].shape[1] :].tolist():
        end = next((place for place, token in enumerate(row) if token in ends), len(row))
        rows.append(row[: end + 1])
    return rows, seconds, used


def _prompts(arguments: dict[str, Any]) -> list[torch.Tensor]:
    """Return the prompts of all rows, without padding."""
    ids, mask = arguments["input_ids"], arguments.get("attention_mask")
    return list(ids) if mask is None else [one[seen.bool()] for one, seen in zip(ids, mask, strict=True)]
