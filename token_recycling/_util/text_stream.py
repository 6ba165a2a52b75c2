"""From steps to text: what a terminal or a server shows while tokens arrive, several at once.

A token may be a part of a character, and some tokenizers put a space only between tokens, so that a piece of text is
the difference of two decodings, held back while it ends inside a character. The pieces put together are the decoding of
all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Decodes(Protocol):
    """A tokenizer, as far as it makes text of ids."""

    def decode(self, token_ids: Any, **options: Any) -> str: ...


class IncrementalText:
    """Decodes tokens as they come; each call decodes the last few tokens only."""

    def __init__(self, tokenizer: Decodes) -> None:
        self.tokenizer = tokenizer
        self._tokens: list[int] = []
        self._context = 0
        self._shown = 0
        self._wanted = 0
        """Number of tokens after those shown before which they are not decoded again."""

    def push(self, tokens: Iterable[int]) -> str:
        """The text that is complete with these tokens; empty while a character is not."""
        self._tokens += tokens
        unshown = len(self._tokens) - self._shown
        if unshown < self._wanted:
            return ""
        text = self._pending()
        if not text or text.endswith(_INCOMPLETE):
            # A character takes a few tokens. Long runs of bytes that make none are not decoded with every token.
            self._wanted = unshown + unshown // 16
            return ""
        self._wanted = 0
        # The tokens shown last stay as context, because what a token reads like may depend on the one before.
        self._context, self._shown = self._shown, len(self._tokens)
        return text

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        text = self._pending()
        self._context, self._shown = self._shown, len(self._tokens)
        return text

    def _pending(self) -> str:
        before = decoded(self.tokenizer, self._tokens[self._context : self._shown])
        return decoded(self.tokenizer, self._tokens[self._context :])[len(before) :]


def decoded(tokenizer: Decodes, tokens: list[int]) -> str:
    """Tokens as text, without special tokens and with the spaces as they are."""
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def pieces(tokenizer: Decodes, steps: Iterable[list[int]]) -> list[str]:
    """The text that each step added; put together they are the text of all tokens."""
    text = IncrementalText(tokenizer)
    texts = [text.push(tokens) for tokens in steps]
    return [*texts[:-1], texts[-1] + text.flush()] if texts else []


class StepRecorder:
    """A streamer for `model.generate(streamer=...)`: keeps the tokens of every step, and hands them on as they come."""

    def __init__(self, on_step: Callable[[list[int]], None] | None = None) -> None:
        self.steps: list[list[int]] = []
        self._on_step = on_step
        self._prompt_came = False

    @property
    def tokens(self) -> list[int]:
        """All tokens so far, the prompt left out."""
        return [token for step in self.steps for token in step]

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate`: with the prompt first, then with the tokens of each step."""
        if not self._prompt_came:
            self._prompt_came = True
            return
        self.steps.append(value.flatten().tolist())
        if self._on_step is not None:
            self._on_step(self.steps[-1])

    def end(self) -> None:
        """Called by `generate` after the last step; there is nothing to do."""


def one_line(text: object) -> str:
    """A text without line breaks and repeated spaces, as for an error message."""
    return " ".join(str(text).split())


def first_line(error: Exception) -> str:
    """The first line of an error's message that is not empty, else its type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
