"""Log-probabilities of tokens: those of the model itself, before penalties, biases, temperature and cuts.

They are read from the logits that chose the tokens, so that they cost a softmax for each token; those of a prompt take
one more pass over it. Draft trees change nothing: the logits are those of the path that was accepted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from ..model.compat import CACHE

_CHUNK = 128
"""Tokens of a prompt in one pass: the logits of all of them may need more memory than the model."""
_LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


@dataclass(frozen=True)
class ScoredToken:
    """A token with its log-probability and the most likely ones in its place."""

    token: int
    logprob: float | None = None
    """None for the first token of a prompt, and where none was asked for."""
    top: list[tuple[int, float]] = field(default_factory=list)
    """Best first."""


class LogprobRecorder(LogitsProcessor):
    """The first processor of a text: changes nothing, and keeps the distributions until their tokens are known."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._rows: dict[int, torch.Tensor] = {}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._rows[input_ids.shape[1]] = torch.log_softmax(scores[0].float(), dim=-1)
        return scores

    def scored(self, position: int, token: int) -> ScoredToken:
        """The token that was chosen at that position of the text, the prompt included."""
        return _scored(self._rows.pop(position), token, self._top)


@torch.no_grad()
def scored_prompt(model: PreTrainedModel, ids: torch.Tensor, top: int) -> list[ScoredToken]:
    """The tokens of a prompt (1, length), each after those before it."""
    found, cache = [ScoredToken(int(ids[0, 0]))], None
    for start in range(0, ids.shape[1] - 1, _CHUNK):
        # The last token is read by the generation: nothing follows it here.
        chunk = ids[:, start : min(start + _CHUNK, ids.shape[1] - 1)]
        output = model(input_ids=chunk, use_cache=True, **{CACHE: cache})
        cache = output[CACHE]
        following = ids[0, start + 1 : start + 1 + chunk.shape[1]].tolist()
        rows = torch.log_softmax(output.logits[0].float(), dim=-1)
        found += [_scored(row, token, top) for row, token in zip(rows, following, strict=True)]
    return found


def _scored(row: torch.Tensor, token: int, top: int) -> ScoredToken:
    values, tokens = row.topk(min(top, len(row)))
    best = [(one, max(value, _LEAST)) for one, value in zip(tokens.tolist(), values.tolist(), strict=True)]
    return ScoredToken(token, max(float(row[token]), _LEAST), best)


def completion_logprobs(
    tokenizer: PreTrainedTokenizerBase, tokens: list[ScoredToken], offsets: list[int], top: int
) -> dict[str, Any]:
    """The field `logprobs` of a choice of /v1/completions; `offsets` are the tokens' places in the text."""
    return {
        "tokens": [tokenizer.decode([one.token]) for one in tokens],
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": [_by_text(tokenizer, one) for one in tokens] if top else None,
        "text_offset": offsets,
    }


def _by_text(tokenizer: PreTrainedTokenizerBase, one: ScoredToken) -> dict[str, float] | None:
    """Return the most probable tokens and the chosen one; of several with the same text the most probable counts."""
    if one.logprob is None:
        return None
    found: dict[str, float] = {}
    for token, logprob in [*one.top, (one.token, one.logprob)]:
        found.setdefault(tokenizer.decode([token]), logprob)
    return found


def chat_logprobs(tokenizer: PreTrainedTokenizerBase, tokens: list[ScoredToken], offsets: list[int]) -> dict[str, Any]:
    """The field `logprobs` of a choice of /v1/chat/completions; `offsets` are the tokens' places in the text.

    The bytes of the tokens put together are those of the text: a token may be a part of a character.
    """

    def about(token: int, logprob: float | None, first: bool) -> dict[str, Any]:
        bytes_ = token_bytes(tokenizer, token, first)
        return {"token": tokenizer.decode([token]), "logprob": logprob, "bytes": list(bytes_)}

    content = []
    for token, offset in zip(tokens, offsets, strict=True):
        others = [about(*other, offset == 0) for other in token.top]
        content.append({**about(token.token, token.logprob, offset == 0), "top_logprobs": others})
    return {"content": content, "refusal": None}


def _byte_level_alphabet() -> dict[str, int]:
    """Return how byte-level tokenizers write each byte (Radford et al., GPT-2): visible Latin-1 characters as they are,
    the others as the characters from U+0100 on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"
"""What SentencePiece writes for the space before a word."""


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int, first: bool = False) -> bytes:
    """Return the bytes that a token stands for in UTF-8, which may be a part of a character. `first`: the text begins
    with it, so that SentencePiece shows no space before it.
    """
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    written = tokenizer.convert_ids_to_tokens(token)
    if not isinstance(written, str):  # a row of the embedding that is no token
        return text.encode()
    if "\N{REPLACEMENT CHARACTER}" in text:
        if byte := _BYTE_TOKEN.fullmatch(written):
            return bytes([int(byte[1], 16)])
        values = [_BYTE_OF.get(character) for character in written]
        if None not in values:
            return bytes(value for value in values if value is not None)
    if written.startswith(_WORD_START) and not text.startswith(" ") and not first:
        return f" {text}".encode()
    return text.encode()
