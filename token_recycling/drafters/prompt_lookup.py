"""Prompt lookup decoding (Saxena 2023, apoorvumang/prompt-lookup-decoding): copy from the prompt.

The last 3, then 2, then 1 tokens are looked up in the sequence; the tokens after their first occurrence form the draft,
one branch. Drafts equal those of transformers' `prompt_lookup_num_tokens`, without its search of the whole sequence.

Cost per step: one dictionary entry per new token and n-gram size, and at most 3 look-ups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..model.target import Target
from ..trees.draft import Context, Draft
from ._base import Drafter, DrafterTraits, SequenceDrafter, check_at_least

_MOST = 16
"""Maximum tokens of an n-gram: every size has an entry per token."""


@dataclass
class PromptLookup(Drafter):
    """Drafts the tokens after the first occurrence of the last few tokens."""

    num_tokens: int = 10
    """Maximum number of drafted tokens."""
    max_matching_ngram_size: int = 3
    """Longest n-gram to look up; shorter ones are tried if it has no match."""

    def __post_init__(self) -> None:
        check_at_least(1, self, "num_tokens", "max_matching_ngram_size")
        if self.max_matching_ngram_size > _MOST:
            raise ValueError(
                f"max_matching_ngram_size must be <= {_MOST}, got {self.max_matching_ngram_size}; "
                "for longer matches use the drafter suffix"
            )

    @property
    def traits(self) -> DrafterTraits:
        return DrafterTraits(on_host=True, reproducible=True)

    def start(self, prompt: torch.Tensor, target: Target) -> PromptLookupSequence:
        return PromptLookupSequence(self)

    def describe(self) -> str:
        sizes = f"{self.max_matching_ngram_size} to 1" if self.max_matching_ngram_size > 1 else "1"
        return f"prompt_lookup: at most {self.num_tokens} tokens after a match of the last {sizes}"


class PromptLookupSequence(SequenceDrafter):
    """The n-grams of one sequence, with the end of their first occurrences."""

    drafter: PromptLookup

    def __init__(self, drafter: PromptLookup) -> None:
        super().__init__(drafter)
        self._ends: dict[tuple[int, ...], int] = {}
        """For each n-gram, the number of tokens up to the end of its first occurrence."""
        self._indexed = 0
        """Tokens of the sequence whose n-grams are in the index."""

    def draft(self, context: Context) -> Draft:
        tokens, most = context.tokens, self.drafter.max_matching_ngram_size
        begin = max(0, self._indexed - most + 1)
        recent = tokens[begin:].tolist()
        for end in range(self._indexed + 1, len(tokens) + 1):
            for size in range(1, min(most, end) + 1):
                self._ends.setdefault(tuple(recent[end - size - begin : end - begin]), end)
        self._indexed = len(tokens)
        for size in range(min(most, len(tokens)), 0, -1):
            end = self._ends[tuple(recent[-size:])]
            if end < len(tokens):
                continuation = tokens[end : end + self.drafter.num_tokens]
                return Draft.chain(torch.cat([context.root, continuation]))
        return Draft.chain(context.root)
