"""Prompt lookup decoding (Saxena 2023, apoorvumang/prompt-lookup-decoding): the text repeats itself.

The last 3, then 2, then 1 tokens are looked up in the text; what follows the first place where they stand is the draft,
one branch. The drafts are those of transformers' `prompt_lookup_num_tokens`, without its search of the whole text:
every n-gram is noted once, with the place that followed it first.

Cost per step: one dictionary look-up a size of n-gram, and one entry a size for every new token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..costs.costs import Costs
from ..model.tree_model import TreeModel
from ..trees.draft import Context, Draft
from ..trees.templates import chain, root_only
from ._base import Drafter, TextDrafter, check_at_least


@dataclass
class PromptLookup(Drafter):
    """Drafts what followed the last few tokens where they first stood in the text."""

    num_tokens: int = 10
    """Drafted tokens at most."""
    max_matching_ngram_size: int = 3
    """How many of the last tokens are looked up at most; fewer where they are not found."""

    def __post_init__(self) -> None:
        check_at_least(1, self, "num_tokens", "max_matching_ngram_size")

    def start(self, prompt: torch.Tensor, target: TreeModel, costs: Costs) -> PromptLookupText:
        return PromptLookupText(self, prompt)

    def describe(self) -> str:
        sizes = f"{self.max_matching_ngram_size} to 1" if self.max_matching_ngram_size > 1 else "1"
        return f"prompt_lookup: at most {self.num_tokens} tokens after a match of the last {sizes}"


class PromptLookupText(TextDrafter):
    """Looks up the last tokens of one text in it."""

    drafter: PromptLookup

    def __init__(self, drafter: PromptLookup, prompt: torch.Tensor) -> None:
        super().__init__(drafter)
        self._ngrams = NGrams(drafter.max_matching_ngram_size)
        self._ngrams.extend(prompt.tolist())

    def draft(self, context: Context) -> Draft:
        ngrams = self._ngrams
        ngrams.extend(context.tokens[len(ngrams.tokens) :].tolist())
        first = ngrams.first_after_match()
        if first is None:
            return Draft(root_only(), context.root)
        found = context.tokens[first : first + self.drafter.num_tokens]
        return Draft(chain(len(found)), torch.cat([context.root, found]))


class NGrams:
    """The n-grams of a text that grows, each with the place of what followed it first."""

    def __init__(self, largest: int) -> None:
        self.tokens: list[int] = []
        self._places: list[dict[tuple[int, ...], int]] = [{} for _ in range(largest)]

    def extend(self, tokens: list[int]) -> None:
        """Appends tokens to the text."""
        text = self.tokens
        for token in tokens:
            for size, places in enumerate(self._places, start=1):
                if len(text) >= size:
                    places.setdefault(tuple(text[-size:]), len(text))
            text.append(token)

    def first_after_match(self) -> int | None:
        """The place of the first token after the longest match; None where the last token is new to the text."""
        for size in range(min(len(self._places), len(self.tokens)), 0, -1):
            place = self._places[size - 1].get(tuple(self.tokens[-size:]))
            if place is not None:
                return place
        return None
