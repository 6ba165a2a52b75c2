"""Every field of OpenAI's and Anthropic's requests: honored as defined there, ignored, or refused by name."""

import itertools
import pkgutil

import pytest
import torch
from support import tiny
from support.openai_answers import MESSAGES, chat, completion, streamed_chat, streamed_completion
from support.serving import serving
from support.speaking import TEMPLATE

from token_recycling.serving import errors
from token_recycling.serving.api.completions import CompletionRequest
from token_recycling.serving.api.messages import MessagesRequest
from token_recycling.serving.api.responses import ResponsesRequest
from token_recycling.serving.generation import AdditivePenalties
from token_recycling.serving.logprobs import chat_logprobs, completion_logprobs
from token_recycling.serving.output import ScoredToken
from token_recycling.serving.protocol import ChatRequest

PROMPT = "for index in"
ASKED = {
    "/v1/completions": (CompletionRequest, {"prompt": PROMPT, "max_tokens": 1}),
    "/v1/chat/completions": (ChatRequest, {"messages": MESSAGES, "max_tokens": 1}),
    "/v1/responses": (ResponsesRequest, {"input": "a", "max_output_tokens": 1}),
    "/v1/messages": (MessagesRequest, {"messages": MESSAGES, "max_tokens": 1}),
}
CLIENTS = {
    "/v1/completions": "openai.types.completion_create_params:CompletionCreateParamsStreaming",
    "/v1/chat/completions": "openai.types.chat.completion_create_params:CompletionCreateParamsStreaming",
    "/v1/responses": "openai.types.responses.response_create_params:ResponseCreateParamsStreaming",
    "/v1/messages": "anthropic.types.beta.message_create_params:MessageCreateParamsStreaming",
}
"""The fields that the official clients send. Their packages take seconds to import."""


@pytest.mark.parametrize("path", ASKED)
def test_other_fields_are_ignored_with_one_warning_each(server, caplog, monkeypatch, path):
    """All fields of the official clients that are neither honored nor refused, and an unknown one."""
    monkeypatch.setattr(errors.warn_ignored, "_subjects", set())
    kind, body = ASKED[path]
    fields = pkgutil.resolve_name(CLIENTS[path]).__annotations__.keys()
    hints = fields - kind.model_fields.keys() - kind.unsupported.keys() | {"swing"}
    for _ in range(2):
        assert server.post(path, {**body, **dict.fromkeys(hints, "anything")}).status_code == 200
    warned = [record.args[0] for record in caplog.records if record.levelname == "WARNING"]
    assert sorted(warned) == sorted(hints)


@pytest.mark.parametrize(
    ("path", "body", "tool", "choice"),
    [
        (*("/v1/chat/completions", ASKED["/v1/chat/completions"][1]), {"function": {"name": "look"}}, "none"),
        (*("/v1/responses", ASKED["/v1/responses"][1]), {"type": "function", "name": "look"}, "none"),
        (*("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}), {"name": "look"}, {"type": "none"}),
    ],
    ids=["chat", "responses", "messages"],
)
def test_tools_of_unknown_types_are_skipped_with_a_warning(server, caplog, monkeypatch, path, body, tool, choice):
    monkeypatch.setattr(errors.warn_ignored, "_subjects", set())
    others = [{"type": "search_2099", "name": "search"}, {"type": "shell"}]
    answer = server.post(path, {**body, "tools": [others[0], tool, others[1]], "tool_choice": choice})
    assert answer.status_code == 200, answer.text
    warned = [record.args[0] for record in caplog.records if record.levelname == "WARNING"]
    assert warned == ["a tool of type search_2099", "a tool of type shell"]


def test_names_of_ignored_fields_do_not_fill_the_log(server, caplog, monkeypatch):
    """Clients choose these names, so they are escaped, truncated and limited in number."""
    monkeypatch.setattr(errors.warn_ignored, "_subjects", set())
    names = ["line\nbreak", "x" * 5000, *(f"swing {number}" for number in range(1000))]
    completion(server, max_tokens=1, **dict.fromkeys(names, 1))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 200
    assert max(map(len, said)) < 200
    assert not any("\n" in one for one in said)


@pytest.mark.parametrize("path", ASKED)
def test_unsupported_fields_are_refused_by_name(server, path):
    kind, body = ASKED[path]
    for name in kind.unsupported.keys() - kind.model_fields:
        answer = server.post(path, {**body, name: "anything"})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", name)
        assert error["code"] == "unsupported"


@pytest.mark.parametrize("path", ASKED)
def test_harmless_values_of_unsupported_fields_are_accepted(server, path):
    """One request sends the first harmless value of every field, the next one the second values, and so on."""
    kind, body = ASKED[path]
    harmless = {name: (None, *kind.unsupported[name][1]) for name in kind.unsupported.keys() - kind.model_fields}
    for values in itertools.zip_longest(*harmless.values()):
        answer = server.post(path, {**body, **dict(zip(harmless, values, strict=True))})
        assert answer.status_code == 200, answer.text


# Changes of logits, compared with a loop written here


def greedy_output(model, tokenizer, change=lambda logits, answer, asked: None, tokens=32, asked=None):
    """Return the greedy output after a prompt of token ids, with `change(logits, answer, prompt)` at every step."""
    asked, answer = asked or tokenizer(PROMPT)["input_ids"], []
    for _ in range(tokens):
        with torch.no_grad():
            logits = model(torch.tensor([asked + answer])).logits[0, -1].clone()
        change(logits, answer, asked)
        answer.append(int(logits.argmax()))
    return tokenizer.decode(answer)


def penalized(frequency, presence):
    """Return OpenAI's penalties, which count tokens of the answer, not of the prompt."""

    def change(logits, answer, asked):
        for token in set(answer):
            logits[token] -= answer.count(token) * frequency + presence

    return change


def repeated(logits, answer, asked):
    for token in {*asked, *answer}:
        logits[token] *= 1.3 if logits[token] < 0 else 1 / 1.3


def biased(logits, answer, asked):
    for token in BIAS:
        logits[token] += BIAS[token]


BIAS = dict.fromkeys(range(0, 100, 3), 3.0) | {7: -100.0}
CHANGES = [
    ({"frequency_penalty": 1.5}, penalized(1.5, 0)),
    ({"presence_penalty": 2}, penalized(0, 2)),
    ({"frequency_penalty": 0.3, "presence_penalty": -0.7}, penalized(0.3, -0.7)),
    ({"repetition_penalty": 1.3}, repeated),
    ({"logit_bias": {str(token): value for token, value in BIAS.items()}}, biased),
]


@pytest.fixture(scope="module")
def unchanged(model, tokenizer):
    return greedy_output(model, tokenizer)


@pytest.mark.parametrize(("asked", "change"), CHANGES)
def test_penalties_and_biases_change_logits_as_defined(server, model, tokenizer, unchanged, asked, change):
    wanted = greedy_output(model, tokenizer, change)
    assert wanted != unchanged
    said = completion(server, temperature=0, max_tokens=32, **asked)
    assert said.choices[0].text == wanted
    assert said.usage.model_extra["speculation"]["accelerated"]


@pytest.mark.parametrize("length", [0, 1])
def test_penalties_do_not_count_the_last_prompt_tokens(server, model, tokenizer, length):
    """A token of the answer is the last or second-to-last token of the prompt."""
    first, second = tokenizer(greedy_output(model, tokenizer, tokens=2))["input_ids"]
    asked = [*tokenizer(PROMPT)["input_ids"], *[first, second][: 1 + length]]
    said = tokenizer(greedy_output(model, tokenizer, asked=asked))["input_ids"]
    for last in [*dict.fromkeys(said)][:5]:
        prompt = [*asked, last, *[second] * length]
        wanted = greedy_output(model, tokenizer, penalized(2, 0), asked=prompt, tokens=8)
        answer = completion(server, prompt=prompt, temperature=0, max_tokens=8, frequency_penalty=2)
        assert answer.choices[0].text == wanted


OFF = {"top_k": 0, "min_p": 0, "top_p": 1, "repetition_penalty": 1, "min_tokens": 0, "temperature": 1}


@pytest.mark.parametrize("off", [OFF, {**OFF, "top_k": -1}])
def test_requests_can_disable_the_models_sampling_settings(server, model, monkeypatch, off):
    """Each setting has a neutral value, which is easily mistaken for a missing one."""
    own = model.generation_config

    def texts():
        return [choice.text for choice in completion(server, max_tokens=24, seed=0, n=3, **off).choices]

    wanted = texts()
    assert len(set(wanted)) == 3
    settings = {
        "top_k": 1,
        "min_p": 1.0,
        "top_p": 0.01,
        "repetition_penalty": 2.0,
        "min_new_tokens": 90,
        "temperature": 0.01,
    }
    for name, value in settings.items():
        with monkeypatch.context() as patch:
            patch.setattr(own, name, value)
            assert texts() == wanted, name


# Several prompts


def test_several_prompts_as_strings_or_token_ids(server, tokenizer):
    prompts = [PROMPT, "import os"]
    wanted = [completion(server, prompt=prompt, temperature=0).choices[0].text for prompt in prompts]
    ids = tokenizer(prompts)["input_ids"]
    for given in (prompts, ids):
        answer = completion(server, prompt=given, temperature=0)
        assert [choice.text for choice in answer.choices] == wanted
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        assert answer.usage.completion_tokens == 2 * 16, "OpenAI's default"
        assert [choice.index for choice in answer.choices] == [0, 1]
    assert completion(server, prompt=ids[1], temperature=0).choices[0].text == wanted[1]


# Log-probabilities


def log_probabilities(model, ids):
    """Return log-probabilities for every token after the first: (length - 1, vocabulary)."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].float(), dim=-1)


HARDER = {"temperature": 1.2, "top_p": 0.9, "repetition_penalty": 1.2}


@pytest.mark.parametrize("how", [{"temperature": 0}, HARDER])
def test_log_probabilities_are_those_of_the_raw_logits(server, model, tokenizer, how):
    said = completion(server, max_tokens=24, logprobs=3, presence_penalty=0.5, seed=3, **how).choices[0]
    ids = tokenizer(PROMPT, return_tensors="pt")
    asked = ids["input_ids"].shape[1]
    drawing = {"do_sample": True, "top_k": 0, **how} if how["temperature"] else {"do_sample": False}
    torch.manual_seed(3)
    penalty = [AdditivePenalties(0, 0.5, asked)]
    text = model.generate(**ids, max_new_tokens=24, pad_token_id=0, logits_processor=penalty, **drawing)[0].tolist()
    assert said.text == tokenizer.decode(text[asked:])
    found, rows = said.logprobs, log_probabilities(model, text)[asked - 1 :]
    assert found.tokens == [tokenizer.decode([token]) for token in text[asked:]]
    wanted = [float(row[token]) for row, token in zip(rows, text[asked:], strict=True)]
    assert found.token_logprobs == pytest.approx(wanted, abs=1e-4)
    for row, top, token in zip(rows, found.top_logprobs, found.tokens, strict=True):
        best = {tokenizer.decode([one]) for one in row.topk(3).indices.tolist()}
        assert set(top) == best | {token}
        assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-4)


def test_log_probabilities_of_a_chat(server, model, tokenizer):
    said = chat(server, max_tokens=12, temperature=0, logprobs=True, top_logprobs=2).choices[0]
    asked = tokenizer("user: import os\nassistant: ")["input_ids"]
    found = said.logprobs.content
    assert "".join(one.token for one in found) == said.message.content
    assert b"".join(bytes(one.bytes) for one in found).decode() == said.message.content
    tokens = [next(one for one in range(300) if tokenizer.decode([one]) == entry.token) for entry in found]
    rows = log_probabilities(model, asked + tokens)[len(asked) - 1 :]
    for row, entry in zip(rows, found, strict=True):
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
        assert entry.logprob == entry.top_logprobs[0].logprob
    parts = [event.choices[0] for event in streamed_chat(server, max_tokens=12, temperature=0, logprobs=True)]
    assert [one.token for part in parts if part.logprobs for one in part.logprobs.content] == [
        one.token for one in found
    ]


@pytest.mark.parametrize("stopped", [False, True])
def test_streamed_log_probabilities_equal_unstreamed_ones(server, stopped):
    asked = {"temperature": 1.0, "seed": 4, "max_tokens": 40, "logprobs": 1, "echo": True}
    if stopped:
        asked["stop"] = completion(server, **asked).choices[0].text[len(PROMPT) + 9 :][:2]
    whole = completion(server, **asked).choices[0]
    assert (whole.finish_reason == "stop") == stopped
    parts = [event.choices[0] for event in streamed_completion(server, **asked)]
    assert "".join(part.text for part in parts) == whole.text
    assert [token for part in parts for token in part.logprobs.tokens] == whole.logprobs.tokens
    assert [one for part in parts for one in part.logprobs.text_offset] == whole.logprobs.text_offset
    assert max(whole.logprobs.text_offset) < len(whole.text)
    assert whole.logprobs.text_offset == sorted(whole.logprobs.text_offset)


def test_echo_includes_the_log_probabilities_of_the_prompt(server, model, tokenizer):
    prompt = "import os\n" * 60
    said = completion(server, prompt=prompt, max_tokens=4, temperature=0, echo=True, logprobs=0).choices[0]
    after = completion(server, prompt=prompt, max_tokens=4, temperature=0).choices[0].text
    assert said.text == prompt + after
    ids = tokenizer(prompt)["input_ids"]
    assert said.logprobs.token_logprobs[0] is None
    rows = log_probabilities(model, ids)
    wanted = [float(row[token]) for row, token in zip(rows, ids[1:], strict=True)]
    assert len(ids) > 128
    assert said.logprobs.token_logprobs[1 : len(ids)] == pytest.approx(wanted, abs=1e-4)
    assert "".join(said.logprobs.tokens) == said.text
    assert said.logprobs.top_logprobs is None
    for special in ([], [tokenizer.eos_token_id]):
        asked = {"prompt": [*special, *tokenizer(PROMPT)["input_ids"]], "echo": True}
        assert completion(server, **asked).choices[0].text.startswith(PROMPT)


def test_recurring_tokens_are_decoded_once_for_a_response(tokenizer, monkeypatch):
    decoded, decode = [], type(tokenizer).decode
    counted = lambda own, tokens, **options: decoded.append(tokens) or decode(own, tokens, **options)  # noqa: E731
    monkeypatch.setattr(type(tokenizer), "decode", counted)
    tokens = [ScoredToken(65, -1.0, [(65, -1.0), (66, -2.0)]) for _ in range(9)]
    assert len(chat_logprobs(tokenizer, tokens)["content"]) == 9
    assert decoded == [[65], [66]]
    decoded.clear()
    assert len(completion_logprobs(tokenizer, tokens, [0] * 9, 2)["tokens"]) == 9
    assert decoded == [[65], [66]]


def test_token_bytes_join_to_the_text_even_within_characters(server):
    """A token of random text is often part of a character, or invalid UTF-8."""
    said = chat(server, max_tokens=60, temperature=100, seed=2, logprobs=True, top_logprobs=3).choices[0]
    content = said.logprobs.content
    assert len(content) == 60
    assert b"".join(bytes(one.bytes) for one in content).decode(errors="replace") == said.message.content
    assert any(bytes(one.bytes).decode(errors="ignore").encode() != bytes(one.bytes) for one in content)
    assert all(other.bytes is not None for one in content for other in one.top_logprobs)


@pytest.mark.parametrize("word", ["▁index", "▁▁"])
def test_text_that_continues_a_prompt_begins_with_the_space_of_its_first_token(word):
    """SentencePiece decodes no space before the first token of a text."""
    tokenizer = tiny.sentencepiece_tokenizer()
    tokenizer.chat_template = TEMPLATE
    token, space = tokenizer.convert_tokens_to_ids(word), word.replace("▁", " ")
    forced = {"max_tokens": 2, "temperature": 0, "logit_bias": {str(token): 100}}
    begun = [*MESSAGES, {"role": "assistant", "content": PROMPT}]
    with serving(tiny.llama(vocab_size=len(tokenizer)), tokenizer) as server:
        for prompt in (PROMPT, "", tokenizer(PROMPT)["input_ids"]):
            text = PROMPT + 2 * space if prompt else (2 * space)[1:]
            said = completion(server, prompt=prompt or [tokenizer.eos_token_id], echo=True, logprobs=1, **forced)
            assert said.choices[0].text == "".join(said.choices[0].logprobs.tokens).removeprefix("</s>") == text
        after = completion(server, logprobs=2, **forced).choices[0]
        streamed = streamed_completion(server, **forced)
        assert after.text == "".join(event.choices[0].text for event in streamed) == 2 * space
        assert (after.logprobs.text_offset, after.logprobs.tokens) == ([0, len(space)], [space] * 2)
        assert all(space in top for top in after.logprobs.top_logprobs)
        assert completion(server, stop=space, **forced).usage.completion_tokens == 1
        said = chat(server, messages=begun, continue_final_message=True, logprobs=True, **forced).choices[0]
        assert said.message.content == b"".join(bytes(one.bytes) for one in said.logprobs.content).decode() == 2 * space
        assert server.post("/v1/messages", {"messages": begun, **forced}).json()["content"][0]["text"] == 2 * space
        fresh = chat(server, logprobs=True, **forced).choices[0]
        assert fresh.message.content == "".join(one.token for one in fresh.logprobs.content) == (2 * space)[1:]
