"""On a card: sampled texts follow the distribution of `generate`, whichever way they go, alone and in a batch."""

import pytest
import torch
from support import tiny
from support.on_device import check_path
from support.two_tokens import SAMPLINGS, SIZE, arguments_for, check_distribution, exact

import token_recycling as tr

pytestmark = pytest.mark.cuda

WAYS = {"fast": (True, 1), "eager": (False, 1), "a batch": (False, 20)}
"""`fast`, and texts of a call."""
TEXTS = 600


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("drafter", ["published:tree=0 1 00 01 10,k=4", "recycling:tree=6,k=4"])
def test_texts_of_two_tokens(device, way, sampling, drafter):
    fast, texts = way
    model = tiny.llama(7, vocab_size=SIZE, initializer_range=0.2).to(device)
    prompt, arguments = torch.tensor([[1, 3, 2]], device=device), arguments_for(sampling)
    wanted = exact(model, prompt, arguments)
    tr.accelerate(model, drafter, fast=fast)
    torch.manual_seed(3)
    check_distribution(
        wanted, lambda: model.generate(prompt, num_return_sequences=texts, **arguments)[:, 3:], TEXTS // texts
    )
    if fast:
        check_path(model.acceleration.stats, device)
