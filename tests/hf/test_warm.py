"""Text that a model writes from nothing: what it teaches is kept, and drafters begin with it."""

import numpy as np
import pytest
import torch
from support import tiny

import token_recycling as tr
import token_recycling.hf.warm as warm_module
from token_recycling.model.tree_model import TreeModel

TEMPLATE = "{% for message in messages %}ab{{ message['content'] }}cd{% endfor %}{{ 'ef' if add_generation_prompt }}"


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(warm_module, "_QUESTION", 6)
    monkeypatch.setattr(warm_module, "_ANSWER", 20)


def warmed(model, tokenizer, spec="recycling", **how):
    drafter = tr.make_drafter(spec)
    return drafter, tr.warm(model, tokenizer, drafter, minutes=0.02, **how)


def test_a_warmed_drafter_begins_with_what_was_learned(loaded):
    model, before = loaded.model, torch.get_rng_state()
    taught, found = warmed(model, loaded.tokenizer)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.file == taught.warmed_file(TreeModel(model))
    assert found.tokens > 0
    drafter, ids = tr.make_drafter("recycling:warmed=true"), tiny.prompt(3, 9, model.config.vocab_size)
    matrix = drafter.prepare(TreeModel(model))
    np.testing.assert_array_equal(matrix.candidates, taught.matrix.candidates)
    np.testing.assert_array_equal(matrix.calibration, taught.matrix.calibration)
    text = tr.generate(model, ids, drafter=drafter, max_new_tokens=40, do_sample=False)
    assert text.tolist() == model.generate(ids, max_new_tokens=40, do_sample=False).tolist()


@pytest.mark.parametrize("history", [False, True])
def test_its_texts_are_no_earlier_outputs_unless_asked(loaded, tmp_path, history):
    drafter, found = warmed(loaded.model, loaded.tokenizer, history=history, output=tmp_path / "own.matrix")
    assert found.file == tmp_path / "own.matrix"
    assert bool(len(drafter.matrix.history)) == history


def test_a_model_that_chats_asks_and_answers(loaded, monkeypatch):
    monkeypatch.setattr(loaded.tokenizer, "chat_template", TEMPLATE, raising=False)
    calls, generate = [], warm_module.generate

    def noted(model, ids, **arguments):
        calls.append((ids.tolist(), arguments["do_sample"]))
        return generate(model, ids, **arguments)

    monkeypatch.setattr(warm_module, "generate", noted)
    warmed(loaded.model, loaded.tokenizer)
    (asked, drawn), (answered, greedy) = calls[:2]
    begin, end = (loaded.tokenizer(part, add_special_tokens=False)["input_ids"] for part in ("ab", "cdef"))
    assert (drawn, greedy) == (True, False)
    assert asked == [begin] * warm_module._AT_ONCE
    assert len(answered) == warm_module._AT_ONCE
    assert all(row[-len(end) :] == end for row in answered)


def test_what_was_not_kept_is_asked_for(model):
    with pytest.raises(ValueError, match=r"not warmed .* run `token-recycling warm"):
        tr.generate(model, tiny.prompt(0, 9), drafter="recycling:warmed=true", max_new_tokens=3)


def test_no_time_is_refused(loaded):
    with pytest.raises(ValueError, match="minutes must be > 0, got 0"):
        tr.warm(loaded.model, loaded.tokenizer, tr.make_drafter("recycling"), minutes=0)
