"""Tokenizers in llguidance's form: the bytes of every token.

llguidance itself converts byte-level tokenizers and SentencePiece tokenizers with byte fallback. This module converts
SentencePiece tokenizers without byte fallback.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_SPACE = "\u2581"
"""SentencePiece's character for a space."""


def vocabulary(tokenizer: PreTrainedTokenizerBase, size: int, stop: int | Sequence[int] | None) -> LLTokenizer:
    """Return the vocabulary of a model with `size` tokens and the end tokens `stop`. Cost: 0.1 s for 8,000 tokens.

    Raise ValueError without an end token, or for a tokenizer whose tokens do not correspond to fixed bytes.
    """
    from llguidance import LLTokenizer, TokenizerWrapper, hf

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        name = type(tokenizer).__name__
        raise ValueError(f"grammars need a tokenizer of the library `tokenizers`, got {name}; convert it to a fast one")
    listed = [] if stop is None else [stop] if isinstance(stop, int) else stop
    stops = [token for token in listed if 0 <= token < len(tokenizer)]
    if not stops:
        raise ValueError("the model has no end-of-sequence token; set its eos_token_id")
    size, kind = max(size, len(tokenizer)), type(backend.decoder).__name__
    if kind == "Metaspace":
        return LLTokenizer(TokenizerWrapper(_Pieces(tokenizer, size, stops[0])), n_vocab=size, eos_token=stops)
    try:
        return hf.from_tokenizer(tokenizer, n_vocab=size, eos_token=stops)
    except ValueError as error:
        raise ValueError(f"grammars are not supported with a tokenizer whose decoder is {kind}: {error}") from error


def special_tokens(tokenizer: PreTrainedTokenizerBase, llg_tokenizer: LLTokenizer) -> dict[str, int]:
    """Return the special tokens, which never occur in ordinary text, by their text."""
    added = tokenizer.added_tokens_decoder
    return {str(token): number for number, token in added.items() if llg_tokenizer.is_special_token(number)}


class _Pieces:
    """A tokenizer of text pieces, with a character for a space, in the interface that llguidance expects."""

    bos_token_id: int | None = None

    def __init__(self, tokenizer: Any, size: int, stop: int) -> None:
        self.eos_token_id = stop
        texts = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        self.tokens = [(text or "").replace(_SPACE, " ").encode() for text in texts] + [b""] * (size - len(texts))
        added = tokenizer.added_tokens_decoder.items()
        self.special_token_ids = sorted({stop, *(number for number, token in added if token.special)})
        special = {*self.special_token_ids}
        self._numbers = {text: number for number, text in enumerate(self.tokens) if text and number not in special}
        self._longest = max(map(len, self._numbers))

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokens of a text, greedily from left to right, the longest token first."""
        left, tokens = text.encode() if isinstance(text, str) else text, list[int]()
        while left:
            piece = next((left[:end] for end in range(self._longest, 0, -1) if left[:end] in self._numbers), None)
            if piece is None:
                break
            tokens.append(self._numbers[piece])
            left = left[len(piece) :]
        return tokens
