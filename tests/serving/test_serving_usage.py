"""Usage counts, and choices that do not affect each other.

The references are the tokenizer for prompts, and separate requests of one choice for outputs.
"""

from types import SimpleNamespace

import pytest
import torch
from support.cases import paired
from support.serving import PROMPT, serving
from support.speaking import chat_tokenizer, ending_llama

from token_recycling.serving.api import common

PROMPTS = [[PROMPT], [PROMPT, "import os"], [PROMPT, PROMPT, "while True:"]]
FORMS = {
    "regex": {"regex": "(ab|c|de ){2,9}"},
    "choice": {"choice": ["alpha beta", "alpha", "gamma delta"]},
}
SAMPLED = {"temperature": 1.2, "seed": 11, "max_tokens": 12}


@pytest.fixture(scope="module")
def model():
    return ending_llama()


@pytest.fixture(scope="module")
def server(model):
    with serving(model, chat_tokenizer()) as running:
        yield running


@pytest.mark.parametrize(("prompts", "n"), paired(PROMPTS, [3, 1]))
def test_usage_counts_each_prompt_once_and_every_output(server, tokenizer, prompts, n):
    expected = sum(len(tokenizer(prompt)["input_ids"]) for prompt in prompts)
    asked = {"prompt": prompts, "n": n, **SAMPLED, "logprobs": 0}
    answer = server.complete(**asked)
    written = sum(len(choice.logprobs.tokens) for choice in answer.choices)
    *_, last = server.complete(**asked, stream=True, stream_options={"include_usage": True})
    for usage in (answer.usage, last.usage):
        assert (usage.prompt_tokens, usage.completion_tokens) == (expected, written)
        assert usage.total_tokens == expected + written
        statistics = usage.model_extra["speculation"]
        assert statistics["steps"] + statistics["accepted_tokens"] == written, "every step adds a token of the model"
        assert round(statistics["mat"] * statistics["steps"]) == written
    # By now every prompt is cached except its last token, whose logits are needed.
    assert last.usage.prompt_tokens_details.cached_tokens == expected - len(prompts)
    alone = server.complete(**{**asked, "prompt": prompts[-1:], "n": 1}).usage
    assert alone.prompt_tokens_details.cached_tokens == len(tokenizer(prompts[-1])["input_ids"]) - 1


def test_prediction_is_counted_for_every_choice(server, tokenizer):
    predicted, n = "return index", 3
    body = {"messages": [{"role": "user", "content": "a"}], "n": n, "max_tokens": 8}
    prediction = {"type": "content", "content": predicted}
    usage = server.post("/v1/chat/completions", {**body, "prediction": prediction}).json()["usage"]
    details = usage["completion_tokens_details"]
    accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    assert accepted + rejected == n * len(tokenizer(predicted)["input_ids"])
    assert accepted <= usage["completion_tokens"] == 8 * n
    unused = server.post("/v1/chat/completions", {**body, "prediction": prediction, "speculation": {"enabled": False}})
    assert unused.json()["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] == 0
    engine = SimpleNamespace(
        loaded=server.engine.loaded, pool=server.engine.pool, target=SimpleNamespace(vocab_size=280)
    )
    ids = tokenizer(predicted)["input_ids"]
    assert 0 < len(common._predicted(engine, predicted)) < len(ids), "some tokenizers have more tokens than their model"


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_constrained_choices_equal_separate_requests(server, form):
    asked = {"prompt": [PROMPT, "import os"], **SAMPLED, "extra_body": {"structured_outputs": form}}
    together = [(choice.text, choice.finish_reason) for choice in server.complete(**asked, n=3).choices]
    alone = []
    for place in range(6):
        one = {**asked, "prompt": asked["prompt"][place // 3], "seed": SAMPLED["seed"] + place % 3}
        (choice,) = server.complete(**one).choices
        alone.append((choice.text, choice.finish_reason))
    assert together == alone
    assert len(set(together)) > 1


@pytest.mark.parametrize("more", [{"repetition_penalty": 1.8}, {"stop": ["e", "i"]}], ids=str)
def test_choices_equal_single_choice_requests_with_penalties_and_stop_strings(server, more):
    body = {"prompt": PROMPT, **SAMPLED, "max_tokens": 24, **more}
    together = server.post("/v1/completions", {**body, "n": 3}).json()
    alone = [server.post("/v1/completions", {**body, "seed": SAMPLED["seed"] + choice}).json() for choice in range(3)]
    assert [one["text"] for one in together["choices"]] == [one["choices"][0]["text"] for one in alone]
    assert together["usage"]["completion_tokens"] == sum(one["usage"]["completion_tokens"] for one in alone)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.5},
        {"temperature": 1.5, "top_k": 0},
        {"temperature": 1.5, "top_k": -1},
        {"temperature": 1.5, "top_k": 5},
        {"temperature": 1.5, "top_p": 0.8, "min_p": 0.0},
        {"temperature": 1.5, "top_p": 1.0, "min_p": 0.05},
        {"temperature": 0, "top_p": 0.8, "top_k": 0},
        {"temperature": 0.0, "top_p": 0.0},
        {"top_p": 0.8},
    ],
    ids=str,
)
def test_sampled_outputs_equal_generate(server, model, tokenizer, sampling):
    """Without `top_k`, all tokens can be sampled, as in OpenAI's API."""
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    how = {"do_sample": False}
    if sampling.get("temperature") != 0:
        how = {"do_sample": True, "temperature": 1.0, **sampling, "top_k": max(0, sampling.get("top_k", 0))}
    body = {"prompt": PROMPT, "max_tokens": 12, "seed": 0, "n": 3, **sampling}
    choices = server.post("/v1/completions", body).json()["choices"]
    for seed, choice in enumerate(choices):
        torch.manual_seed(seed)
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, pad_token_id=0, **how)
        assert choice["text"] == tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
    assert len(choices) == 3


def test_prompt_of_the_context_length_can_be_scored(server):
    prompt = [5] * server.engine.loaded.context
    asked = {"prompt": prompt, "echo": True, "logprobs": 0}
    (choice,) = server.post("/v1/completions", {**asked, "max_tokens": 0}).json()["choices"]
    assert (len(choice["logprobs"]["tokens"]), choice["finish_reason"]) == (len(prompt), "length")
    refused = server.post("/v1/completions", {**asked, "max_tokens": 1})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
