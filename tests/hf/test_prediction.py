"""The option `prediction`: it never changes the output, and saves steps if it is correct."""

from __future__ import annotations

import pytest
import torch
from support import tiny
from support.runs import fix_costs, freeze_overhead

from token_recycling import Stats, generate

pytestmark = pytest.mark.core

TOKENS = 60


@pytest.fixture
def arguments(model, monkeypatch):
    fix_costs(monkeypatch, (1, 64), (1.0, 1.1))
    freeze_overhead(monkeypatch)
    ids = torch.randint(0, 60, (1, 12), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module")
def model():
    return tiny.llama()


def generated(model, arguments, **more):
    stats = Stats()
    text = generate(model, stats=stats, **arguments, **more)
    return text[0, arguments["input_ids"].shape[1] :].tolist(), stats


@pytest.mark.parametrize("drafter", ["recycling", "fuse:recycling+recycling(k=4)"])
def test_correct_prediction_saves_steps(model, arguments, drafter):
    wanted = model.generate(**arguments)[0, 12:].tolist()
    plain, before = generated(model, arguments, drafter=drafter)
    text, stats = generated(model, arguments, drafter=drafter, prediction=wanted)
    assert text == plain == wanted
    assert stats.steps <= 8 < before.steps
    assert stats.drafter_statistics["predicted_tokens"] == TOKENS
    generate(model, stats=stats, drafter=drafter, prediction=wanted, **arguments)
    assert stats.drafter_statistics["predicted_tokens"] == 2 * TOKENS, "calls with one `Stats` add up"
    assert stats.tokens == 2 * TOKENS
    assert "predicted_tokens" not in before.drafter_statistics


@pytest.mark.parametrize("sampled", [False, True])
def test_wrong_prediction_does_not_change_the_output(model, arguments, sampled):
    if sampled:
        arguments |= {"do_sample": True, "temperature": 1.0}
    texts = []
    for prediction in (None, [3] * 50, list(range(60)), []):
        torch.manual_seed(5)
        texts.append(generated(model, arguments, prediction=prediction)[0])
    assert texts == [texts[0]] * 4


def test_prediction_as_text_equals_that_of_its_token_ids(arguments):
    """Without the special token that begins a prompt."""
    tokenizer, model = tiny.tokenizer_with_bos(), tiny.llama(vocab_size=300)
    text = tokenizer.decode(model.generate(**arguments)[0, 12:])
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    _, stats = generated(model, arguments, prediction=text, tokenizer=tokenizer)
    _, of_ids = generated(model, arguments, prediction=ids)
    assert 0 < stats.drafter_statistics["predicted_tokens"] <= len(ids)
    assert (stats.steps, stats.drafter_statistics) == (of_ids.steps, of_ids.drafter_statistics)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"drafter": "lookahead", "prediction": [1]}, "lookahead"),
        ({"drafter": "recycling:suffix=false", "prediction": [1]}, "recycling"),
        ({"prediction": "a"}, "tokenizer="),
        ({"prediction": [1_000_000]}, "got 1000000"),
    ],
)
def test_unusable_prediction_is_rejected(model, arguments, given, message):
    with pytest.raises(ValueError, match=message):
        generate(model, **arguments, **given)


def test_prediction_may_have_every_token_of_the_vocabulary(model, arguments):
    vocabulary = model.config.vocab_size
    generate(model, **arguments, prediction=[vocabulary - 1])
    for more in ({"prediction": [vocabulary]}, {"prediction": [-1]}):
        with pytest.raises(ValueError, match="ids of a prediction must"):
            generate(model, **arguments, **more)
