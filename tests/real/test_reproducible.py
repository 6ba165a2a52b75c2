"""In bfloat16 a reproducible drafter gives equal outputs in any order of requests."""

import pytest
import torch
from support.real_prompts import QUESTIONS

import token_recycling as tr

pytestmark = pytest.mark.real

ASKED = [kind[0] for kind in QUESTIONS.values()][:4]
NEW = 64


@pytest.fixture(scope="module")
def half(real):
    return tr.load(real.model.name_or_path, dtype="bfloat16", device="cpu").model


@pytest.mark.parametrize(
    "how", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8}], ids=["greedy", "sampled"]
)
def test_equal_requests_give_equal_outputs(half, ids, how):
    drafter = tr.make_drafter("recycling", reproducible=True)

    def texts(order):
        found, stats = {}, tr.Stats()
        for number in order:
            torch.manual_seed(number)
            prompt = ids(ASKED[number])
            given = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": NEW, "stats": stats, **how}
            found[number] = tr.generate(half, prompt, drafter=drafter, **given).tolist()
        assert stats.mat > 1.2
        return found

    assert texts(range(len(ASKED))) == texts(reversed(range(len(ASKED))))
