"""The playground's field for a JSON schema in a real browser."""

import json

import jsonschema
import pytest
from support import tiny
from support.pages import events, fill, generate, shown
from support.serving import serving
from support.speaking import speaking_llama

SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "size": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["color", "size"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}


@pytest.fixture(scope="module")
def server(xgrammar):
    model = speaking_llama()
    model.generation_config.eos_token_id = 0
    with serving(model, tiny.tokenizer(), offers=("recycling:tree=8", "published")) as running:
        yield running


def asking(page, text):
    page.click("summary:has-text('JSON of a schema')")
    page.fill("#schema", text)


def test_the_answer_is_json_of_the_schema_and_what_it_forced_is_coloured(page, server):
    asking(page, json.dumps(SCHEMA, indent=2))
    generate(page)
    answer = page.locator(".lane .text").text_content()
    jsonschema.validate(json.loads(answer), SCHEMA)
    said = [token for step in shown(page) for token in step]
    steps = events(server, response_format=FORM)
    expected = [pair for step in steps for pair in zip(step["texts"], step["forced"], strict=True)]
    assert [(text, "forced" in name.split()) for name, text in said] == expected
    free = [text for text, forced in expected if not forced]
    assert 0 < len(free) < len(expected) / 2
    looks = page.locator(".lane .step > span").evaluate_all(
        """tokens => tokens.map(one => {
            const { opacity, textDecorationStyle, textDecorationLine } = getComputedStyle(one);
            return `${textDecorationLine} ${textDecorationStyle} ${opacity}`;
        })"""
    )
    assert [look == "underline dotted 0.65" for look in looks] == [forced for _, forced in expected]


def test_what_is_no_schema_is_not_sent(page):
    asks = []
    page.on("request", lambda request: asks.append(request.url) if request.url.endswith("/steps") else None)
    fill(page)
    asking(page, "{")
    page.click("#generate")
    assert page.evaluate("document.getElementById('schema').validationMessage") == "expected a JSON object"
    assert asks == []


def test_a_schema_that_the_server_refuses_is_said_in_its_words(page):
    fill(page)
    asking(page, '{"not": {"type": "string"}}')
    page.click("#generate")
    page.wait_for_selector("#error:not([hidden])")
    assert "got not; leave it out" in page.text_content("#error")
