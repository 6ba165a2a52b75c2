"""The oracle of SpecDec++: an upper bound of speculative decoding with a draft model that knows how long to draft.

It knows the target's output in hindsight, and drafts up to the token before the first one that would be rejected. So
nothing is discarded, and the target makes the fewest possible passes: one for every token at which the two models
disagree (Huang et al., 2405.19715, lemma 2.1). It is no drafter, since only a benchmark knows an output in advance.
Unmeasured cost: the output is decoded once before, and read once by the draft model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...costs.costs import Costs
from ...drafters._shared.base import ModelDrafter
from ...drafters._shared.expand import Rules
from ...drafters._shared.pairing import DraftModelOption
from ...loop.hints import NO_HINTS, Hints
from ...model.tree_model import TreeModel
from ...trees.draft import Context
from .outcome import Outcome
from .runners import DraftedRunner


@dataclass
class Hindsight(DraftModelOption, ModelDrafter):
    """Drafts the draft model's choices as long as they equal the known output."""

    name = "oracle"

    def knows(self, text: torch.Tensor) -> None:
        """Set the next sequence (length,), prompt included."""
        self._known = text

    def rules_for(self, target: TreeModel, model: TreeModel, prompt: torch.Tensor, costs: Costs) -> Rules:
        known = self._known.to(prompt.device)
        assert torch.equal(known[: len(prompt)], prompt)
        choices = _choices(model, known, target.vocab_size)
        self._runs = _runs(choices == known[1 : len(choices) + 1])
        longest = max([1, *self._runs])
        return Rules(longest, 1, longest)

    def depth_for(self, context: Context, rules: Rules) -> int:
        place = len(context.tokens) - 1
        return self._runs[place] if place < len(self._runs) else 0

    def shape(self, rules: Rules) -> str:
        return "as many tokens as will be accepted"


@torch.no_grad()
def _choices(model: TreeModel, text: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return the model's argmax after every token of `text` (length,) but the last, as far as it can read."""
    known = text.clamp(max=model.embedded - 1)[: model.max_length]
    if len(known) < 2:
        return known[:0]
    logits = model.model(input_ids=known[None, :-1].to(model.device), use_cache=False).logits[0, :, :vocabulary]
    return logits.argmax(dim=-1).to(text.device)


def _runs(agreed: torch.Tensor) -> list[int]:
    """Return for every place the number of consecutive true values from there on."""
    runs, length = [], 0
    for same in reversed(agreed.tolist()):
        length = length + 1 if same else 0
        runs.append(length)
    return runs[::-1]


@dataclass
class OracleRunner(DraftedRunner):
    """Decodes an output once, untimed, and then again with the output known."""

    drafter: Hindsight

    def generate(self, arguments: dict[str, Any], hints: Hints = NO_HINTS) -> Outcome:
        if arguments.get("do_sample"):
            raise ValueError("the oracle needs greedy decoding, got sampling: samples are not known in advance")
        self.drafter.knows(self.model.generate(**arguments)[0])
        return super().generate(arguments, hints)

    def replay(self, prompt: torch.Tensor, text: torch.Tensor) -> Outcome:
        self.drafter.knows(torch.cat([prompt, text]))
        return super().replay(prompt, text)
