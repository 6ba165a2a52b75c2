"""Calls inside and outside of torch.inference_mode, in every order, share caches and learned state."""

import contextlib
import itertools
from typing import Any

import pytest
import torch
from support import tiny
from support.architectures import model_of, named
from support.cases import thinned
from transformers import DynamicCache, LlamaForCausalLM

import token_recycling as tr
from token_recycling.model.prefill import extend, prefill
from token_recycling.model.target import Target
from token_recycling.trees.draft import Draft

pytestmark = pytest.mark.measured

GREEDY: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False}
ORDERS = list(itertools.product([True, False], repeat=3))
KINDS = [named("llama"), named("gemma3_text"), named("deepseek_v32")]


def inference_mode(enabled):
    return torch.inference_mode() if enabled else contextlib.nullcontext()


@pytest.mark.parametrize(("case", "order"), thinned(itertools.product(KINDS, ORDERS)))
@torch.no_grad()
def test_passes_on_one_cache_across_modes(case, order):
    """Prefill, a tree with accepted nodes, and more tokens, each inside or outside of inference mode."""
    model = model_of(case)
    text, tree = tiny.prompt(0, 12)[0], tr.Template.from_paths([(0,), (1,), (1, 0)])
    tokens = torch.cat([text[-1:], torch.tensor([5, 6, 7])])
    more = torch.tensor([9, 8, 7])
    target = Target(model)
    cache = target.new_cache()
    with inference_mode(order[0]):
        prefill(target, [text], cache)
        target.forward(target.inputs.of([Draft(tokens, tree.parents)], [11], 11), cache)
        cache.keep(11, [11], [[]])
    with inference_mode(order[1]):
        target.forward(target.inputs.of([Draft(tokens, tree.parents)], [11], 11), cache)
        cache.keep(11, [11], [[0, 2, 3]])
    with inference_mode(order[2]):
        ((_, logits),) = extend(target, [more], [14], cache, [more[:1]])
    wanted = model(input_ids=torch.cat([text, torch.tensor([6, 7]), more])[None]).logits[:, -3:]
    torch.testing.assert_close(logits.clone(), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("order", "ours_first"), thinned(itertools.product(ORDERS, [True, False])))
def test_cache_is_reused_across_calls_in_different_modes(model, order, ours_first):
    """Turns alternate between the library and plain `generate`, which stores inference tensors in that mode."""
    text, cache = tiny.prompt(0, 9), DynamicCache(config=model.config)
    for turn, within in enumerate(order):
        wanted = model.generate(text, **GREEDY)
        generate = tr.generate if (turn % 2 == 0) == ours_first else LlamaForCausalLM.generate
        with inference_mode(within):
            found = generate(model, text, past_key_values=cache, return_dict_in_generate=True, **GREEDY)
        assert torch.equal(found.sequences, wanted)
        cache, text = found.past_key_values, torch.cat([wanted, tiny.prompt(turn, 3)], dim=1)
