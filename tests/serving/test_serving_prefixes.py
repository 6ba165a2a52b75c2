"""Prefixes cached between requests: outputs equal those of a cold cache, and every key has its own prefixes."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from support.noting import noted
from support.releases import needs
from support.runs import fix_costs, freeze_overhead
from support.serving import keys, serving
from support.speaking import forgetful_chat

from token_recycling.serving.settings import Isolation

LONG = "import os\nfor index in range(10):\n    print(index)\n" * 6
ASKED = {"max_tokens": 20, "temperature": 0}


def converse(server, key="none", turns=4, **more):
    """Return the answers of a conversation that every turn sends whole, and (cached, all) tokens of each prompt."""
    messages, answers, cached = [], [], []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{LONG if not turn else ''}add {turn}"})
        answer = server.client(key).chat.completions.create(model="tiny", messages=messages, **ASKED, **more)
        answers.append(answer.choices[0].message.content)
        cached.append((answer.usage.prompt_tokens_details.cached_tokens, answer.usage.prompt_tokens))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers, cached


@pytest.mark.parametrize("concurrency", [1, 3])
def test_cached_conversation_equals_that_of_a_cold_cache(model, tokenizer, concurrency):
    with serving(model, tokenizer, cache=0, concurrency=concurrency) as server:
        wanted, cached = converse(server)
        assert [n for n, _ in cached] == [0] * 4
    with serving(model, tokenizer, concurrency=concurrency) as server:
        answers, cached = converse(server)
        assert answers == wanted
        assert cached[0][0] == 0
        assert all(n > 100 for n, _ in cached[1:])
        assert all(0 < length - n < 60 for n, length in cached[1:])
        again, cached = converse(server)
        assert again == wanted
        assert [length - n for n, length in cached] == [1] * 4
        metrics = server.metrics()
        assert metrics["token_recycling_cached_bytes"] == server.engine.prefixes.nbytes > 0
        assert metrics["token_recycling_cached_tokens_total"] > 1000


@needs(5, 14)
@pytest.mark.parametrize("concurrency", [1, 2])
def test_recurrent_states_resume_where_the_template_drops_reasoning(concurrency):
    model, tokenizer = forgetful_chat()
    with serving(model, tokenizer, cache=0, concurrency=concurrency) as server:
        wanted, _ = converse(server)
    with serving(model, tokenizer, concurrency=concurrency) as server:
        answers, cached = converse(server)
    assert answers == wanted
    assert all(0 < length - n < 130 < length for n, length in cached[1:])


def test_keys_do_not_share_cached_prefixes(model, tokenizer):
    given = {"keys": keys("a", "b")}
    for isolation in (Isolation.per_key, Isolation.shared):
        with serving(model, tokenizer, isolation=isolation, **given) as server:
            converse(server, "secret-a", 2)
            _, cached = converse(server, "secret-b", 2)
            assert cached[0][0] == 0 < cached[1][0]
            assert converse(server, "secret-a", 2)[1][0][0] > 100
    with serving(model, tokenizer, isolation=Isolation.per_request, **given) as server:
        assert [converse(server, "secret-a", 2)[1][turn][0] for turn in (0, 1)] == [0, 0]
        assert server.engine.prefixes.nbytes == 0


def test_shared_prefix_is_read_once(model, tokenizer):
    with serving(model, tokenizer, concurrency=4) as server:
        length = len(tokenizer(LONG)["input_ids"])
        read, hook = noted(model, lambda given: given["input_ids"].numel())
        try:
            several = server.complete(prompt=LONG, n=3, temperature=0, max_tokens=2)
            assert len({choice.text for choice in several.choices}) == 1
            assert sum(size for size in read if size > 40) < 1.5 * length
            read.clear()
            with ThreadPoolExecutor(4) as pool:
                asked = [f"{LONG[::-1]} {end}" for end in "abcd"]
                list(pool.map(lambda prompt: server.complete(prompt=prompt, max_tokens=2), asked))
            length = len(tokenizer(LONG[::-1])["input_ids"])
            assert sum(size for size in read if size > 40) < 1.5 * length
        finally:
            hook.remove()


@pytest.mark.parametrize("concurrency", [1, 4])
def test_isolated_request_reads_its_prompt_once_for_all_choices(model, tokenizer, concurrency):
    with serving(model, tokenizer, concurrency=concurrency, isolation=Isolation.per_request) as server:
        length = len(tokenizer(LONG)["input_ids"])
        for _ in range(2):
            read, hook = noted(model, lambda given: given["input_ids"].numel())
            answer = server.complete(prompt=LONG, n=4, temperature=0, max_tokens=2)
            hook.remove()
            assert length <= sum(size for size in read if size > 40) < 1.5 * length
            assert answer.usage.prompt_tokens_details.cached_tokens == 0
            assert server.engine.prefixes.nbytes == 0


def test_cache_prompt_false_neither_uses_nor_fills_the_cache(server):
    def cached(**more):
        answer = server.complete(prompt="#print(index)\n" * 9, temperature=0, extra_body=more)
        return answer.usage.prompt_tokens_details.cached_tokens, answer.choices[0].text

    first, text = cached(cache_prompt=False)
    assert (first, cached()) == (0, (0, text)), "nothing is cached"
    assert cached(cache_prompt=False) == (0, text)
    kept, again = cached(cache_prompt=True)
    assert (kept > 30, again) == (True, text)


@pytest.mark.parametrize("limit", [0.05, 0.2])
def test_cached_prefixes_stay_under_the_memory_limit(model, tokenizer, limit):
    with serving(model, tokenizer, cache=limit) as server:
        for place in range(12):
            server.complete(prompt=f"{place} {LONG}", max_tokens=2)
            assert server.engine.prefixes.nbytes <= 1e6 * limit
        assert server.engine.prefixes.nbytes > 0.2e6 * limit


# Speculation settings of a request


def test_speculation_can_be_limited_and_disabled(model, tokenizer, monkeypatch):
    fix_costs(monkeypatch, (1, 64), (1.0, 1.1))
    freeze_overhead(monkeypatch)
    with serving(model, tokenizer, drafter="recycling") as server:

        def asked(**more):
            answer = server.complete(prompt=LONG, max_tokens=40, temperature=0, **more)
            return answer.choices[0].text, answer.usage.model_extra["speculation"]

        text, usual = asked()
        for given, most in ((None, None), ({"enabled": True}, None), ({"nodes": 3}, 3), ({"nodes": 1}, 1)):
            said, stated = asked(extra_body={"speculation": given})
            assert said == text
            if most is not None:
                assert 0 < stated["drafted_tokens"] <= most * stated["steps"] < usual["drafted_tokens"]
        said, stated = asked(extra_body={"speculation": {"enabled": False}})
        assert (said, stated["drafted_tokens"], stated["steps"]) == (text, 0, 40)
        assert stated["drafter"].startswith("plain")
        (_, *_, (_, end)) = server.steps(prompt=LONG, max_tokens=20, temperature=0, speculation={"nodes": 2})
        assert end["usage"]["speculation"]["drafted_tokens"] <= 2 * end["usage"]["speculation"]["steps"]


@pytest.mark.parametrize("concurrency", [1, 2])
def test_predictions_are_drafted_and_counted(model, tokenizer, concurrency):
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "import os"}], "max_tokens": 40}
    with serving(model, tokenizer, concurrency=concurrency, isolation=Isolation.per_request) as server:
        create = server.client().chat.completions.create
        plain = create(**asked, temperature=0)
        assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0
        text = plain.choices[0].message.content
        for content in (text, [{"type": "text", "text": text}]):
            predicted = create(**asked, temperature=0, prediction={"type": "content", "content": content})
            assert predicted.choices[0].message.content == text
            details = predicted.usage.completion_tokens_details
            length = len(tokenizer(text, add_special_tokens=False)["input_ids"])
            assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == length
            assert details.accepted_prediction_tokens > 0.8 * length
            steps = [said.usage.model_extra["speculation"]["steps"] for said in (plain, predicted)]
            assert steps[1] < 0.7 * steps[0]
        wrong = create(**asked, temperature=0, prediction={"type": "content", "content": "99 " * 40}, n=2)
        assert {choice.message.content for choice in wrong.choices} == {text}
        assert wrong.usage.completion_tokens_details.rejected_prediction_tokens > 60
    with serving(model, tokenizer, drafter="suffix") as server, pytest.raises(openai.BadRequestError, match="drafter"):
        server.client().chat.completions.create(**asked, prediction={"type": "content", "content": "a"})


def test_prediction_is_private_to_its_request(model, tokenizer):
    """Even a shared drafter does not learn predicted tokens that were not generated."""
    secret = "the secret word of the day is swordfish " * 3
    with serving(model, tokenizer) as server:
        server.complete(prompt="import os\nfor", max_tokens=4, temperature=0)

        def learned():
            return server.engine.pool.acquire("").matrix.history.tokens.tolist()

        before = learned()
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "swordfish is"}], "max_tokens": 1}
        server.client().chat.completions.create(**asked, prediction={"type": "content", "content": secret})
        added = learned()[len(before) :]
    assert len(added) <= 3
