"""Ends of outputs: stop strings, stop ids and EOS tokens, and how much of them is shown."""

import pytest
from support.openai_answers import chat, completion, streamed_completion
from support.serving import serving
from transformers.generation import stopping_criteria

PROMPT = "for index in"
GREEDY = {"temperature": 0, "max_tokens": 40}


@pytest.fixture(scope="module")
def unstopped(server, tokenizer):
    """The output without stops, its tokens, and the positions where tokens first occur."""
    steps = server.steps(prompt=PROMPT, **GREEDY)
    tokens = [token for name, data in steps if name == "step" for token in data["tokens"]]
    new = [place for place, token in enumerate(tokens) if place > 3 and token not in tokens[:place]]
    return tokenizer.decode(tokens), tokens, new


@pytest.fixture(scope="module")
def stop(unstopped):
    """A substring of the output; one of its characters also occurs before it."""
    parts = [unstopped[0][at : at + 3] for at in range(3, 30)]
    return next(part for part in parts if set(part) & set(unstopped[0][: unstopped[0].index(part)]))


def test_stop_string_ends_every_kind_of_answer(server, unstopped, stop):
    """Empty stop strings, which some clients send, have no effect; an option of vLLM shows the stop string."""
    wanted = unstopped[0][: unstopped[0].index(stop)]
    for more, shown in (({}, ""), ({"include_stop_str_in_output": True}, stop)):
        for given in (stop, [stop], ["", stop]):
            answer = completion(server, **GREEDY, stop=given, **more)
            last = completion(server, **{**GREEDY, "max_tokens": answer.usage.completion_tokens}, stop=given, **more)
            for choice in (answer.choices[0], last.choices[0]):  # a stop at the token limit is no truncation
                assert (choice.text, choice.finish_reason) == (wanted + shown, "stop")
    for nothing in ("", [""], []):
        assert completion(server, **GREEDY, stop=nothing).choices[0].text == unstopped[0]
    (*_, (name, end)) = events = server.steps(prompt=PROMPT, **GREEDY, stop=stop)
    shown = "".join("".join(data["texts"]) for kind, data in events if kind == "step") + end["text"]
    assert (name, end["finish_reason"], shown) == ("end", "stop", wanted)
    text = chat(server, temperature=0, max_tokens=24).choices[0].message.content
    body = {"input": "import os", "stop": text[9:12], "temperature": 0, "max_output_tokens": 24}
    answer = server.post("/v1/responses", body).json()
    assert answer["output"][0]["content"][0]["text"] == text[: text.index(text[9:12])]


def test_echo_leaves_the_log_probabilities_of_a_stopped_answer(server, stop):
    alone, echoed = (
        completion(server, **GREEDY, stop=stop, logprobs=0, echo=echo).choices[0].logprobs for echo in (False, True)
    )
    assert alone.tokens == echoed.tokens[-len(alone.tokens) :]
    assert [place + len(PROMPT) for place in alone.text_offset] == echoed.text_offset[-len(alone.tokens) :]


def test_output_ends_with_the_token_that_completes_the_stop_string(server, unstopped, tokenizer):
    """Stop strings of several tokens; every second one has a doubled character."""
    text, tokens, _ = unstopped
    written = [tokenizer.decode(tokens[:count]) for count in range(len(tokens) + 1)]
    ends = set()
    for place in range(2, 30, 3):
        part = text[place : place + 6]
        for stop in (part, part[:3] + part[2:]):
            wanted = next((count for count, shown in enumerate(written) if stop in shown), len(tokens))
            assert completion(server, **GREEDY, stop=stop).usage.completion_tokens == wanted
            ends.add(wanted)
    assert len(ends) > 3


def test_stop_string_of_the_generation_config_ends_outputs(model, tokenizer, unstopped, stop, monkeypatch):
    monkeypatch.setattr(model.generation_config, "stop_strings", stop)
    with serving(model, tokenizer) as server:
        assert completion(server, **GREEDY).choices[0].text == unstopped[0][: unstopped[0].index(stop)]


def test_special_token_can_be_a_stop_string(server, tokenizer):
    special = {"logit_bias": {str(tokenizer.eos_token_id): 100}, "ignore_eos": True}
    assert completion(server, **GREEDY, **special).usage.completion_tokens == 40
    ended = completion(server, **GREEDY, stop=tokenizer.eos_token, **special)
    assert (ended.choices[0].text, ended.choices[0].finish_reason, ended.usage.completion_tokens) == ("", "stop", 1)


def test_stop_strings_are_not_cached(server, stop):
    """transformers caches a table per list of stop strings, which reveals whether another user sent the same list."""
    before = list(stopping_criteria.STOP_STRING_EMBEDDING_CACHE)
    assert completion(server, **GREEDY, stop=[stop]).choices[0].finish_reason == "stop"
    assert list(stopping_criteria.STOP_STRING_EMBEDDING_CACHE) == before


def test_stop_token_ids_end_the_output_and_are_not_shown(server, unstopped, tokenizer):
    _, tokens, (place, *_) = unstopped
    wanted = tokenizer.decode(tokens[:place])
    asked = {**GREEDY, "stop_token_ids": [299, tokens[place]]}
    answer = completion(server, **asked)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (wanted, "stop")
    assert answer.usage.completion_tokens == place + 1
    parts = streamed_completion(server, **asked)
    assert "".join(event.choices[0].text for event in parts if event.choices) == wanted
    last = completion(server, **{**asked, "max_tokens": place + 1})
    assert last.choices[0].finish_reason == "stop", "a stop at the token limit is no truncation"


def test_eos_token_can_be_ignored_or_delayed(server, unstopped, model, monkeypatch):
    text, tokens, (place, later, *_) = unstopped
    monkeypatch.setattr(model.generation_config, "eos_token_id", tokens[place])

    def asked(**more):
        answer = completion(server, **GREEDY, **more)
        return answer.usage.completion_tokens, answer.choices[0].finish_reason, answer.choices[0].text

    assert asked()[:2] == asked(ignore_eos=False)[:2] == (place + 1, "stop")
    assert asked(ignore_eos=True) == (40, "length", text)
    assert asked(ignore_eos=True, stop_token_ids=[tokens[later]])[:2] == (later + 1, "stop")
    assert asked(min_tokens=place)[0] == place + 1
    put_off = asked(min_tokens=place + 1)
    assert (put_off[0] >= place + 2, put_off[2] != text) == (True, True)
