"""Stop strings: wherever they come from they end a text, cost little, and leave nothing for others to find."""

import json

import pytest
from support.openai_answers import chat, completion
from support.serving import serving
from transformers.generation import stopping_criteria

PROMPT = "for index in"


@pytest.fixture(scope="module")
def whole(server):
    return completion(server, temperature=0, max_tokens=24).choices[0].text


@pytest.fixture(scope="module")
def stop(whole):
    """A string of the text, of which a single character stands before it too."""
    return next(
        whole[at : at + 3]
        for at in range(3, 20)
        if whole.index(whole[at : at + 3]) == at and set(whole[at : at + 3]) & set(whole[:at])
    )


def test_one_string_in_a_configuration_is_one_stop_string(server, whole, stop):
    said = completion(server, temperature=0, max_tokens=24, generation_config=json.dumps({"stop_strings": stop}))
    assert said.choices[0].text == whole[: whole.index(stop)]
    assert said.choices[0].finish_reason == "stop"


def test_so_is_one_of_the_models_own(model, tokenizer, whole, stop, monkeypatch):
    monkeypatch.setattr(model.generation_config, "stop_strings", stop)
    with serving(model, tokenizer) as server:
        assert completion(server, temperature=0, max_tokens=24).choices[0].text == whole[: whole.index(stop)]


def test_they_end_every_kind_of_answer(server, whole, stop):
    (*_, (name, end)) = events = server.steps(prompt=PROMPT, temperature=0, max_tokens=24, stop=stop)
    shown = "".join("".join(data["texts"]) for kind, data in events if kind == "step") + end["text"]
    assert (name, end["finish_reason"], shown) == ("end", "stop", whole[: whole.index(stop)])
    text = chat(server, temperature=0, max_tokens=24).choices[0].message.content
    configuration = json.dumps({"stop_strings": text[9:12], "do_sample": False, "max_new_tokens": 24})
    answer = server.post("/v1/responses", {"input": "import os", "generation_config": configuration}).json()
    said = answer["output"][0]["content"][0]["text"]
    assert said == text[: text.index(text[9:12])]


def test_a_special_token_may_be_one(server, tokenizer):
    special = {"logit_bias": {str(tokenizer.eos_token_id): 100}, "generation_config": '{"eos_token_id": 299}'}
    assert completion(server, temperature=0, max_tokens=24, **special).usage.completion_tokens == 24
    said = completion(server, temperature=0, max_tokens=24, stop=tokenizer.eos_token, **special)
    assert (said.choices[0].text, said.choices[0].finish_reason, said.usage.completion_tokens) == ("", "stop", 1)


def test_nothing_of_them_is_kept(server, stop):
    """transformers keeps a table for each list of stop strings, which tells whether somebody asked for it."""
    before = list(stopping_criteria.STOP_STRING_EMBEDDING_CACHE)
    assert completion(server, max_tokens=24, temperature=0, stop=[stop]).choices[0].finish_reason == "stop"
    assert list(stopping_criteria.STOP_STRING_EMBEDDING_CACHE) == before
