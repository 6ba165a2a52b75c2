"""Allowed next tokens under a grammar: a JSON schema, a regular expression or a context-free grammar.

A `State` is an immutable position in a sequence, emitted or drafted. It wraps a library's matcher (see `adapters`), so
that the nodes of a tree can be visited in any order. Cost: a microsecond per state, and a few microseconds for its mask
of allowed tokens; each is computed once. If a library fails, drafts ignore the grammar from that state on; the
processor of the call still constrains the output.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Protocol

import numpy as np

from .masks import unpacked

logger = logging.getLogger("token_recycling")

FEW = 32
"""Maximum number of allowed tokens that are enumerated."""


@contextmanager
def lost_drafts() -> Iterator[None]:
    """Log an error of a grammar library instead of raising it, since drafts are optional. Errors of compiled libraries
    may not derive from `Exception`.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        logger.warning("drafts no longer follow a grammar; the output still does: %s", str(error) or repr(error))


class Matcher(Protocol):
    """A library's state within a grammar; immutable."""

    def fill(self, mask: np.ndarray) -> None:
        """Set the bits of the allowed tokens in a zero mask (words,) int32, one bit per token, lowest first; no bit if
        no token may follow.
        """

    def after(self, token: int) -> Matcher | None:
        """Return the matcher after an allowed token; None if the output has ended."""

    @property
    def forced(self) -> str:
        """The characters that must follow, as far as the library can tell; their tokenization is undetermined."""


class State:
    """One position in a sequence: the allowed tokens, and the state after each."""

    def __init__(self, matcher: Matcher, words: int) -> None:
        """`words`: 32-bit words of a mask, one bit for each token of the vocabulary."""
        self._matcher, self._words = matcher, words
        self.lost = False
        """Whether the library failed here. If so, every token counts as allowed, and `after` returns None."""
        self._after: dict[int, State | None] = {}

    @cached_property
    def mask(self) -> np.ndarray:
        """(words,) int32: one bit per token, lowest first; set if the token is allowed."""
        mask = np.zeros(self._words, np.int32)
        self.lost = True
        with lost_drafts():
            self._matcher.fill(mask)
            self.lost = False
        if self.lost:
            mask.fill(-1)
        return mask

    @cached_property
    def few(self) -> tuple[int, ...] | None:
        """The allowed tokens, ascending; None if there are more than `FEW`."""
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
        """Whether there is no choice: at most one token is allowed."""
        return self.few is not None and len(self.few) < 2

    @cached_property
    def key(self) -> int:
        """A hash, equal for states with the same allowed tokens."""
        return hash(self.mask.tobytes() if self.few is None else self.few)

    @property
    def forced(self) -> str:
        """The characters that must follow, as far as the library can tell."""
        with lost_drafts():
            return "" if self.lost else self._matcher.forced
        return ""

    def allows(self, tokens: np.ndarray) -> np.ndarray:
        """Return whether each of the tokens (n,) is allowed, (n,) bool; False for ids beyond the mask."""
        inside = tokens < 32 * self._words
        tokens = np.where(inside, tokens, 0)
        return inside & (self.mask[tokens >> 5] >> (tokens & 31) & 1).astype(bool)

    def after(self, token: int) -> State | None:
        """Return the state after a token; None if the output has ended or the token is forbidden."""
        if token not in self._after:
            allowed, matcher = token < 32 * self._words and self.mask[token >> 5] >> (token & 31) & 1, None
            with lost_drafts():
                matcher = self._matcher.after(token) if allowed and not self.lost else None
            self._after[token] = None if matcher is None else State(matcher, self._words)
        return self._after[token]

    def masked(self, logits: np.ndarray) -> np.ndarray:
        """Return a copy of logits (vocabulary,) float32 with minus infinity for forbidden tokens."""
        masked = np.full_like(logits, -np.inf)
        np.copyto(masked, logits, where=unpacked(self.mask, len(logits)))
        return masked
