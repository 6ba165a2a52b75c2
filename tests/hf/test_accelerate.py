"""Inside transformers: `accelerate` and `decelerate`, pipelines, streamers, scores, and the two other forms."""

from __future__ import annotations

from typing import Any

import pytest
from support import tiny
from transformers import LlamaForCausalLM, pipeline

import token_recycling as tr

pytestmark = pytest.mark.core

GREEDY: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}


@pytest.fixture
def writer():
    """A random llama with the vocabulary of the tiny tokenizer."""
    return tiny.llama(4, vocab_size=300)


def test_an_accelerated_model_keeps_its_name_and_decelerate_its_class(model):
    tr.accelerate(model)
    assert type(model) is not LlamaForCausalLM
    assert isinstance(model, LlamaForCausalLM)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert type(model).__module__ == LlamaForCausalLM.__module__
    assert tr.decelerate(model) is model
    assert type(model) is LlamaForCausalLM
    assert not hasattr(model, "acceleration")
    assert type(tr.decelerate(model)) is LlamaForCausalLM


def test_an_accelerated_model_is_saved_as_what_it_is(model, tmp_path):
    model.save_pretrained(tmp_path / "plain")
    tr.accelerate(model).generate(tiny.prompt(0, 5), **GREEDY)
    model.save_pretrained(tmp_path / "accelerated")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "accelerated" / name).read_bytes()
    assert type(LlamaForCausalLM.from_pretrained(tmp_path / "accelerated")) is LlamaForCausalLM


def test_a_pipeline_writes_the_same_text(writer, tokenizer):
    plain = pipeline("text-generation", model=writer, tokenizer=tokenizer)(tiny.SENTENCES[0], **GREEDY)
    tr.accelerate(writer)
    ours = pipeline("text-generation", model=writer, tokenizer=tokenizer)(tiny.SENTENCES[0], **GREEDY)
    assert ours == plain
    assert writer.acceleration.stats.tokens == 20


def test_the_custom_generate_form_returns_statistics_and_leaves_the_model_alone(model):
    recycle = tr.custom_generate("published", tree="paper")
    output = model.generate(tiny.prompt(0, 6), custom_generate=recycle, return_dict_in_generate=True, **GREEDY)
    assert output.stats.tokens == 20
    assert type(model) is LlamaForCausalLM


def test_the_custom_generate_form_refuses_what_it_cannot_do(model):
    with pytest.raises(tr.UnsupportedModelError, match="no cache"):
        model.generate(tiny.prompt(0, 5), use_cache=False, custom_generate=tr.custom_generate(), **GREEDY)
