"""Grammars of untrusted clients: their time and memory are bounded, and other requests are still answered."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from types import SimpleNamespace

import jsonschema
import psutil
import pytest
import torch
from support import http
from support.cases import thinned
from support.openai_answers import completion
from support.serving import serving

from token_recycling.serving.grammars import Grammars

PAIRS = {f"d{number}": {"allOf": [{"$ref": f"#/$defs/d{number + 1}"}] * 2} for number in range(30)}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "all": {"items": {"$ref": "#/$defs/node"}}}}
LAUGHS = "\n".join(f"r{number} ::= r{number + 1} r{number + 1} r{number + 1}" for number in range(25))
BOMBS = {
    "recursion": {"json": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"}},
    "large enum": {"json": {"enum": [f"value {number * 7919 % 1_000_003}" for number in range(60_000)]}},
    "repeats": {"regex": "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"},
    "growing masks": {"regex": "(([a-z]{0,100}){0,100}){0,100}"},
    "properties": {"json": {"properties": {f"property_{number}": {"type": "string"} for number in range(1900)}}},
    "optional properties": {"json": {"properties": {f"p{number}": {"enum": ["x", number]} for number in range(300)}}},
    "doubled references": {"json": {"$ref": "#/$defs/d0", "$defs": {**PAIRS, "d30": {"type": "object"}}}},
    "product": {"json": {"allOf": [{"anyOf": [{"pattern": f"{a}{b}"} for a in "abcdefgh"]} for b in range(9)]}},
    "branches": {"json": {"oneOf": [{"properties": {"k": {"const": n}}, "required": ["k"]} for n in range(500)]}},
    "automata": {"regex": "(a|b)*a(a|b){20}"},
    "ambiguity": {"grammar": 'root ::= root root | "a" | root root root'},
    "ambiguity of Lark": {"grammar": "start: a\na: a a | a a a | /a/"},
    "billion laughs": {"grammar": f"root ::= r0\n{LAUGHS}\nr25 ::= [a-b]"},
    "without end": {"grammar": 'root ::= "a" root'},
    "conjunctions": {"grammar": "start: A\nA: " + " & ".join(f"/.*[a-z]{{{n},}}.*/" for n in range(1, 14))},
}  # fmt: skip


@pytest.fixture(scope="module")
def server(shipped):
    with serving(*shipped) as running:
        yield running


@pytest.mark.parametrize("name", thinned(BOMBS, 2))
def test_expensive_grammar_is_refused_or_bounded_while_others_are_answered(server, name):
    """The limit is processor time of this process, which includes the server, so a busy machine does not matter."""
    body, answers = {"prompt": "a", "structured_outputs": BOMBS[name], "max_tokens": 60, "temperature": 0}, []
    before = time.process_time()
    asking = threading.Thread(
        target=lambda: answers.append(http.post(f"{server.url}/v1/completions", json=body, timeout=300))
    )
    asking.start()
    assert completion(server, prompt="b", max_tokens=4, temperature=0).choices[0].text
    assert http.get(f"{server.url}/health", timeout=60).status_code == 200
    asking.join()
    assert answers[0].status_code in (200, 400), answers[0].text
    assert time.process_time() - before < 15
    if answers[0].status_code == 400:
        assert len(answers[0].json()["error"]["message"]) < 1000


def test_grammars_of_a_key_do_not_delay_those_of_another(monkeypatch):
    grammars, compiled = Grammars(SimpleNamespace()), threading.Event()

    def compile_slowly(self, slow, gone):
        assert not slow or compiled.wait(60)
        return SimpleNamespace(unenforced=[])

    async def ask():
        slow = [asyncio.create_task(grammars.grammar("regex", True, "a", lambda: False)) for _ in range(9)]
        await asyncio.sleep(0)
        try:
            await asyncio.wait_for(grammars.grammar("regex", False, "b", lambda: False), 30)
        finally:
            compiled.set()
            await asyncio.gather(*slow)

    monkeypatch.setattr(Grammars, "_compiled", compile_slowly)
    asyncio.run(ask())
    grammars.close()


def test_refused_requests_leak_no_memory(server):
    """Message, schema and traceback are freed."""
    process, sizes = psutil.Process(), []
    for turn in range(2):
        for number in range(50):
            schema = {
                "properties": {f"p{turn}_{number}": {"not": {"const": [1]}}, "more": {"description": "x" * 60_000}}
            }
            form = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema}}
            answer = server.post("/v1/completions", {"prompt": "a", "response_format": form, "max_tokens": 1})
            assert answer.status_code == 400
            assert f"#/properties/p{turn}_{number}/not" in answer.json()["error"]["message"]
        gc.collect()
        sizes.append(process.memory_info().rss)
    assert sizes[1] - sizes[0] < 5_000_000


def test_unenforced_keywords_are_listed_in_a_header(server, caplog):
    schema = {"type": "array", "uniqueItems": True, "maxItems": 2, "items": {"type": "integer"}}
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for form, stream in product((named, {"type": "json_object", "schema": schema}), (False, True)):
        body = {"prompt": "a", "response_format": form, "max_tokens": 20, "stream": stream}
        answer = server.post("/v1/completions", body)
        assert answer.headers["x-unenforced-keywords"] == "#/uniqueItems"
    warnings = [record for record in caplog.records if "not enforced" in record.getMessage()]
    assert len(warnings) == 1
    assert "x-unenforced-keywords" not in server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).headers
    strict = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [True]}, "strict": True}}
    text = completion(server, prompt="a", response_format=strict, max_tokens=20).choices[0].text
    assert json.loads(text) is True


@pytest.mark.parametrize(
    ("regex", "length", "open_places"),
    [("return index", 12, ()), ("retu(r|x)n a(b|c)", 9, (4, 8)), ("[ab]{6}", 6, range(6))],
)
def test_steps_mark_tokens_that_the_grammar_forces(server, regex, length, open_places):
    """A token is forced if its first character is, even if several tokens start with that character."""
    events = server.steps(prompt="def f(a):\n    ", max_tokens=24, temperature=0, structured_outputs={"regex": regex})
    place = 0
    for step in (data for name, data in events if name == "step"):
        for text, forced in zip(step["texts"], step["forced"], strict=True):
            if text:  # the EOS token has no text
                assert forced == (place not in open_places), (place, text)
            place += len(text)
    assert place == length


def closed_object(**properties):
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


WORD = {"type": "string", "pattern": "^[a-z]{1,3}$"}
SCHEMAS = [
    closed_object(name=WORD, tags={"type": "array", "items": WORD, "minItems": 1, "maxItems": 3}),
    closed_object(count={"type": "integer", "minimum": 3, "maximum": 70}, unit={"enum": ["kg", "m", "s"]}),
    closed_object(place=closed_object(city=WORD, open={"type": "boolean"}), note={"anyOf": [{"type": "null"}, WORD]}),
    {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 2, "maxItems": 4},
]


def test_log_probabilities_do_not_depend_on_a_grammar(server, shipped):
    """They are those of the model itself, as without one."""
    model, tokenizer = shipped
    constrained = {"structured_outputs": {"regex": "[0-9]{12}"}}
    said = completion(server, max_tokens=1, temperature=0, logprobs=0, **constrained).choices[0].logprobs
    ids = tokenizer("for index in", return_tensors="pt")["input_ids"]
    (row,) = torch.log_softmax(model(ids).logits[:, -1].detach(), dim=-1)
    assert said.token_logprobs == pytest.approx([float(row[tokenizer.convert_tokens_to_ids(said.tokens[0])])], abs=1e-3)


def test_concurrent_strict_requests_equal_separate_requests(shipped):
    """Equal and different schemas, whole and streamed; in the second round the drafter has learned all of them."""

    def asked(number):
        schema = {"name": "answer", "strict": True, "schema": SCHEMAS[number % len(SCHEMAS)]}
        form = {"type": "json_schema", "json_schema": schema}
        body = {
            "prompt": f"value {number % 6}:\n",
            "max_tokens": 90,
            "temperature": 0,
            "extra_body": {"response_format": form},
        }
        if number % 3:
            return server.complete(**body).choices[0].text
        with server.complete(**body, stream=True) as stream:
            return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)

    with serving(*shipped, cache=0, concurrency=1) as server:
        alone = [asked(number) for number in range(12)]
    with serving(*shipped, concurrency=6) as server, ThreadPoolExecutor(12) as pool:
        for _ in range(2):
            assert [*pool.map(asked, range(12))] == alone
    for number, text in enumerate(alone):
        jsonschema.validate(json.loads(text), SCHEMAS[number % len(SCHEMAS)])
