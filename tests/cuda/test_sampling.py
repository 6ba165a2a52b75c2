"""On a card: sampled outputs follow the distribution of `generate`, with fast and eager passes, and in a batch."""

from collections import Counter
from typing import Any

import pytest
import torch
from support import tiny
from support.chi_square import fit
from support.on_device import check_path

import token_recycling as tr

pytestmark = pytest.mark.cuda

SIZE, TEXTS = 5, 600
"""Size of the vocabulary, and number of sampled outputs."""
WAYS = {"fast": (True, 1), "eager": (False, 1), "a batch": (False, 20)}
"""`fast`, and number of outputs per call."""
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_k": 3},
    {},
    {"top_p": 0.8, "min_p": 0.05},
    {"typical_p": 0.9, "epsilon_cutoff": 0.02},
]


@torch.no_grad()
def exact(model, prompt, asked):
    """Return the probabilities (SIZE * SIZE,) of all outputs of two tokens, computed by transformers' processors."""
    asked = {**asked, "max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": True}

    def following(ids):
        return model.generate(ids, **asked).scores[0][0].double().softmax(-1).cpu()

    rows = [following(torch.cat([prompt, prompt.new_tensor([[token]])], dim=1)) for token in range(SIZE)]
    return (following(prompt)[:, None] * torch.stack(rows)).flatten()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("drafter", ["published:tree=0 1 00 01 10,k=4", "recycling:tree=6,k=4"])
def test_sampled_outputs_follow_the_exact_distribution(device, way, sampling, drafter):
    fast, texts = way
    model = tiny.llama(7, vocab_size=SIZE, initializer_range=0.2).to(device)
    prompt, asked = torch.tensor([[1, 3, 2]], device=device), {"max_new_tokens": 2, "do_sample": True, "top_k": 0}
    asked |= sampling
    wanted, seen = exact(model, prompt, asked), Counter()
    tr.accelerate(model, drafter, fast=fast)
    torch.manual_seed(3)
    for _ in range(TEXTS // texts):
        outputs = model.generate(prompt, num_return_sequences=texts, **asked)[:, 3:]
        seen.update(map(tuple, outputs.tolist()))
    assert fit(seen, torch.cartesian_prod(torch.arange(SIZE), torch.arange(SIZE)), wanted) > 1e-3
    if fast:
        check_path(model.acceleration.stats, device)
