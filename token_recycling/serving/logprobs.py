"""Log-probabilities of an output in the format of OpenAI's API, with the bytes of each token.

A token is decoded once per response or event of a stream: the same ones are probable at many positions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from .output import ScoredToken


def completion_logprobs(
    tokenizer: PreTrainedTokenizerBase, tokens: list[ScoredToken], offsets: list[int], top: int
) -> dict[str, Any]:
    """Return the field `logprobs` of a choice of /v1/completions; `offsets` are character offsets of the tokens."""
    text = cache(partial(token_text, tokenizer))
    return {
        "tokens": [text(token.token, token.begins_text) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_by_text(text, token) for token in tokens] if top else None,
        "text_offset": offsets,
    }


def _by_text(text: Callable[[int, bool], str], scored: ScoredToken) -> dict[str, float] | None:
    """Return the most probable tokens and the chosen one by text; of equal texts, the most probable is kept."""
    if scored.logprob is None:
        return None
    logprobs: dict[str, float] = {}
    for token, logprob in [*scored.top, (scored.token, scored.logprob)]:
        logprobs.setdefault(text(token, scored.begins_text), logprob)
    return logprobs


def chat_logprobs(tokenizer: PreTrainedTokenizerBase, tokens: list[ScoredToken]) -> dict[str, Any]:
    """Return the field `logprobs` of a choice of /v1/chat/completions.

    The concatenated bytes of the tokens are those of the text, although a token may be a part of a character.
    """

    @cache
    def text_and_bytes(token: int, first: bool) -> tuple[str, bytes]:
        text = token_text(tokenizer, token, first)
        return text, token_bytes(tokenizer, token, text)

    def about(token: int, logprob: float | None, first: bool) -> dict[str, Any]:
        text, bytes_ = text_and_bytes(token, first)
        return {"token": text, "logprob": logprob, "bytes": list(bytes_)}

    content = []
    for token in tokens:
        others = [about(*other, token.begins_text) for other in token.top]
        content.append({**about(token.token, token.logprob, token.begins_text), "top_logprobs": others})
    return {"content": content, "refusal": None}


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character of byte-level tokenizers (Radford et al., GPT-2). Visible Latin-1 characters
    stand for themselves, the characters from U+0100 on for the other bytes.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's character for the space before a word."""


def token_text(tokenizer: PreTrainedTokenizerBase, token: int, first: bool = False) -> str:
    """Return the text of a token. `first`: the token begins a text, where SentencePiece decodes no space before it."""
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    written = tokenizer.convert_ids_to_tokens(token)
    spaced = not first and isinstance(written, str) and written.replace(_WORD_START, " ") == f" {text}"
    return f" {text}" if spaced else text


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int, text: str) -> bytes:
    """Return the UTF-8 bytes of a token with this text; it may be a part of a character."""
    written = tokenizer.convert_ids_to_tokens(token)
    if isinstance(written, str) and "\N{REPLACEMENT CHARACTER}" in text:
        if byte := _BYTE_TOKEN.fullmatch(written):
            return bytes([int(byte[1], 16)])
        values = [_BYTE_OF.get(character) for character in written]
        if None not in values:
            return bytes(value for value in values if value is not None)
    return text.encode()
