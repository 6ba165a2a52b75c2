"""Suffix automaton alone: what followed the longest suffix of the text that stands in it before.

The retrieval half of SAM-Decoding (2411.10666), with drafts as long as the match deserves, as in SuffixDecoding
(2411.04975): a long match is rarely chance. Prompt and output are one text; where a match ends in a loop, the draft
repeats it.

Cost per step: amortised constant time for every new token, two look-ups for every drafted one, in compiled code.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..costs.costs import Costs
from ..model.tree_model import TreeModel
from ..recycling.suffix_automaton import SuffixAutomaton
from ..recycling.warm_up import warm_up_suffix
from ..trees.draft import Context, Draft
from ..trees.templates import chain, root_only
from ._base import Drafter, TextDrafter, check_at_least


@dataclass
class Suffix(Drafter):
    """Drafts what followed the longest repeated suffix of the text; the longer the match, the longer the draft."""

    num_tokens: int = 40
    """Drafted tokens at most."""
    factor: float = 2.0
    """Drafted tokens for each token of the match."""
    min_match: int = 1
    """How many tokens must match at least; otherwise nothing is drafted."""

    def __post_init__(self) -> None:
        check_at_least(1, self, "num_tokens", "min_match")
        if not self.factor > 0:
            raise ValueError(f"expected a factor above 0, got {self.factor}")

    def warm_up(self, device: torch.device) -> None:
        warm_up_suffix()

    def start(self, prompt: torch.Tensor, target: TreeModel, costs: Costs) -> SuffixText:
        self.warm_up(target.device)
        return SuffixText(self, prompt.cpu().numpy())

    def describe(self) -> str:
        drafted = f"{self.factor:g} tokens for each of a match of {self.min_match} or more"
        return f"suffix: {drafted}, {self.num_tokens} at most"


class SuffixText(TextDrafter):
    """One text and its suffix automaton."""

    drafter: Suffix

    def __init__(self, drafter: Suffix, prompt: np.ndarray) -> None:
        super().__init__(drafter)
        self._automaton = SuffixAutomaton(prompt)

    def draft(self, context: Context) -> Draft:
        options, automaton = self.drafter, self._automaton
        automaton.extend(context.tokens[len(automaton) :].cpu().numpy())
        _, match = automaton.match
        length = 0 if match < options.min_match else max(1, int(options.factor * match))
        found = automaton.branch(min(length, options.num_tokens))
        if not len(found):
            return Draft(root_only(), context.root)
        drafted = torch.from_numpy(found).to(context.tokens.device)
        confidence = np.full(len(found) + 1, match / (match + 1), np.float32)
        confidence[0] = 1
        return Draft(chain(len(found)), torch.cat([context.root, drafted]), confidence=confidence)
