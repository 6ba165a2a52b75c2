"""Incremental detokenization: the text that a terminal or a server shows while tokens arrive, several at a time.

A token may be a part of a character, and some tokenizers put a space only between tokens. So a piece of text is the
difference of two decodings, held back while it ends inside a character. The concatenated pieces equal the decoding of
all tokens or, if the text continues another one, what they add to its decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Decodes(Protocol):
    """A tokenizer's interface for decoding ids."""

    def decode(self, token_ids: Any, **options: Any) -> str: ...


class IncrementalText:
    """Decodes tokens as they arrive; each call decodes only the last few tokens."""

    def __init__(self, tokenizer: Decodes, before: Sequence[int] = ()) -> None:
        """`before`: the last tokens before the text, if it continues another one."""
        self.tokenizer = tokenizer
        text = decoded(tokenizer, [*before])
        self._tokens = [] if text.endswith(_INCOMPLETE) else [*before]
        self.at_start = not (text and self._tokens)
        """Whether the next token begins the text; SentencePiece then decodes no space before it."""
        self._context = 0
        self._shown = len(self._tokens)
        self._wanted = 0
        """Tokens are only decoded again once this many follow the emitted ones."""

    def push(self, tokens: Iterable[int]) -> str:
        """Return the text completed by these tokens; empty while a character is incomplete."""
        self._tokens += tokens
        unshown = len(self._tokens) - self._shown
        if unshown < self._wanted:
            return ""
        text = self._pending()
        if not text or text.endswith(_INCOMPLETE):
            # A character takes a few tokens. Long runs of bytes without a character are not decoded with every token.
            self._wanted = unshown + unshown // 16
            return ""
        self._wanted, self.at_start = 0, False
        # The tokens emitted last stay as context, because a token's text may depend on the preceding token.
        self._context, self._shown = self._shown, len(self._tokens)
        return text

    def flush(self) -> str:
        """Return the text held back, at the end of the output."""
        return self._pending()

    def _pending(self) -> str:
        before = decoded(self.tokenizer, self._tokens[self._context : self._shown])
        return decoded(self.tokenizer, self._tokens[self._context :])[len(before) :]


def decoded(tokenizer: Decodes, tokens: list[int]) -> str:
    """Return tokens as text, without special tokens and with spaces unchanged."""
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def pieces(tokenizer: Decodes, steps: Iterable[list[int]]) -> list[str]:
    """Return the text that each step adds; concatenated, they are the text of all tokens."""
    text = IncrementalText(tokenizer)
    texts = [text.push(tokens) for tokens in steps]
    return [*texts[:-1], texts[-1] + text.flush()] if texts else []


class StepRecorder:
    """A streamer for `model.generate(streamer=...)`: records the tokens of every step and passes them on."""

    def __init__(self, on_step: Callable[[list[int]], None] | None = None) -> None:
        self.steps: list[list[int]] = []
        self._on_step = on_step
        self._prompt_came = False

    @property
    def tokens(self) -> list[int]:
        """All tokens so far, the prompt excluded."""
        return [token for step in self.steps for token in step]

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate`: first with the prompt (1, length), then with the tokens of each step. Raises
        ValueError for several sequences.
        """
        if not self._prompt_came:
            if value.ndim > 1 and len(value) > 1:
                raise ValueError(f"one sequence can be recorded, got {len(value)}; leave num_return_sequences at 1")
            self._prompt_came = True
            return
        self.steps.append(value.flatten().tolist())
        if self._on_step is not None:
            self._on_step(self.steps[-1])

    def end(self) -> None:
        """Called by `generate` after the last step; there is nothing to do."""


def one_line(text: object) -> str:
    """Return a text without line breaks and repeated spaces, for an error message."""
    return " ".join(str(text).split())


def first_line(error: Exception) -> str:
    """Return the first non-empty line of an error's message, else its type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
