"""Sampled texts of two tokens over a small vocabulary, against the exact probability of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from scipy.stats import chisquare
from transformers import LlamaForCausalLM

SIZE = 5
"""Tokens of the vocabulary."""
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_k": 3},
    {},
    {"top_p": 0.8, "min_p": 0.05},
    {"typical_p": 0.9, "epsilon_cutoff": 0.02},
]


def arguments_for(sampling: dict[str, Any]) -> dict[str, Any]:
    """What `generate` is asked for."""
    return {"max_new_tokens": 2, "do_sample": True, "top_k": 0, **sampling}


@torch.no_grad()
def exact(model: LlamaForCausalLM, prompt: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    """(SIZE, SIZE): the probability of every text of two tokens after a prompt (1, n), as transformers' own processors
    make it. The model must not be accelerated.
    """
    asked = {**arguments, "max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": True}

    def following(ids: torch.Tensor) -> torch.Tensor:
        return model.generate(ids, **asked).scores[0][0].softmax(-1).cpu()

    rows = [following(torch.cat([prompt, prompt.new_tensor([[token]])], dim=1)) for token in range(SIZE)]
    return following(prompt)[:, None] * torch.stack(rows)


def check_distribution(probabilities: torch.Tensor, draw: Callable[[], torch.Tensor], runs: int) -> None:
    """Asserts that what `draw` returns, texts (n, 2), have these probabilities; it is called `runs` times."""
    counts = torch.zeros(SIZE, SIZE)
    for _ in range(runs):
        for first, second in draw().tolist():
            counts[first, second] += 1
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible].double().numpy()
    assert chisquare(counts[possible].numpy(), expected / expected.sum() * float(counts.sum())).pvalue > 1e-3
