"""A small imitation of peft: layers with several additions, one of which is active."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaForCausalLM

__name__ = "peft.of_the_tests"  # code of peft modules is known to be stateless


class Adapted(torch.nn.Module):
    """A linear layer with two additions, a and b."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.additions = torch.nn.ModuleDict(
            {name: torch.nn.Linear(base.in_features, base.out_features) for name in "ab"}
        )
        self.scaling = {"a": 3.0, "b": 3.0}
        self.active = ["a"]
        self.disabled = False
        self.register_buffer("mask", torch.ones(base.out_features))

    @property
    def weight(self) -> torch.Tensor:
        """The weight of the base layer, as in peft."""
        return self.base.weight

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(states)
        for name in [] if self.disabled else self.active:
            result = result + self.additions[name](states) * self.scaling[name] * self.mask
        return result


def adapted(model: LlamaForCausalLM) -> Any:
    """Replace a model's output layer by one with additions, and return it."""
    torch.manual_seed(1)
    model.lm_head = Adapted(model.lm_head).eval()
    return model.lm_head
