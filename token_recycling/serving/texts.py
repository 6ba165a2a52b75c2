"""The texts of a request: what the generating thread needs for each, and what it tells as tokens come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .logprobs import LogprobRecorder, Scored, scored_prompt


@dataclass
class Text:
    """One text to generate."""

    arguments: dict[str, Any]
    """Of `generate`."""
    seed: int | None = None
    recorder: LogprobRecorder | None = None
    """One of its processors, where log-probabilities are wanted."""
    scored_prompt: int | None = None
    """How many likeliest tokens are wanted for every token of the prompt; None: the prompt is not scored."""

    @property
    def prompt(self) -> torch.Tensor:
        """(1, length) ids."""
        return self.arguments["input_ids"]

    def prompt_scores(self, model: Any) -> list[Scored]:
        """The tokens of the prompt where they are wanted, scored; called in the thread that generates."""
        return [] if self.scored_prompt is None else scored_prompt(model, self.prompt, self.scored_prompt)


class TokenStreamer:
    """A streamer of `generate` that tells the tokens of every step, scored where the text has a recorder. `check` is
    called with every step, and raises where the text is to end.
    """

    def __init__(self, text: Text, tell: Callable[[list[Scored]], None], check: Callable[[], None]) -> None:
        self._text, self._tell, self._check = text, tell, check
        self._position: int | None = None

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate`: with the prompt first, then with the tokens of each step."""
        self._check()
        if self._position is None:
            self._position = value.shape[-1]
            return
        tokens, recorder, start = value.flatten().tolist(), self._text.recorder, self._position
        self._position += len(tokens)
        if recorder is None:
            self._tell([Scored(token) for token in tokens])
        else:
            self._tell([recorder.scored(start + place, token) for place, token in enumerate(tokens)])

    def end(self) -> None:
        """Called after the last step; there is nothing to do."""
