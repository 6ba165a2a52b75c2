"""A value of another type in a valid request is accepted, or refused by its path; it never causes a server error."""

import json

import httpx2
import pytest
from support.cases import parameter
from support.functions import HELD
from support.serving import serving
from support.speaking import chat_tokenizer, ending_llama

USER, SYSTEM = {"role": "user", "content": "a"}, {"role": "system", "content": [{"type": "text", "text": "a"}]}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}}
BODIES = {
    "/v1/completions": {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 1,
        "stop": ["x", "y"],
        "logit_bias": {"5": 1.0},
        "stop_token_ids": [200],
        "speculation": {"enabled": True, "nodes": 4},
        "prompt": ["a"],
        "max_tokens": 1,
        "n": 2,
        "logprobs": 1,
        "stream_options": {"include_usage": True},
        "structured_outputs": {"choice": ["a", "b"]},
    },
    "/v1/chat/completions": {
        "messages": [
            SYSTEM,
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "a"},
            USER,
        ],
        "max_tokens": 1,
        "tools": HELD,
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "prediction": {"type": "content", "content": [{"type": "text", "text": "a"}]},
        "chat_template_kwargs": {"a": 1},
    },
    "/v1/responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "a"},
        ],
        "instructions": "a",
        "max_output_tokens": 1,
        "tools": [{"type": "function", **HELD[0]["function"]}],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "look"}, {"type": "mcp"}],
        },
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}},
    },
    "/v1/messages": {
        "system": [{"type": "text", "text": "a"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {"at": 1}}]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "a"}]},
                    {"type": "document", "source": {"type": "text", "data": "a"}, "title": "a"},
                ],
            },
        ],
        "max_tokens": 1,
        "stop_sequences": ["x"],
        "tools": [{"name": "look", "description": "a", "input_schema": HELD[0]["function"]["parameters"]}],
        "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
    },
    "/v1/token_recycling/steps": {"messages": [USER], "max_tokens": 1, "drafter": "plain"},
}
VALUES = (3, "zzz", [], [3], {"type": "zzz"}, [{"type": "zzz"}])
LONGEST = 300


def paths_within(value, place=()):
    """Yield the paths of all values within a value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield (*place, key)
        yield from paths_within(entry, (*place, key))


def replaced(body, place, value):
    changed = json.loads(json.dumps(body))
    *path, last = place
    holder = changed
    for key in path:
        holder = holder[key]
    holder[last] = value
    return changed


CASES = [
    parameter(
        path, place, VALUES[start::3], every_run=start == number % 3, id=f"{path} {'.'.join(map(str, place))} {start}"
    )
    for path, body in BODIES.items()
    for number, place in enumerate(paths_within(body))
    for start in range(3)
]
"""Every run tries a third of the values at each path."""


@pytest.fixture(scope="module")
def client():
    """A client of a model with an EOS token, which structured outputs need."""
    model = ending_llama()
    with serving(model, chat_tokenizer()) as server, httpx2.Client(base_url=server.url, timeout=300) as opened:
        yield opened


@pytest.mark.parametrize("path", BODIES)
def test_unchanged_bodies_are_valid(client, path):
    answer = client.post(path, json=BODIES[path])
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("path", "place", "values"), CASES)
def test_value_of_another_type_is_accepted_or_refused_by_its_path(client, path, place, values):
    for value in values:
        answer = client.post(path, json=replaced(BODIES[path], place, value))
        if answer.status_code == 200:
            continue
        assert answer.status_code in (400, 404), (value, answer.text)
        error = answer.json()["error"]
        if error["message"].startswith("tool_choice: must name functions"):  # the tools were replaced
            continue
        assert len(error["message"]) <= LONGEST
        assert error["param"] is not None, (value, error)
        named, changed = error["param"].split("."), list(map(str, place))
        shared = min(len(named), len(changed))
        assert named[:shared] == changed[:shared], (value, error)
        assert error["message"].startswith(error["param"]), (value, error)
