"""Prompt lookup decoding (Saxena 2023, apoorvumang/prompt-lookup-decoding): the text repeats itself.

The last 3, then 2, then 1 tokens are looked up in the text; what follows the first place where they stand is the draft,
one branch. The drafts are those of transformers' `prompt_lookup_num_tokens`, without its search of the whole text.

Cost per step: some nanoseconds for every new token, and for every place where the last token stood, in compiled code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..costs.costs import Costs
from ..model.tree_model import TreeModel
from ..recycling.occurrences import Occurrences, longest_match, warm_up
from ..trees.draft import Context, Draft
from ..trees.templates import chain, root_only
from ._base import Drafter, DrafterTraits, TextDrafter, check_at_least


@dataclass
class PromptLookup(Drafter):
    """Drafts what followed the last few tokens where they first stood in the text."""

    num_tokens: int = 10
    """Drafted tokens at most."""
    max_matching_ngram_size: int = 3
    """How many of the last tokens are looked up at most; fewer where they are not found."""

    def __post_init__(self) -> None:
        check_at_least(1, self, "num_tokens", "max_matching_ngram_size")

    @property
    def traits(self) -> DrafterTraits:
        return DrafterTraits(reproducible=True)

    def warm_up(self, device: torch.device) -> None:
        warm_up()

    def start(self, prompt: torch.Tensor, target: TreeModel, costs: Costs) -> PromptLookupText:
        self.warm_up(target.device)
        return PromptLookupText(self)

    def describe(self) -> str:
        sizes = f"{self.max_matching_ngram_size} to 1" if self.max_matching_ngram_size > 1 else "1"
        return f"prompt_lookup: at most {self.num_tokens} tokens after a match of the last {sizes}"


class PromptLookupText(TextDrafter):
    """Looks up the last tokens of one text in it."""

    drafter: PromptLookup

    def __init__(self, drafter: PromptLookup) -> None:
        super().__init__(drafter)
        self._index = Occurrences()

    def draft(self, context: Context) -> Draft:
        options, index = self.drafter, self._index
        index.extend(context.tokens[len(index) :].cpu().numpy())
        places, match = longest_match(index.arrays, index.tokens[-options.max_matching_ngram_size :], len(index))
        if not match:
            return Draft(root_only(), context.root)
        first = int(places.min())
        found = context.tokens[first : first + options.num_tokens]
        return Draft(chain(len(found)), torch.cat([context.root, found]))
