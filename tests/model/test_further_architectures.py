"""Every causal language model of transformers is measured, refused with a reason, or listed with the reason why not."""

from dataclasses import replace

import pytest
from support.architecture_page import ALL
from support.architectures import model_of
from support.cases import thinned
from support.further_architectures import BLOCKS, FURTHER, FURTHER_REFUSED, NOT_DECODER_ONLY, UNMEASURED
from support.recurrent_architectures import RECURRENT_REFUSED
from support.releases import HERE
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import token_recycling as tr


@pytest.mark.skipif(HERE[:2] != (5, 24), reason="the families are those of another release of transformers")
def test_every_causal_language_model_of_transformers_is_listed_once():
    named = [*NOT_DECODER_ONLY.values(), *UNMEASURED.values()]
    others = [family for families in named for family in families.split()]
    cases = {case.family for case in [*ALL, *RECURRENT_REFUSED, *FURTHER_REFUSED]}
    assert len(others) == len(set(others))
    assert not cases.intersection(others)
    assert cases.union(others) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


REASONS = {
    "blt": "no single stack of layers",
    "cpmant": "a forward pass over a tree raised",
    "deepseek_v4": "DeepseekV4HCACache",
    "inkling2_loop_text": "does not follow the mask or the positions",
    "minimax": "cannot roll back rejected tokens",
    "moshi": "does not follow the mask or the positions",
    "openai-gpt": "takes no KV cache",
    "qwen4_exp_text": "n-gram embeddings",
    "recurrent_gemma": "cannot roll back rejected tokens",
    "reformer": "takes no KV cache",
    "rwkv": "cannot roll back rejected tokens",
    "xlm": "takes no KV cache|a forward pass over a tree raised",  # its own `cache` has the name of 5.24
    "xlnet": "takes no KV cache",
    "xlstm": "cannot roll back rejected tokens",
}


@pytest.mark.parametrize("case", thinned([*RECURRENT_REFUSED, *FURTHER_REFUSED], ids=str))
def test_refused_families_give_their_reason(case):
    model = model_of(case)
    with pytest.raises(tr.UnsupportedModelError, match=REASONS[case.family]):
        tr.accelerate(model)


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_block_sparse_attention_needs_masks(attention):
    model = model_of(BLOCKS)
    model.config._attn_implementation = attention
    assert "flash attention" in str(tr.check(model).reason)


def test_no_tree_is_drafted_without_local_blocks():
    found = tr.check(model_of(replace(BLOCKS, config={**BLOCKS.config, "index_local_blocks": 0})))
    assert found.supported
    assert not any(found.fits(length, 2) for length in range(64))


def test_model_with_a_derived_window_is_supported():
    """ModernBERT derives it from `local_attention` in `__post_init__`."""
    case = next(case for case in FURTHER if case.family == "modernbert-decoder")
    assert tr.check(model_of(case)).supported


@pytest.mark.parametrize("family", ["bert", "rembert"])
def test_model_built_as_an_encoder_is_refused(family):
    case = next(case for case in FURTHER if case.family == family)
    assert tr.check(model_of(case)).supported
    found = tr.check(model_of(replace(case, config={**case.config, "is_decoder": False})))
    assert "built as an encoder" in str(found.reason)
