"""Stop strings: where a text ends, and what of it is shown.

transformers' own criterion (`StopStringCriteria`) makes a table of the whole vocabulary for every list of stop strings:
2 seconds for 16 of 128 characters and a vocabulary of 8,192. It keeps the table for later requests with that list, so
that one client's request shows in the time of another. Here the text is read as it grows, some 20 microseconds a
token, and nothing is kept.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, Field, StringConstraints
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from .._util.text_stream import IncrementalText


def _stop_list(value: Any) -> Any:
    """Return stop strings as a list without empty ones, which clients send for none."""
    stops = [value] if isinstance(value, str) else value
    return [stop for stop in stops if stop != ""] if isinstance(stops, list) else stops


Stops = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=128)]],
    BeforeValidator(_stop_list),
    Field(max_length=16),
]
"""Stop strings as clients give them: a list, or one."""


class StopTrimmer:
    """Cuts a text that comes in pieces before the first stop string, or after it with `include`."""

    def __init__(self, stop: Sequence[str], include: bool = False) -> None:
        self._stop, self._include, self._held = stop, include, ""
        self.matched: str | None = None
        """The stop string that came."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string came."""
        return self.matched is not None

    def push(self, piece: str) -> str:
        """The text that is safe to send with this piece; an end that may begin a stop string is held back."""
        if self.stopped:
            return ""
        self._held += piece
        places = [(place, stop) for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if places:
            place, self.matched = min(places)
            safe, self._held = self._held[: place + len(self.matched) * self._include], ""
            return safe
        cut = len(self._held) - max((_overlap(self._held, stop) for stop in self._stop), default=0)
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


def raw_text(tokenizer: PreTrainedTokenizerBase) -> IncrementalText:
    """A text as it grows, with special tokens as they are written."""

    def decode(tokens: list[int], **options: Any) -> str:
        return tokenizer.decode(tokens, **{**options, "skip_special_tokens": False})

    return IncrementalText(SimpleNamespace(decode=decode))


class StopsAtStrings(StoppingCriteria):
    """Ends one text, after its prompt of `prompt_tokens`, with the token that completes a stop string. Special tokens
    count as they are written: a stop string may be one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], prompt_tokens: int) -> None:
        self._text, self._trimmer = raw_text(tokenizer), StopTrimmer(stop)
        self._read = prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._trimmer.push(self._text.push(input_ids[0, self._read :].tolist()))
        self._read = input_ids.shape[1]
        return torch.tensor([self._trimmer.stopped], device=input_ids.device)


def with_own_stopping(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` for one text, where stop strings are a criterion of ours."""
    config = copy.copy(arguments["generation_config"])
    if not config.stop_strings:
        return arguments
    stops = StopsAtStrings(arguments["tokenizer"], config.stop_strings, arguments["input_ids"].shape[-1])
    config.stop_strings = None
    return {**arguments, "generation_config": config, "stopping_criteria": StoppingCriteriaList([stops])}
