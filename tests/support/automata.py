"""A logits processor that constrains output to a finite automaton and exposes its states, without a grammar library."""

from __future__ import annotations

import random

import numpy as np
import torch
from transformers import LogitsProcessor

from token_recycling.grammar.state import State

Automaton = list[dict[int, int]]
"""For each state, the allowed tokens and the next state after each."""


class _Place:
    def __init__(self, automaton: Automaton, place: int) -> None:
        self._automaton, self._place = automaton, place

    def fill(self, mask: np.ndarray) -> None:
        bits = np.zeros(32 * len(mask), np.uint8)
        bits[[*self._automaton[self._place]]] = 1
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def after(self, token: int) -> _Place:
        return _Place(self._automaton, self._automaton[self._place][token])

    @property
    def forced(self) -> str:
        """The forced text, in the form of a grammar library: one character for each token without alternatives."""
        text, place = "", self._place
        while len(self._automaton[place]) == 1 and len(text) < 20:
            ((token, place),) = self._automaton[place].items()
            text += chr(65 + token)
        return text


class AutomatonProcessor(LogitsProcessor):
    """Allow the tokens of an automaton that starts in state 0 after the prompt; for one sequence."""

    def __init__(self, automaton: Automaton, vocab_size: int) -> None:
        self._automaton, self._vocab_size = automaton, vocab_size
        self._place, self._read = 0, 0

    def first_state(self) -> State | None:
        return None if self._read else State(_Place(self._automaton, 0), (self._vocab_size + 31) // 32)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for token in input_ids[0, self._read or input_ids.shape[1] :].tolist():
            self._place = self._automaton[self._place][token]
        self._read = input_ids.shape[1]
        allowed = torch.full_like(scores, -torch.inf)
        tokens = [*self._automaton[self._place]]
        allowed[:, tokens] = scores[:, tokens]
        return allowed


def random_automaton(seed: int, places: int = 12, vocab_size: int = 64) -> Automaton:
    """Return an automaton in which some states force a token, some allow a few, and some allow all."""
    draw = random.Random(seed)
    tokens = [draw.choice([1, 1, 1, 2, 5, 40, vocab_size]) for _ in range(places)]
    return [{token: draw.randrange(places) for token in draw.sample(range(vocab_size), number)} for number in tokens]
