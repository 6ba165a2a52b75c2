"""What is expected to follow: the text is the same whatever was predicted, in fewer steps where it was right."""

from __future__ import annotations

import pytest
import torch
from support import tiny
from support.runs import fix_costs, fix_work

from token_recycling import Stats, generate

pytestmark = pytest.mark.core

TOKENS = 60


@pytest.fixture
def asked(model, monkeypatch):
    fix_costs(monkeypatch, (1, 64), (1.0, 1.1))
    fix_work(monkeypatch)
    ids = torch.randint(0, 60, (1, 12), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module")
def model():
    return tiny.llama()


def said(model, asked, **more):
    stats = Stats()
    text = generate(model, stats=stats, **asked, **more)
    return text[0, asked["input_ids"].shape[1] :].tolist(), stats


@pytest.mark.parametrize("drafter", ["recycling", "fuse:recycling+suffix"])
def test_a_right_prediction_takes_few_steps(model, asked, drafter):
    wanted = model.generate(**asked)[0, 12:].tolist()
    plain, before = said(model, asked, drafter=drafter)
    text, stats = said(model, asked, drafter=drafter, prediction=wanted)
    assert text == plain == wanted
    assert stats.steps <= 8 < before.steps
    assert stats.drafter_statistics["predicted_tokens"] == TOKENS
    generate(model, stats=stats, drafter=drafter, prediction=wanted, **asked)
    assert stats.drafter_statistics["predicted_tokens"] == 2 * TOKENS, "calls with one `Stats` add up"
    assert stats.tokens == 2 * TOKENS
    assert "predicted_tokens" not in before.drafter_statistics


@pytest.mark.parametrize("sampled", [False, True])
def test_a_wrong_prediction_changes_no_text(model, asked, sampled):
    if sampled:
        asked |= {"do_sample": True, "temperature": 1.0}
    texts = []
    for prediction in (None, [3] * 50, list(range(60)), []):
        torch.manual_seed(5)
        texts.append(said(model, asked, prediction=prediction)[0])
    assert texts == [texts[0]] * 4


def test_a_prediction_that_is_a_text_is_that_of_its_tokens_alone(asked):
    """Without the special token that begins a prompt."""
    tokenizer, model = tiny.beginning_tokenizer(), tiny.llama(vocab_size=300)
    text = tokenizer.decode(model.generate(**asked)[0, 12:])
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    (_, stats), (_, of_ids) = (
        said(model, asked, prediction=text, tokenizer=tokenizer),
        said(model, asked, prediction=ids),
    )
    assert 0 < stats.drafter_statistics["predicted_tokens"] <= len(ids)
    assert (stats.steps, stats.drafter_statistics) == (of_ids.steps, of_ids.drafter_statistics)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"drafter": "lookahead", "prediction": [1]}, "lookahead"),
        ({"drafter": "recycling:suffix=false", "prediction": [1]}, "recycling"),
        ({"prediction": "a"}, "tokenizer="),
        ({"prediction": [1_000_000]}, "got 1000000"),
    ],
)
def test_what_a_prediction_needs(model, asked, given, said):
    with pytest.raises(ValueError, match=said):
        generate(model, **asked, **given)
