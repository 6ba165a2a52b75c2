"""The prefix cache finds the longest stored prefix, respects its limit and returns the slots of a fresh pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny
from support.architectures import model_of, named
from support.recurrent_architectures import recurrent
from support.releases import needs

from token_recycling.model import prefixes
from token_recycling.model.prefill import prefill
from token_recycling.model.prefixes import PrefixCache, default_budget
from token_recycling.model.support import ready

FAMILIES = [
    named("llama", ""),
    named("deepseek_v32", "8 keys a query"),
    *(pytest.param(recurrent(family), marks=needs(5, 14)) for family in ("qwen3_5_text", "mamba")),
]
pytestmark = pytest.mark.core


@pytest.fixture(autouse=True, scope="module")
def no_grad():
    with torch.no_grad():
        yield


def read(target, text):
    """Return a cache of all tokens of `text`."""
    cache = target.new_cache()
    prefill(target, [torch.cat([text, text[-1:]])], cache)
    return cache


def keep(kept, text, cache, key, row=0):
    """Store the slots of all tokens of `text`."""
    kept.of(key).keep(torch.cat([text, text[-1:]]), cache, row)


def check_logits(target, text, cache):
    """Assert that the logits after `text`, whose first tokens are cached, equal those without a cache."""
    found, wanted = (
        target.read(text[None, each.length :], each, last=1)[0, -1] for each in (cache, target.new_cache())
    )
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", FAMILIES, ids=str)
def test_logits_after_a_stored_prefix_equal_a_full_read(case):
    target = ready(model_of(case))
    kept = PrefixCache(target, 10**8)
    text = torch.randint(0, target.vocab_size, (40,), generator=torch.Generator().manual_seed(1))
    given = text[:20].clone()
    keep(kept, given, read(target, given), "")
    given.zero_()  # the caller's
    for _ in range(2):  # the stored prefix does not change
        longer = text if target.info.reads_on else text[:21]
        cache, n = kept.of("").take(longer)
        assert n == cache.length == 20
        check_logits(target, longer, cache)
    assert target.info.reads_on or kept.of("").take(text)[1] == 0
    other = text[:24].clone()
    other[12] = (text[12] + 1) % target.vocab_size  # only this token differs
    cache, n = kept.of("").take(other)
    assert n == cache.length == (0 if target.info.recurrent else 12)
    check_logits(target, other, cache)
    for end in (10, 10, 30):  # within the stored prefix, at a stored end, and beyond
        keep(kept, text[:end], read(target, text[:end]), "")
        assert kept.nbytes == bytes_of(kept)
        cache, n = kept.of("").take(text[: end + 1])
        assert n == end
        check_logits(target, text[: end + 1], cache)
    for end in (25, 13, 9):  # another text branches off; recurrent states exist only at stored ends
        other = text[: end + 2].clone()
        other[end] = (text[end] + 1) % target.vocab_size
        cache, n = kept.of("").take(other)
        assert n == (end if not target.info.recurrent else end // 10 * 10 if target.info.reads_on else 0)
        check_logits(target, other, cache)


@pytest.fixture(scope="module")
def target():
    return ready(tiny.llama())


def of(*tokens):
    return torch.tensor(tokens)


def test_keys_are_isolated(target):
    kept = PrefixCache(target, 10**8)
    kept.of("a").keep(of(1, 2, 3, 4), read(target, of(1, 2, 3)))
    assert kept.of("a").take(of(1, 2, 3, 4))[1] == 3
    assert kept.of("b").take(of(1, 2, 3, 4))[1] == 0
    assert kept.of("").take(of(1, 2, 3, 4))[1] == 0


def test_models_are_isolated_and_share_key_and_limit(target):
    kept, draft = PrefixCache(target, 10**8), ready(tiny.llama(1, num_hidden_layers=1))
    kept.of("a").keep(of(1, 2, 3, 4), read(target, of(1, 2, 3)))
    assert kept.of("a").of(draft).take(of(1, 2, 3, 4))[1] == 0
    before = kept.nbytes
    kept.of("a").of(draft).keep(of(1, 2, 5, 4), read(draft, of(1, 2, 5)))
    assert kept.nbytes == before + before // 2 == bytes_of(kept)
    cache, n = kept.of("a").of(draft).take(of(1, 2, 3, 4))
    assert n == 2
    check_logits(draft, of(1, 2, 3, 4), cache)
    assert kept.of("b").of(draft).take(of(1, 2, 3, 4))[1] == 0
    assert kept.of("a").take(of(1, 2, 3, 4))[1] == 3
    kept.forget("a")
    assert kept.nbytes == 0
    assert kept.of("a").of(draft).take(of(1, 2, 3, 4))[1] == 0


def test_least_recently_used_prefix_is_evicted(target):
    texts = [torch.arange(10) + 20 * place for place in range(3)]
    kept = PrefixCache(target, 10**8)
    keep(kept, texts[0], read(target, texts[0]), "a")
    small = PrefixCache(target, 2 * kept.nbytes)
    for text in texts[:2]:
        keep(small, text, read(target, text), "a")
    assert small.nbytes == small.limit
    small.of("a").take(texts[0])
    keep(small, texts[2], read(target, texts[2]), "b")
    assert [small.of(key).take(text)[1] for text, key in zip(texts, "aab", strict=True)] == [9, 0, 9]
    longer = torch.arange(25)
    keep(small, longer, read(target, longer), "b")  # larger than the limit
    assert [small.of(key).take(text)[1] for text, key in zip(texts, "aab", strict=True)] == [9, 0, 9]
    exact = PrefixCache(target, 2 * kept.nbytes)
    for end in (10, 20):  # only the new tokens of a text need space
        keep(exact, longer[:end], read(target, longer[:end]), "")
    assert exact.of("").take(longer)[1] == 20
    nothing = PrefixCache(target, 0)
    keep(nothing, texts[0], read(target, texts[0]), "")
    assert nothing.of("").take(texts[0])[1] == nothing.nbytes == 0


@pytest.mark.parametrize("case", FAMILIES, ids=str)
def test_recurrent_states_count_towards_the_limit(case):
    target = ready(model_of(case))
    texts = [torch.arange(10) + 20 * place for place in range(3)]
    one = PrefixCache(target, 10**8)
    keep(one, texts[0], read(target, texts[0]), "")
    limited = PrefixCache(target, 2 * one.nbytes)
    for text in texts:
        keep(limited, text, read(target, text), "")
        assert limited.nbytes == bytes_of(limited) <= limited.limit
    assert [limited.of("").take(torch.cat([text, of(1)]))[1] for text in texts] == [0, 10, 10]


def test_prefixes_are_not_reused_beyond_a_length_threshold():
    """Beyond it, the model computes other states for the same prefix."""
    target = ready(model_of(named("phi3", "longrope, threshold at 32")))
    kept, text = PrefixCache(target, 10**8), torch.arange(40)
    keep(kept, text[:20], read(target, text[:20]), "")
    assert [kept.of("").take(text[:length])[1] for length in (21, 31, 32, 33, 40)] == [20, 20, 20, 0, 0]


def test_default_budget_subtracts_the_weights(target, monkeypatch):
    weights = sum(weight.nbytes for weight in target.model.parameters())
    for free in (80_000, -5):
        monkeypatch.setattr(prefixes, "memory", lambda device, free=free: weights + free)
        assert default_budget(target) == max(0, free) // 8


@st.composite
def branching(draw):
    """Generate texts of at least two tokens, many of which share a prefix with an earlier one."""
    texts = []
    for _ in range(draw(st.integers(1, 10))):
        before = draw(st.sampled_from(texts)) if texts else []
        rest = draw(st.lists(st.integers(0, 2), min_size=2, max_size=6))
        texts.append(before[: draw(st.integers(0, len(before)))] + rest)
    return texts


@settings(max_examples=20)
@given(branching(), st.integers(1, 40))
def test_longest_stored_prefix_is_found_with_correct_slots(target, texts, room):
    """Compare with a list of all texts, with and without a limit that evicts some."""
    whole = PrefixCache(target, 10**8)
    one = torch.zeros(1, dtype=torch.long)
    keep(whole, one, read(target, one), "elsewhere")
    limited = PrefixCache(target, room * whole.nbytes)
    kept: list[list[int]] = []
    for tokens in texts:
        ids = torch.tensor(tokens)
        longest = max((sum(np.cumprod([a == b for a, b in zip(tokens, one, strict=False)])) for one in kept), default=0)
        cache, n = whole.of("").take(ids)
        assert n == min(longest, len(tokens) - 1)
        for cached, length in ((cache, n), limited.of("").take(ids)):
            if length:
                wanted = read(target, ids[:length])
                for layer, own in zip(cached.layers, wanted.layers, strict=True):
                    torch.testing.assert_close(layer.keys, own.keys, atol=1e-5, rtol=1e-5)
                    torch.testing.assert_close(layer.values, own.values, atol=1e-5, rtol=1e-5)
        assert len(whole) == 1 + len({(*one[:end],) for one in kept for end in range(1, len(one) + 1)}), "each once"
        for cached in (whole, limited):
            keep(cached, ids, read(target, ids), "")
            assert limited.nbytes <= limited.limit
            assert all(root.below for root in cached.roots.values()), "an emptied part keeps its model alive"
            assert set(cached._by_use) == {one for root in cached.roots.values() for one in _below(root)}
            assert cached.nbytes == bytes_of(cached)
        kept.append(tokens)


def bytes_of(kept):
    """Return the size of all segments."""
    return sum(segment.nbytes for root in kept.roots.values() for segment in _below(root))


def _below(segment):
    for one in segment.below.values():
        yield one
        yield from _below(one)


def test_prefixes_longer_than_a_window_are_complete():
    target = ready(model_of(named("mistral", "window of 8")))
    kept, text = PrefixCache(target, 10**8), torch.arange(60) % 50
    cache, _ = kept.of("").take(text)
    prefill(target, [torch.cat([text, text[-1:]])], cache)
    keep(kept, text, cache, "")
    for end in (60, 13, 30):
        again, n = kept.of("").take(text[:end])
        assert n == end - 1
        check_logits(target, text[:end], again)


def test_cache_with_dropped_slots_is_not_stored():
    """A prompt may branch off at any token and needs the window before it, so slots of prefixes are never dropped."""
    target = ready(model_of(named("mistral", "window of 8")))
    text = torch.arange(60) % 50
    whole, windowed = PrefixCache(target, 10**8), PrefixCache(target, 10**8)
    cache, _ = whole.of("").take(text)
    prefill(target, [torch.cat([text, text[-1:]])], cache)
    keep(whole, text, cache, "")
    short = target.new_cache()
    prefill(target, [text], short)
    short.settle([59])
    keep(windowed, text[:59], short, "")
    assert len(windowed) == 0
    branch = torch.cat([text[:20], text[:5] + 1])
    (dropped,) = short.starts
    assert dropped > 20 - 8, "slots that the first token of the branch sees are gone"
    cache, n = whole.of("").take(branch)
    assert n == 20
    check_logits(target, branch, cache)


@pytest.mark.parametrize("case", FAMILIES, ids=str)
def test_rows_of_a_batch_are_stored_separately(case):
    target = ready(model_of(case))
    kept = PrefixCache(target, 10**8)
    texts = [torch.arange(9), torch.arange(9 if target.info.recurrent else 5) + 30]
    cache = target.new_cache()
    prefill(target, [torch.cat([text, text[-1:]]) for text in texts], cache)
    for row, text in enumerate(texts):
        keep(kept, text, cache, "", row)
    for text in texts:
        longer = torch.cat([text, of(1)])
        found, n = kept.of("").take(longer)
        assert n == len(text)
        check_logits(target, longer, found)
