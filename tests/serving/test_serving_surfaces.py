"""Outputs of every endpoint equal those of `generate`: whole and streamed, alone and in a batch with others."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.openai_answers import MESSAGES, chat, completion, streamed_chat, streamed_completion

TOKENS = 24
GREEDY = {"temperature": 0, "max_tokens": TOKENS}
SEEDED = {"temperature": 1.5, "seed": 1, "max_tokens": TOKENS}


def texts_of(events):
    return "".join(choice.text for event in events for choice in event.choices)


def completed(server):
    answer = completion(server, **GREEDY)
    choice, usage = answer.choices[0], answer.usage
    assert (answer.model, answer.object, choice.finish_reason) == ("tiny", "text_completion", "length")
    said = usage.model_extra["speculation"]
    assert said["accelerated"]
    assert said["drafter"].startswith("recycling")
    assert said["mat"] == pytest.approx(TOKENS / said["steps"], abs=1e-4)
    assert 0 < said["accepted_tokens"] == TOKENS - said["steps"] <= said["drafted_tokens"]
    assert (usage.completion_tokens, said["tokens_per_second"] > 0) == (TOKENS, True)
    return choice.text


def streamed(server):
    *events, last = streamed_completion(server, **GREEDY, stream_options={"include_usage": True})
    assert len(events) > 3
    assert events[-1].choices[0].finish_reason == "length"
    assert last.usage.completion_tokens == TOKENS
    assert not any(event.usage for event in [*events, *streamed_completion(server, max_tokens=2)])
    return texts_of(events)


def echoed(server):
    choice = completion(server, **GREEDY, echo=True, logprobs=1).choices[0]
    assert "".join(choice.logprobs.tokens) == choice.text
    return choice.text.removeprefix("for index in")


def in_steps(server):
    (_, *steps, (_, end)) = server.steps(prompt="for index in", **GREEDY)
    return "".join("".join(data["texts"]) for _, data in steps) + end["text"]


def sampled(server):
    return completion(server, **SEEDED).choices[0].text


def sampled_streamed(server):
    return texts_of(streamed_completion(server, **SEEDED))


def chatted(server):
    """`max_completion_tokens` and content in parts are sent by newer clients."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "import os"}]}]
    answer = chat(server, temperature=0, max_completion_tokens=TOKENS, max_tokens=1, messages=parts)
    assert answer.usage.completion_tokens == TOKENS
    return answer.choices[0].message.content


def chatted_streamed(server):
    return "".join(event.choices[0].delta.content or "" for event in streamed_chat(server, **GREEDY))


ASKED = {"model": "tiny", "input": "import os", "max_output_tokens": TOKENS, "temperature": 0}


def assert_incomplete(answer):
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.model_extra["speculation"]["steps"] > 0


def responded(server):
    answer = server.client().responses.create(**ASKED)
    assert_incomplete(answer)
    return answer.output_text


def responded_streamed(server):
    with server.client().responses.stream(**ASKED) as stream:
        events = list(stream)
        assert_incomplete(stream.get_final_response())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def messaged(server):
    answer = server.post("/v1/messages", {**GREEDY, "messages": MESSAGES}).json()
    assert (answer["type"], answer["role"], answer["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert answer["usage"]["output_tokens"] == TOKENS
    (block,) = answer["content"]
    return block["text"]


def messaged_streamed(server):
    text = server.post("/v1/messages", {**GREEDY, "messages": MESSAGES, "stream": True}).text
    first, *rest = (json.loads(event.partition("\ndata: ")[2]) for event in text.split("\n\n") if event)
    assert (first["type"], first["message"]["content"]) == ("message_start", [])
    assert rest[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    return "".join(event["delta"]["text"] for event in rest if event["type"] == "content_block_delta")


COMPLETING = (completed, streamed, echoed, in_steps)
SAMPLING = (sampled, sampled_streamed)
CHATTING = (chatted, chatted_streamed, responded, responded_streamed, messaged, messaged_streamed)


@pytest.fixture(scope="module")
def wanted(model, tokenizer):
    """The output of `generate` for every function above."""

    def generated(prompt, **how):
        ids = tokenizer(prompt, return_tensors="pt")
        said = model.generate(**ids, pad_token_id=0, max_new_tokens=TOKENS, **how)[0, ids["input_ids"].shape[1] :]
        return tokenizer.decode(said, skip_special_tokens=True)

    texts = dict.fromkeys(COMPLETING, generated("for index in", do_sample=False))
    texts |= dict.fromkeys(CHATTING, generated("user: import os\nassistant: ", do_sample=False))
    torch.manual_seed(SEEDED["seed"])
    sampling = {"do_sample": True, "temperature": SEEDED["temperature"], "top_k": 0}
    return texts | dict.fromkeys(SAMPLING, generated("for index in", **sampling))


@pytest.mark.parametrize("ask", [*COMPLETING, *SAMPLING, *CHATTING], ids=lambda ask: ask.__name__)
def test_output_equals_generate(server, wanted, ask):
    assert ask(server) == wanted[ask]


def test_concurrent_outputs_equal_generate(server, wanted):
    """24 requests of several lengths share four batch slots."""
    with ThreadPoolExecutor(12) as pool:
        asked = [*wanted, *reversed(wanted)]
        texts = list(pool.map(lambda ask: ask(server), asked))
    assert texts == [wanted[ask] for ask in asked]
