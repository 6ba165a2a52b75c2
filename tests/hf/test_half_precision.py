"""In 16 bits a forward pass over a tree rounds differently from passes over single tokens, so outputs may diverge, but
only where the two best logits of plain decoding nearly tie. A wrong mask does not pass this check.

Routers that select experts are left out: where two experts nearly tie, rounding selects another one, and the logits
jump. The mixture tested here uses all of its experts.
"""

from __future__ import annotations

import pytest
import torch
from accelerate.big_modeling import attach_layerwise_casting_hooks
from support import architectures, tiny
from support.architectures import SUPPORTED, Case, model_of, named
from support.batches import batch
from support.cases import thinned
from support.oracle import Oracle

import token_recycling as tr
from token_recycling.model.target import TreeInputs, masks

NEW = 32
TOLERANCE = {torch.bfloat16: 16 * torch.finfo(torch.bfloat16).eps, torch.float16: 16 * torch.finfo(torch.float16).eps}
"""Largest difference between the two best logits where outputs diverge: 0.125 and 0.016. The logits here go up to 8,
where neighboring numbers are 0.03 and 0.004 apart; half of all gaps are above 0.3.
"""
CASES = [
    *(next(case for case in SUPPORTED if case.family == family) for family in ("llama", "qwen3", "gpt2", "bloom")),
    *(case for case in SUPPORTED if case.tested == "window of 8" and case.family in ("mistral", "gemma2")),
    Case("mixtral", "all experts", {"num_local_experts": 2, "num_experts_per_tok": 2}),
]
DTYPES = thinned([torch.bfloat16, torch.float16], every=2)


def gaps_at_divergences(model, prompts=4):
    """Return the gaps between the two best logits of plain decoding where greedy outputs after random prompts diverge.
    Plain and accelerated calls run in the same precision.
    """
    found = []
    for seed in range(prompts):
        ids = tiny.prompt(seed, 5 + seed, architectures.VOCABULARY)
        arguments = {"max_new_tokens": NEW, "do_sample": False}
        plain = model.generate(ids, **arguments, return_dict_in_generate=True, output_logits=True)
        stats = tr.Stats()
        ours = tr.generate(model, ids, drafter=Oracle(plain.sequences), stats=stats, **arguments)
        assert stats.tokens == len(plain.logits) == NEW
        different = (ours != plain.sequences)[0, ids.shape[1] :].nonzero()
        if len(different):
            best, second = plain.logits[int(different[0])][0].float().topk(2).values.tolist()
            found.append(best - second)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", thinned(CASES, ids=str))
def test_outputs_diverge_only_at_near_ties(case, dtype):
    model = architectures.model_of(case).to(dtype)
    assert all(gap <= TOLERANCE[dtype] for gap in gaps_at_divergences(model))


def masks_of(self, depths, length, visible):
    """Return the masks of the layers for this mask (1, 1, nodes, length + nodes), at the correct positions."""
    queries = depths[None] + length
    keys = torch.cat([torch.arange(length)[None], queries], dim=1)
    return masks(self._info.layers, visible, queries, keys, self._dtype)


def all_before(self, depths, length):
    """Return the mask of a chain: nodes see all nodes before them, including those of other branches."""
    visible = torch.ones(len(depths), length + len(depths)).bool().tril(length)
    return masks_of(self, depths, length, visible[None, None])


def parents_hidden(self, depths, length):
    """Return a mask in which nodes see the sequence, the root and themselves, but no node in between."""
    visible = torch.cat([torch.ones(len(depths), length), torch.eye(len(depths))], dim=1).bool()
    visible[:, length] = True
    return masks_of(self, depths, length, visible[None, None])


@pytest.mark.parametrize("wrong", [all_before, parents_hidden])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wrong_mask_exceeds_the_rounding_tolerance(dtype, wrong, monkeypatch):
    right = TreeInputs._masks

    def after_prompt(self, ancestors, depths, length):
        return wrong(self, depths, length) if length else right(self, ancestors, depths, length)

    monkeypatch.setattr(TreeInputs, "_masks", after_prompt)
    model = architectures.model_of(CASES[0]).to(dtype)
    assert max(gaps_at_divergences(model), default=0) > 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_decoding_equals_generate_bit_by_bit(dtype):
    """In the forward pass over the prompt and in those over one token."""
    model = tiny.llama(num_attention_heads=4, num_key_value_heads=2).to(dtype)
    asked = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_logits": True}
    for seed in range(3):
        ids = tiny.prompt(seed, 40 + seed)
        wanted = model.generate(ids, **asked)
        ours = tr.generate(model, ids, drafter="plain", **asked)
        assert torch.equal(torch.cat(ours.logits), torch.cat(wanted.logits))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_of_a_batch_are_float32_in_every_column(dtype):
    """Including those of the padding after rows that have ended."""
    model = tiny.llama(seed=3).to(dtype)
    how = {"do_sample": True, "temperature": 0.7, "top_k": 0, "max_new_tokens": 16, "pad_token_id": 0}
    how |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    torch.manual_seed(1)
    output = tr.generate(model, **batch([5, 9, 3], 1), **how, eos_token_id=[*range(0, 60, 4)])
    columns = output.sequences[:, 9:]
    assert (columns[:, -1] == 0).any(), "no row ended before another"
    for scores, logits in zip(output.scores, output.logits, strict=True):
        assert scores.dtype == logits.dtype == torch.float32
        assert torch.equal(scores, logits / 0.7)


@pytest.mark.parametrize(("family", "stored"), [("gpt2", torch.bfloat16), ("llama", torch.float8_e4m3fn)], ids=str)
def test_layers_can_compute_in_another_dtype_than_that_of_their_weights(family, stored):
    model, ids = model_of(named(family)), tiny.prompt(0, 9)
    attach_layerwise_casting_hooks(model, storage_dtype=stored, compute_dtype=torch.float32)
    wanted = model.generate(ids, max_new_tokens=24, do_sample=False)
    tr.accelerate(model)
    assert torch.equal(model.generate(ids, max_new_tokens=24, do_sample=False), wanted)
    assert model.acceleration.fallback is None
