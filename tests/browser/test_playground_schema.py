"""The playground in a real browser: the JSON schema field."""

import json

import jsonschema
import pytest
from support import tiny
from support.pages import events, generate, shown
from support.serving import serving
from support.speaking import ascii_llama

SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "size": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["color", "size"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}


@pytest.fixture(scope="module")
def server():
    model = ascii_llama()
    model.generation_config.eos_token_id = 0
    with serving(model, tiny.tokenizer(), offers=("recycling:tree=8", "published")) as running:
        yield running


def test_answer_is_json_of_the_schema_with_forced_tokens_marked(page, server):
    page.click("summary:has-text('JSON schema')")
    page.fill("#schema", json.dumps(SCHEMA, indent=2))
    generate(page)
    answer = page.locator(".lane .text").text_content()
    jsonschema.validate(json.loads(answer), SCHEMA)
    said = [token for step in shown(page) for token in step]
    steps = events(server, response_format=FORM)
    expected = [pair for step in steps for pair in zip(step["texts"], step["forced"], strict=True)]
    assert [(text, "forced" in name.split()) for name, text in said] == expected
    free = [text for text, forced in expected if not forced]
    assert 0 < len(free) < len(expected) / 2
