"""Draft the continuation of the longest suffix of the sequence that occurred in it before.

The retrieval half of SAM-Decoding (2411.10666), with draft lengths proportional to the match, as in SuffixDecoding
(2411.04975): a long match is rarely a coincidence. Prompt and output are one sequence; a match in a loop repeats the
loop.

Cost per step, in compiled code: nanoseconds for every new token, and a look-up of some microseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from ..model.target import Target
from ..recycling.suffix_index import LONGEST, SuffixIndex, longest_match, warm_up
from ..trees.draft import Context, Draft
from ._base import Drafter, DrafterTraits, SequenceDrafter, check_at_least

_WALKED = 256
"""Number of newest occurrences of the last tokens among which the longest match is searched."""
_COMPARED = 2**20
"""Maximum tokens of a match, whatever the options."""


@dataclass
class Suffix(Drafter):
    """Drafts the continuation of the longest repeated suffix; the longer the match, the longer the draft."""

    num_tokens: int = 40
    """Maximum number of drafted tokens."""
    factor: float = 2.0
    """Drafted tokens per token of the match."""
    min_match: int = 1
    """Shortest match that is drafted from."""

    def __post_init__(self) -> None:
        check_at_least(1, self, "num_tokens", "min_match")
        if not self.factor > 0:
            raise ValueError(f"factor must be > 0, got {self.factor}")
        self.compared = max(LONGEST, self.min_match, math.ceil(min(self.num_tokens / self.factor, _COMPARED)))
        """Longest match that matters; longer matches would not lengthen the draft."""

    @property
    def traits(self) -> DrafterTraits:
        return DrafterTraits(on_host=True, reproducible=True)

    def warm_up(self, device: torch.device) -> None:
        warm_up()

    def start(self, prompt: torch.Tensor, target: Target) -> SuffixSequence:
        self.warm_up(target.device)
        return SuffixSequence(self)

    def describe(self) -> str:
        drafted = f"{self.factor:g} tokens per matching token for matches of {self.min_match} or more"
        return f"suffix: {drafted}, {self.num_tokens} at most"


class SuffixSequence(SequenceDrafter):
    """One sequence and its index."""

    drafter: Suffix

    def __init__(self, drafter: Suffix) -> None:
        super().__init__(drafter)
        self._index = SuffixIndex()

    def draft(self, context: Context) -> Draft:
        options, index = self.drafter, self._index
        index.extend(context.tokens[len(index) :].cpu().numpy())
        places, match = longest_match(index.arrays, index.tokens[-options.compared :], _WALKED)
        if not match or match < options.min_match:
            return Draft.chain(context.root)
        length = max(1, int(min(options.factor * match, options.num_tokens)))
        continuation = np.resize(index.tokens[places[0] : places[0] + length], length).astype(np.int64)
        probabilities = np.full(length + 1, match / (match + 1), np.float32)
        probabilities[0] = 1
        return Draft.chain(np.append(int(context.root), continuation), probabilities)
