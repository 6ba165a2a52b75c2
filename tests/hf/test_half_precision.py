"""In 16 bits a tree is rounded otherwise than one token at a time, and texts may part: only where the two best logits
of plain decoding nearly tie, and a wrong mask does not pass for that.

Left out are routers that pick experts: where two experts nearly tie, rounding picks another one, and the logits jump.
Here a mixture uses all of its experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from support import architectures, tiny
from support.architectures import SUPPORTED, Case
from support.oracle import Oracle

import token_recycling as tr
from token_recycling.bench.run.divergence import first_divergence
from token_recycling.model.tree_model import TreeInputs, masks

NEW = 32
TOLERANCE = {torch.bfloat16: 16 * torch.finfo(torch.bfloat16).eps, torch.float16: 16 * torch.finfo(torch.float16).eps}
"""How far apart the two best logits may be where texts part: 0.125 and 0.016. The logits here go up to 8, where
neighbouring numbers are 0.03 and 0.004 apart; half of all gaps are above 0.3.
"""
CASES = [
    *(next(case for case in SUPPORTED if case.family == family) for family in ("llama", "qwen3", "gpt2", "bloom")),
    *(case for case in SUPPORTED if case.tested == "window of 8" and case.family in ("mistral", "gemma2")),
    Case("mixtral", "all experts", {"num_local_experts": 2, "num_experts_per_tok": 2}),
]
DTYPES = [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.nightly)]


@dataclass(frozen=True)
class Parting:
    """Where an accelerated text leaves the plain one."""

    prompt: torch.Tensor
    plain: torch.Tensor
    ours: torch.Tensor
    position: int
    gap: float
    """Between the two best logits of plain decoding there, as it computed them."""


def partings(model, prompts):
    """Of greedy texts after random prompts; plain and accelerated run in the same precision."""
    found = []
    for seed in range(prompts):
        ids = tiny.prompt(seed, 5 + seed, architectures.VOCABULARY)
        arguments = {"max_new_tokens": NEW, "do_sample": False}
        plain = model.generate(ids, **arguments, return_dict_in_generate=True, output_logits=True)
        stats = tr.Stats()
        ours = tr.generate(model, ids, drafter=Oracle(plain.sequences), stats=stats, **arguments)
        assert stats.tokens == NEW
        assert len(plain.logits) == NEW
        different = (ours != plain.sequences)[0, ids.shape[1] :].nonzero()
        if len(different):
            position = int(different[0])
            best, second = plain.logits[position][0].float().topk(2).values.tolist()
            found.append(Parting(ids, plain.sequences, ours, position, best - second))
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_texts_part_only_at_near_ties(case, dtype):
    model = architectures.model_of(case).to(dtype)
    assert all(parting.gap <= TOLERANCE[dtype] for parting in partings(model, 4))


def all_before(self, tree, length):
    """A mask as of a chain: nodes see all nodes before them, those of other branches too."""
    n = len(tree)
    visible = torch.ones(n, length + n, dtype=torch.bool).tril(length)[None, None]
    queries = (tree.on(self._device).depths + length)[None]
    keys = torch.cat([torch.arange(length)[None], queries], dim=1)
    return masks(self._info.layers, visible, queries, keys, self._dtype)


def parents_hidden(self, tree, length):
    """A mask in which nodes see the text, the root and themselves, but no node between."""
    n = len(tree)
    visible = torch.cat([torch.ones(n, length), torch.eye(n)], dim=1).bool()
    visible[:, length] = True
    queries = (tree.on(self._device).depths + length)[None]
    keys = torch.cat([torch.arange(length)[None], queries], dim=1)
    return masks(self._info.layers, visible[None, None], queries, keys, self._dtype)


@pytest.mark.parametrize("wrong", [all_before, parents_hidden])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_wrong_mask_is_no_matter_of_rounding(dtype, wrong, monkeypatch):
    monkeypatch.setattr(TreeInputs, "_mask", wrong)
    model = architectures.model_of(CASES[0]).to(dtype)
    gaps = [parting.gap for parting in partings(model, 4)]
    assert max(gaps, default=0) > 2 * TOLERANCE[dtype]


def test_compare_reports_the_margin():
    """The number is that of a pass over the text up to there; what plain decoding computed differs by rounding."""
    model = architectures.model_of(CASES[0]).to(torch.bfloat16)
    parted = partings(model, 12)
    assert parted
    for parting in parted:
        length = parting.prompt.shape[1]
        plain, ours = (text[0, length:].tolist() for text in (parting.plain, parting.ours))
        found = first_divergence(model, parting.prompt[0], plain, ours)
        assert found is not None
        assert (found.position, found.expected, found.got) == (
            parting.position,
            plain[parting.position],
            ours[parting.position],
        )
        with torch.no_grad():
            logits = model(parting.plain[:, : length + parting.position]).logits[0, -1].float()
        ranked = logits.sort(descending=True).values
        assert found.margin == float(ranked[0] - ranked[1])
        assert abs(found.margin - parting.gap) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_decoding_computes_what_generate_does(dtype):
    """Bit by bit: the pass over the prompt, and those over one token."""
    model = tiny.llama(num_attention_heads=4, num_key_value_heads=2).to(dtype)
    asked = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_logits": True}
    for seed in range(3):
        ids = tiny.prompt(seed, 40 + seed)
        wanted = model.generate(ids, **asked)
        ours = tr.generate(model, ids, drafter="plain", **asked)
        assert torch.equal(torch.cat(ours.logits), torch.cat(wanted.logits))
