"""The families of transformers' whole list: each is measured, refused with its reason, or named with it."""

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
def test_every_family_that_transformers_knows_is_here_once():
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
def test_what_is_refused_is_refused_with_its_reason(case):
    model = model_of(case)
    with pytest.raises(tr.UnsupportedModelError, match=REASONS[case.family]):
        tr.accelerate(model)


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_blocks_of_keys_are_chosen_in_masks_alone(attention):
    model = model_of(BLOCKS)
    model.config._attn_implementation = attention
    assert "flash attention" in str(tr.check(model).reason)


def test_without_local_blocks_no_tree_is_drafted():
    found = tr.check(model_of(replace(BLOCKS, config={**BLOCKS.config, "index_local_blocks": 0})))
    assert found.supported
    assert not any(found.fits(length, 2) for length in range(64))


def test_a_window_that_a_configuration_derives_is_read_by_its_family():
    """Of `local_attention`, in its `__post_init__`."""
    case = next(case for case in FURTHER if case.family == "modernbert-decoder")
    assert tr.check(model_of(case)).supported


@pytest.mark.parametrize("family", ["bert", "rembert"])
def test_what_is_built_as_an_encoder_is_refused(family):
    case = next(case for case in FURTHER if case.family == family)
    assert tr.check(model_of(case)).supported
    found = tr.check(model_of(replace(case, config={**case.config, "is_decoder": False})))
    assert "built as an encoder" in str(found.reason)
