"""Grammars over a vocabulary of single bytes: check a text against a grammar, and generate random outputs."""

from __future__ import annotations

import random
import re

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper

from token_recycling.grammar.compile import Grammar

END = 256
CLOSING = b'"]}'


class _Bytes:
    """A tokenizer: ids 0 to 255 are bytes, 256 ends a sequence, and further ids are special tokens."""

    eos_token_id, bos_token_id = END, None

    def __init__(self, special: list[str]) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"<end>", *(text.encode() for text in special)]
        self.special_token_ids = list(range(END, len(self.tokens)))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def byte_tokenizer(*special: str) -> LLTokenizer:
    tokens = _Bytes(list(special))
    return LLTokenizer(TokenizerWrapper(tokens), n_vocab=len(tokens.tokens), eos_token=END, slices=[])


def admits(grammar: Grammar, text: str, special: tuple[str, ...] = ()) -> bool:
    """Return whether a grammar accepts a text, in which the strings of `special` stand for special tokens."""
    pieces = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
    tokens = list[int]()
    for piece in pieces:
        tokens += [END + 1 + special.index(piece)] if piece in special else piece.encode()
    matcher = grammar.pristine.deep_copy()
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def random_output(grammar: Grammar, draw: random.Random, most: int = 200) -> bytes | None:
    """Return an output of random allowed tokens, or None if it has not ended after `most` tokens."""
    matcher, output = grammar.pristine.deep_copy(), bytearray()
    for _ in range(most):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(mask, bitorder="little")[: END + 1].nonzero()[0].tolist()
        if allowed[-1] == END:
            allowed.pop()
            if not allowed or draw.random() < 0.4:
                return bytes(output)
        closing = [token for token in CLOSING if token in allowed]
        token = draw.choice(closing if closing and draw.random() < 0.35 else allowed)
        output.append(token)
        assert matcher.consume_token(token)
    return None
