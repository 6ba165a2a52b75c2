"""Top-k candidates of logits, compared with torch's own."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from token_recycling._util.topk import top_candidates


@given(st.integers(2, 2000), st.integers(1, 12), st.integers(1, 5), st.sampled_from([1, 3, 50]), st.integers(0, 2**31))
def test_candidates_are_the_first_of_a_stable_sort(vocab_size, k, n, equal, seed):
    k = min(k, vocab_size)
    order = [torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed + row)) for row in range(n)]
    logits = torch.stack(order).div(equal, rounding_mode="floor") / vocab_size * 8
    ids, probabilities = top_candidates(logits, k)
    best = logits.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    assert ids.tolist() == best.indices[:, :k].tolist()
    np.testing.assert_allclose(probabilities, best.values[:, :k].numpy(), rtol=1e-4)


def test_largest_logits_may_be_in_one_group_or_after_the_last():
    vocab_size = 64 * 600 + 7
    for places in (range(64, 72), range(vocab_size - 8, vocab_size), [0, 63, 64, 38_399, 38_400, 38_406, 700, 5]):
        logits = torch.zeros(1, vocab_size)
        logits[0, list(places)] = torch.arange(8, 0, -1).float()
        assert top_candidates(logits, 8)[0].tolist() == [list(places)]


def test_masked_logits_have_probability_zero():
    logits = torch.full((2, 64 * 600), float("-inf"))
    logits[:, [3, 900, 901]] = torch.tensor([1.0, 3.0, 2.0])
    ids, probabilities = top_candidates(logits, 8)
    assert ids[:, :3].tolist() == [[900, 901, 3]] * 2
    assert (probabilities[:, 3:] == 0).all()
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [[0, 2], [3], [], [0, 1, 2, 3]])
def test_candidates_of_selected_rows(dtype, rows):
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    ids, probabilities = top_candidates(logits.float(), 4)
    some_ids, some = top_candidates(logits, 4, np.array(rows, np.int64))
    assert some_ids.tolist() == ids[rows].tolist()
    np.testing.assert_allclose(some, probabilities[rows], rtol=1e-5)
