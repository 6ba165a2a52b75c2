"""On a card: caches of every kind, created by `generate` or the caller, on the card or offloaded."""

from typing import Any

import pytest
import torch
from support import tiny
from support.batches import batch
from support.on_device import check_path, check_same, moved
from transformers import CompileConfig, DynamicCache, StaticCache

import token_recycling as tr

pytestmark = pytest.mark.cuda

GREEDY: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False}
EAGER: dict[str, Any] = {"disable_compile": True}
"""On a card transformers compiles automatically for static caches, which a separate test covers."""


def _close(ours, wanted, length):
    for own, theirs in zip(ours.layers, wanted.layers, strict=True):
        for name in ("keys", "values"):
            states = [getattr(layer, name)[..., :length, :].cpu() for layer in (own, theirs)]
            torch.testing.assert_close(*states, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("implementation", [None, "dynamic", "static", "offloaded", "offloaded_static"])
@pytest.mark.parametrize("lengths", [[9], [4, 9]], ids=["one text", "a batch"])
def test_returned_cache_equals_that_of_generate(placed, device, implementation, lengths):
    if implementation is not None and implementation.startswith("offloaded") and device.type == "cpu":
        pytest.skip("nothing is offloaded from a CPU")
    given = moved(batch(lengths, 1), device)
    how = {"cache_implementation": implementation, "return_dict_in_generate": True, **GREEDY, **EAGER}
    wanted, ours = placed.generate(**given, **how), tr.generate(placed, **given, **how)
    check_same(placed, given, ours.sequences, wanted.sequences)
    assert type(ours.past_key_values) is type(wanted.past_key_values)
    if len(lengths) == 1 and torch.equal(ours.sequences, wanted.sequences):
        _close(ours.past_key_values, wanted.past_key_values, ours.sequences.shape[1] - 1)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
def test_turns_on_one_cache_plain_and_accelerated(placed, device, static, fast):
    texts = []
    for ours in ("", "012", "1"):
        cache = StaticCache(config=placed.config, max_cache_len=96) if static else DynamicCache()
        text = tiny.prompt(0, 9).to(device)
        for turn in range(3):
            arguments = {"past_key_values": cache, **GREEDY, **EAGER}
            if str(turn) in ours:
                text = tr.generate(placed, text, drafter="recycling", fast=fast, **arguments)
            else:
                text = placed.generate(text, **arguments)
            assert int(cache.get_seq_length()) == text.shape[1] - 1
            text = torch.cat([text, tiny.prompt(turn, 2).to(device)], dim=1)
        texts.append(text)
    assert all(torch.equal(text, texts[0]) for text in texts)


def test_compiled_generate_with_a_static_cache_equals_the_fast_path(placed, device):
    """The benchmark compares the fast path with compiled `generate`."""
    given = {"input_ids": tiny.prompt(0, 9).to(device)}
    how = {"cache_implementation": "static", "compile_config": CompileConfig(), **GREEDY, "max_new_tokens": 6}
    wanted, stats = placed.generate(**given, **how), tr.Stats()
    ours = tr.generate(placed, **given, drafter="published", fast=True, stats=stats, **{**how, "compile_config": None})
    check_path(stats, device)
    check_same(placed, given, ours, wanted)
