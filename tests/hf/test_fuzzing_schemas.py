"""Random JSON schemas at fixed seeds, greedy and sampled: output equals that of `generate` with the same processor, and
is valid.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from support.pages_of_docs import ROOT
from support.strategies import fuzz

import token_recycling as tr

SCHEMAS, NEW = 15, 40
jsonschema = pytest.importorskip("jsonschema")

NAMES = ("name", "size", "color", "city", "items", "id", "kind", "tag")
LEAVES = st.one_of(
    st.integers(1, 8).map(lambda most: {"type": "string", "maxLength": most}),
    st.sampled_from([{"type": "string", "pattern": "^[a-c]{1,4}$"}, {"type": "string", "format": "date"}]),
    st.tuples(st.sampled_from(["integer", "number"]), st.integers(-50, 50), st.integers(0, 400)).map(
        lambda one: {"type": one[0], "minimum": one[1], "maximum": one[1] + one[2]}
    ),
    st.lists(st.sampled_from(["red", "dark red", 1, 2.5, None, True]), min_size=1, max_size=4, unique_by=str).map(
        lambda values: {"enum": values}
    ),
    st.sampled_from([{"const": {"a": [1, 2]}}, {"const": None}, {"type": "boolean"}, {"$ref": "#/$defs/part"}]),
)


def _object(properties: dict[str, Any], required: set[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name in required],
        "additionalProperties": False,
    }


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    properties = st.dictionaries(st.sampled_from(NAMES), inner, min_size=1, max_size=4)
    return st.builds(_object, properties, st.sets(st.sampled_from(NAMES), min_size=5))


INNER = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
            lambda one: {"type": "array", "items": one[0], "minItems": one[1], "maxItems": one[1] + one[2]}
        ),
        st.lists(inner, min_size=2, max_size=3).map(lambda kinds: {"anyOf": kinds}),
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(ROOT / "models" / "target")


@pytest.fixture(scope="module")
def model(tokenizer):
    """Two random layers with the vocabulary of the shipped model."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def drafter():
    return tr.make_drafter("recycling:tree=16")


@fuzz(SCHEMAS)
@given(schema=objects(INNER), sample=st.booleans(), seed=st.integers(0, 99))
def test_outputs_of_random_schemas_are_those_of_generate(schema, sample, seed, model, tokenizer, drafter):
    schema = {**schema, "$defs": {"part": _object({"note": {"type": "boolean"}}, {"note"})}}
    ids = tokenizer(f"{seed}: An example of {', '.join(schema['properties'])} as JSON: ", return_tensors="pt")
    outputs = []
    for generate in (model.generate, lambda **given: tr.generate(model, drafter=drafter, **given)):
        torch.manual_seed(seed)
        held = [tr.constrain(tokenizer, json_schema=schema)]
        outputs.append(generate(**ids, logits_processor=held, max_new_tokens=NEW, do_sample=sample, top_k=0))
    assert outputs[0].tolist() == outputs[1].tolist()
    new = outputs[1][0, ids["input_ids"].shape[1] :]
    said = tokenizer.decode(new, skip_special_tokens=True)
    if int(new[-1]) == tokenizer.eos_token_id and "\ufffd" not in said:
        jsonschema.validate(json.loads(said), schema)
