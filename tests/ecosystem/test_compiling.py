"""Forms that a stranger may send: each compiles within two seconds of processor time and 250 MB, or is refused."""

import contextlib
import os
import threading
import time
import urllib.request

import httpx2
import pytest
from support.openai_answers import completion
from support.serving import serving

from token_recycling.hf.constrain import tokenizer_info
from token_recycling.serving.compiling import GoneError, Trials

xgrammar = pytest.importorskip("xgrammar")
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "all": {"items": {"$ref": "#/$defs/node"}}}}
HOSTILE = {
    "recursion": ("json_schema", {"$defs": {"node": NODE}, "$ref": "#/$defs/node"}, True),
    "a cycle": (
        "json_schema",
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        True,
    ),
    "an enum": ("json_schema", {"enum": [f"value {number * 7919 % 1_000_003}" for number in range(100_000)]}, True),
    "repeats": ("regex", "((((a{1,100}){1,100}){1,100}){1,100}){1,100}", True),
    "a megabyte": (
        "json_schema",
        {"type": "object", "properties": {f"property_{n}": {"type": "string", "title": "x" * 80} for n in range(8000)}},
        True,
    ),
}


@pytest.fixture
def compiling(shipped):
    model, tokenizer = shipped
    made = Trials(tokenizer_info(tokenizer, model.config.vocab_size, 0).serialize_json, 2.0)
    yield made
    made.close()


def children(process):
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except FileNotFoundError:
            continue
        if int(fields[1]) == process.pid and fields[0] != "Z":
            found.append(int(name))
    return found


def wait_for_the_end(process):
    """Until no child of it is left; one that was killed or has answered takes a moment."""
    end = time.monotonic() + 30
    while children(process):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_form_is_compiled_or_refused_and_its_process_ends(compiling, name):
    before = os.times()
    with contextlib.suppress(ValueError):
        compiling.check(HOSTILE[name])
    after = os.times()
    assert after.user + after.system - before.user - before.system < 2  # of this process, which serves others
    wait_for_the_end(compiling._process)


def test_trials_have_a_low_priority_and_end_when_nobody_waits_for_them(compiling):
    """Decoding does not wait for them."""
    compiling.check(("regex", "[a-c]", True))
    found = []

    def gone():
        found.extend(os.getpriority(os.PRIO_PROCESS, child) for child in children(compiling._process))
        return bool(found)

    with pytest.raises(GoneError):
        compiling.check(HOSTILE["an enum"], gone)
    assert set(found) == {19}
    wait_for_the_end(compiling._process)


def test_a_process_that_has_ended_is_started_again(compiling):
    compiling.check(("regex", "[a-c]", True))
    compiling._process.kill()
    compiling._process.wait()
    compiling.check(("regex", "[a-c]", True))


def test_schemas_of_real_apis_compile(shipped):
    names = [f"property_{number}" for number in range(300)]
    properties = {name: {"type": "string", "enum": [name, "x"]} for name in names}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with serving(*shipped) as server:
        answer = completion(server, prompt="a", response_format=form, max_tokens=300, temperature=0)
        assert answer.choices[0].text[0] == "{"


def test_a_server_refuses_by_name_and_answers_others(shipped):
    with serving(*shipped) as server:
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": HOSTILE["an enum"][1]}}
        answers = []
        body = {"prompt": "a", "response_format": form, "max_tokens": 4}
        url = f"{server.url}/v1/completions"
        asking = threading.Thread(target=lambda: answers.append(httpx2.post(url, json=body, timeout=300)))
        asking.start()
        while asking.is_alive():
            with urllib.request.urlopen(f"{server.url}/health", timeout=60) as answer:
                assert answer.status == 200
            time.sleep(0.2)
        assert answers[0].status_code == 400
        assert "--grammar-seconds" in answers[0].json()["error"]["message"]
        assert completion(server, regex="[a-c]{3}").choices[0].text


def test_a_form_whose_masks_grow_is_refused_by_name(shipped):
    """It compiles at once; the masks of repeats within repeats take seconds each after a few tokens."""
    with serving(*shipped) as server:
        body = {"prompt": "a", "regex": "(([a-z]{0,100}){0,100}){0,100}", "max_tokens": 2000, "temperature": 0}
        before = time.process_time()
        answer = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=600)
        assert time.process_time() - before < 30
        assert answer.status_code == 400, answer.text
        assert "response_format: the masks of this grammar take more than" in answer.json()["error"]["message"]
        assert completion(server, regex="[a-c]{3}").choices[0].text
