"""Fields that vLLM and llama.cpp take: each does what it says there, or is refused by name."""

import json

import pytest
from support import tiny
from support.openai_answers import chat, completion, streamed_completion
from support.serving import serving
from support.speaking import TEMPLATE, chatty

PROMPT = "for index in"
GREEDY = {"temperature": 0, "max_tokens": 40}


@pytest.fixture(scope="module")
def said(server, tokenizer):
    """The text that the model says by itself, and its tokens."""
    steps = server.steps(prompt=PROMPT, **GREEDY)
    tokens = [token for name, data in steps if name == "step" for token in data["tokens"]]
    assert len(set(tokens)) > 8
    return completion(server, **GREEDY).choices[0].text, tokens


# When a text ends


def test_ids_end_the_text_and_are_not_shown(server, said, tokenizer):
    _, tokens = said
    place = next(place for place, token in enumerate(tokens) if place > 3 and token not in tokens[:place])
    wanted = tokenizer.decode(tokens[:place])
    for ids in ([tokens[place]], [299, tokens[place]]):
        answer = completion(server, **GREEDY, stop_token_ids=ids)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (wanted, "stop")
        assert answer.usage.completion_tokens == place + 1
        parts = streamed_completion(server, **GREEDY, stop_token_ids=ids)
        assert "".join(event.choices[0].text for event in parts if event.choices) == wanted
    last = completion(server, **{**GREEDY, "max_tokens": place + 1}, stop_token_ids=[tokens[place]])
    assert last.choices[0].finish_reason == "stop", "the last token allowed ends it: it was not cut off"


def test_the_models_own_end_may_be_ignored_or_put_off(server, said):
    text, tokens = said
    place = next(place for place, token in enumerate(tokens) if place > 3 and token not in tokens[:place])
    ends = {"generation_config": json.dumps({"eos_token_id": tokens[place]})}

    def asked(**more):
        return completion(server, **GREEDY, **ends, **more)

    assert asked().usage.completion_tokens == place + 1
    whole = asked(ignore_eos=True)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (text, "length")
    assert asked(ignore_eos=False).usage.completion_tokens == place + 1
    later = next(later for later, token in enumerate(tokens) if later > place and token not in tokens[:later])
    both = asked(ignore_eos=True, stop_token_ids=[tokens[later]])
    assert (both.usage.completion_tokens, both.choices[0].finish_reason) == (later + 1, "stop")
    assert asked(min_tokens=place).usage.completion_tokens == place + 1
    put_off = asked(min_tokens=place + 1)
    assert put_off.usage.completion_tokens >= place + 2
    assert put_off.choices[0].text != text


# What a prompt ends with


def test_an_answer_goes_on_with_the_last_message(server):
    messages = [{"role": "user", "content": "import os"}, {"role": "assistant", "content": "for index in"}]
    for more in ({}, {"add_generation_prompt": False}):
        going_on = chat(server, messages=messages, **GREEDY, continue_final_message=True, **more)
        wanted = completion(server, prompt="user: import os\nassistant: for index in", **GREEDY).choices[0].text
        assert going_on.choices[0].message.content == wanted
    bare = chat(server, messages=messages[:1], **GREEDY, add_generation_prompt=False)
    assert bare.choices[0].message.content == completion(server, prompt="user: import os\n", **GREEDY).choices[0].text


def test_an_effort_is_for_templates_that_read_it(server, model):
    assert chat(server, **GREEDY, reasoning_effort="high").choices == chat(server, **GREEDY).choices
    tokenizer = chatty(tiny.tokenizer())
    tokenizer.chat_template = "{{ reasoning_effort }}: " + TEMPLATE
    with serving(model, tokenizer) as other:
        answer = chat(other, **GREEDY, reasoning_effort="low", messages=[{"role": "user", "content": "a"}])
        wanted = completion(other, prompt="low: user: a\nassistant: ", **GREEDY)
        assert answer.choices[0].message.content == wanted.choices[0].text
        assert answer.usage.prompt_tokens == wanted.usage.prompt_tokens


# What is kept of prompts


def test_a_prompt_may_be_read_anew(server):
    prompt = "#print(index)\n" * 9

    def cached(**more):
        answer = completion(server, prompt=prompt, **GREEDY, **more)
        return answer.usage.prompt_tokens_details.cached_tokens, answer.choices[0].text

    first, text = cached(cache_prompt=False)
    assert (first, cached()) == (0, (0, text)), "nothing was kept"
    assert cached(cache_prompt=False) == (0, text)
    kept, again = cached(cache_prompt=True)
    assert kept > 30
    assert again == text


# Answers of a given form

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
FORMS = [
    ({"guided_json": SCHEMA}, {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    ({"guided_json": json.dumps(SCHEMA)}, {"guided_json": SCHEMA}),
    ({"structured_outputs": {"json": SCHEMA}}, {"guided_json": SCHEMA}),
    ({"guided_regex": "[ab]{3}"}, {"response_format": {"type": "regex", "value": "[ab]{3}"}}),
    ({"structured_outputs": {"regex": "[ab]{3}"}}, {"guided_regex": "[ab]{3}"}),
    ({"structured_outputs": {"grammar": 'root ::= "x" [yz]'}}, {"guided_grammar": 'root ::= "x" [yz]'}),
    ({"structured_outputs": {"json_object": True}}, {"response_format": {"type": "json_object"}}),
    ({"structured_outputs": {"choice": ['a "b"', "c\\d"]}}, {"guided_choice": ['a "b"', "c\\d"]}),
]


@pytest.fixture(scope="module")
def ending():
    """A server of a model that can end a text."""
    model = tiny.llama(vocab_size=300, max_position_embeddings=4096)
    model.generation_config.eos_token_id = tiny.tokenizer().eos_token_id
    with serving(model, chatty(tiny.tokenizer())) as running:
        yield running


@pytest.mark.parametrize(("asked", "same"), FORMS, ids=[json.dumps(asked)[:40] for asked, _ in FORMS])
def test_forms_are_those_of_response_format(ending, asked, same):
    texts = [completion(ending, max_tokens=60, seed=3, **body).choices[0].text for body in (asked, same, {})]
    assert texts[0] == texts[1] != texts[2]
    (field,) = asked
    form = asked[field] if field.startswith("guided") else next(iter(asked[field].values()))
    if isinstance(form, list):
        assert texts[0] in form
    if "json" in str(asked) and form is not True:
        assert json.loads(texts[0])["a"] in (1, 2)
    if form == "[ab]{3}":
        assert len(texts[0]) == 3
    message = [{"role": "user", "content": "a"}]
    assert chat(ending, messages=message, max_tokens=60, **asked).choices[0].message.content != ""
