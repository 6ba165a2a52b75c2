"""What may follow a sequence of a given form: a JSON schema, a regular expression, a grammar.

A `State` is one place of a sequence, real or drafted, and never changes. Behind it stands the matcher of a library
(`loop.constraints` knows which), forked for every place: a microsecond, and another for the mask of the tokens that may
follow. So the places of a tree may be visited in any order.
"""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import numpy as np

FEW = 32
"""Allowed tokens that are looked at one by one, at most."""


class Matcher(Protocol):
    """A library's place in a grammar; never changed."""

    def fill(self, mask: np.ndarray) -> None:
        """Fill in which tokens may follow: (words,) int32, a bit a token, the lowest first."""

    def after(self, token: int) -> Matcher | None:
        """The place after an allowed token; None where the sequence has ended."""

    @property
    def forced(self) -> str:
        """The characters that must follow, as far as the library says; they do not say in which tokens."""


class State:
    """One place of a sequence: which tokens may follow, and what state each leads to."""

    def __init__(self, matcher: Matcher, words: int) -> None:
        """`words`: 32-bit words of a mask, one bit for each token of the vocabulary."""
        self._matcher, self._words = matcher, words
        self._after: dict[int, State | None] = {}

    @cached_property
    def mask(self) -> np.ndarray:
        """(words,) int32: a bit a token, the lowest first; set if the token may follow."""
        mask = np.zeros(self._words, np.int32)
        self._matcher.fill(mask)
        return mask

    @cached_property
    def few(self) -> tuple[int, ...] | None:
        """The tokens that may follow, ascending; None if there are more than `FEW`."""
        words, tokens = self.mask.nonzero()[0].tolist(), list[int]()
        if len(words) > FEW:
            return None
        for word in words:
            bits = int(self.mask[word]) & 0xFFFFFFFF
            while bits:
                lowest = bits & -bits
                tokens.append(32 * word + lowest.bit_length() - 1)
                bits ^= lowest
        return tuple(tokens) if len(tokens) <= FEW else None

    @property
    def single(self) -> bool:
        """Whether there is no choice: one token may follow, or none, where a grammar has no way on."""
        return self.few is not None and len(self.few) < 2

    @cached_property
    def key(self) -> int:
        """The same for places where the same tokens may follow."""
        return hash(self.mask.tobytes() if self.few is None else self.few)

    @property
    def forced(self) -> str:
        """The characters that must follow, as far as the library says."""
        return self._matcher.forced

    def allows(self, tokens: np.ndarray) -> np.ndarray:
        """Which of the tokens (n,) may follow: (n,) bool. Those beyond the mask may not."""
        known = tokens < 32 * self._words
        tokens = np.where(known, tokens, 0)
        return known & (self.mask[tokens >> 5] >> (tokens & 31) & 1).astype(bool)

    def after(self, token: int) -> State | None:
        """The state after a token that may follow; None where the sequence has ended or the token may not."""
        if token not in self._after:
            allowed = token < 32 * self._words and self.mask[token >> 5] >> (token & 31) & 1
            matcher = self._matcher.after(token) if allowed else None
            self._after[token] = None if matcher is None else State(matcher, self._words)
        return self._after[token]

    def masked(self, logits: np.ndarray) -> np.ndarray:
        """A copy of logits (vocabulary,) float32 in which tokens that may not follow have minus infinity."""
        allowed = np.unpackbits(self.mask.view(np.uint8), bitorder="little")[: len(logits)]
        masked = np.full_like(logits, -np.inf)
        np.copyto(masked[: len(allowed)], logits[: len(allowed)], where=allowed.view(bool))
        return masked
