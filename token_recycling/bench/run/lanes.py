"""Methods at work: one prompt after another through `model.generate`, with the same call and the same clock.

All lanes time whole calls, from the call to the return, with the device waited for at both ends. Within them the
prompt's time is told apart: our loop says it; for transformers' methods it is the time to the end of the first forward
pass, which emits the first tokens too. So their steps are all their forward passes, and their time of decoding lacks
that of one of them. On an accelerator our loop waits after every part of a step, which costs it a little.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ...drafter import Drafter
from ...hf.accelerate import accelerated
from ...model.architectures import UnsupportedModelError
from .outcome import Outcome, wait
from .replay import replay


class Lane(Protocol):
    """A method at work on one model."""

    def generate(self, arguments: dict[str, Any]) -> Outcome:
        """Decodes with these arguments of `model.generate`."""

    def replay(self, prompt: torch.Tensor, text: torch.Tensor) -> Outcome:
        """Decodes `text` (length,) after `prompt` (length,) as if the model had chosen it."""


@dataclass
class DraftedLane:
    """A drafter in our loop; what it learns stays from prompt to prompt."""

    model: PreTrainedModel
    drafter: Drafter

    def generate(self, arguments: dict[str, Any]) -> Outcome:
        recorder = None if len(arguments["input_ids"]) > 1 else _StepLengths()
        with accelerated(self.model, self.drafter) as acceleration:
            acceleration.stats.synchronize = True
            sequences, seconds = _timed(self.model, {**arguments, "streamer": recorder})
            stats = acceleration.stats
            if acceleration.fallback is not None:
                raise UnsupportedModelError(f"left to transformers: {acceleration.fallback}")
        tokens = _emitted(self.model, sequences, arguments)
        return Outcome(
            prompts=_prompts(arguments),
            tokens=tokens,
            lengths=recorder.lengths if recorder else None,
            steps=stats.steps,
            prefill_seconds=stats.prefill_seconds,
            seconds=stats.decode_seconds,
            total_seconds=seconds,
            stats=stats,
        )

    def replay(self, prompt: torch.Tensor, text: torch.Tensor) -> Outcome:
        return replay(self.model, self.drafter, prompt, text)


@dataclass
class TransformersLane:
    """transformers' own decoding with `more` arguments of `generate`; nothing stays."""

    model: PreTrainedModel
    more: dict[str, Any]

    def generate(self, arguments: dict[str, Any]) -> Outcome:
        # Every step of plain decoding emits one token for each text; what others emit a streamer is told.
        recorder = _StepLengths() if self.more else None
        call = {**arguments, **self.more, "streamer": recorder}
        with _FirstForward(self.model) as first:
            sequences, seconds = _timed(self.model, call)
        tokens = _emitted(self.model, sequences, arguments)
        if recorder is not None:
            lengths, steps = recorder.lengths, len(recorder.lengths)
        else:
            lengths, steps = [1] * len(tokens[0]), sum(map(len, tokens))
        return Outcome(
            prompts=_prompts(arguments),
            tokens=tokens,
            lengths=lengths if len(tokens) == 1 else None,
            steps=steps,
            prefill_seconds=first.ended - first.began,
            seconds=seconds - (first.ended - first.began),
            total_seconds=seconds,
            stats=None,
        )

    def replay(self, prompt: torch.Tensor, text: torch.Tensor) -> Outcome:
        raise AssertionError("transformers' own decoding chooses its tokens itself")


class _FirstForward:
    """Takes the time at the end of the model's first forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __enter__(self) -> _FirstForward:
        self._handle = self.model.register_forward_hook(self._passed)
        self.began = time.perf_counter()
        return self

    def _passed(self, *_: Any) -> None:
        self._handle.remove()
        wait(self.model.device)
        self.ended = time.perf_counter()

    def __exit__(self, *_: Any) -> None:
        self._handle.remove()


class _StepLengths(BaseStreamer):
    """Told by `generate` of the tokens of every step: how many there were."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self._prompt_came = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_came:
            self.lengths.append(value.numel())
        self._prompt_came = True

    def end(self) -> None:
        """There is nothing to do."""


def _timed(model: PreTrainedModel, arguments: dict[str, Any]) -> tuple[torch.Tensor, float]:
    wait(model.device)
    began = time.perf_counter()
    sequences = model.generate(**arguments)
    wait(model.device)
    return sequences, time.perf_counter() - began


def _prompts(arguments: dict[str, Any]) -> list[torch.Tensor]:
    """The prompts of the rows, without padding."""
    rows = zip(arguments["input_ids"], arguments["attention_mask"], strict=True)
    return [ids[mask.bool()] for ids, mask in rows]


def _emitted(model: PreTrainedModel, sequences: torch.Tensor, arguments: dict[str, Any]) -> list[list[int]]:
    """The new tokens of every row, up to and with its end of sequence."""
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    rows = []
    for row in sequences[:, arguments["input_ids"].shape[1] :].tolist():
        end = next((place for place, token in enumerate(row) if token in ends), len(row))
        rows.append(row[: end + 1])
    return rows
