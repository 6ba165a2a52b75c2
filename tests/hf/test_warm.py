"""Warming: a drafter learns from text that the model generates without a prompt, and other drafters start from the
saved state.
"""

import copy

import numpy as np
import pytest
import torch
from support import architectures, tiny
from support.noting import noted

import token_recycling as tr
import token_recycling.hf.warm as warm_module
from token_recycling.model.target import Target

TEMPLATE = "{% for message in messages %}ab{{ message['content'] }}cd{% endfor %}{{ 'ef' if add_generation_prompt }}"


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(warm_module, "_QUESTION", 6)
    monkeypatch.setattr(warm_module, "_ANSWER", 20)


def warmed(model, tokenizer, **how):
    drafter = tr.make_drafter("recycling")
    return drafter, tr.warm(model, tokenizer, drafter, minutes=0.001, **how)


def test_warmed_drafter_starts_from_the_saved_state(loaded):
    model, before = loaded.model, torch.get_rng_state()
    taught, found = warmed(model, loaded.tokenizer)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.file == taught.warmed_file(Target(model))
    assert found.tokens > 0
    others = [tr.make_drafter("recycling", **one) for one in ({"k": 4}, {"orders": 2})]
    assert len({drafter.warmed_file(Target(model)) for drafter in (taught, *others)}) == 3
    drafter, ids = tr.make_drafter("recycling:warmed=true"), tiny.prompt(3, 9, model.config.vocab_size)
    matrix = drafter.prepare(Target(model))
    np.testing.assert_array_equal(matrix.candidates, taught.matrix.candidates)
    np.testing.assert_array_equal(matrix.calibration, taught.matrix.calibration)
    assert not len(taught.matrix.history), "its outputs enter the history only on request"
    text = tr.generate(model, ids, drafter=drafter, max_new_tokens=40, do_sample=False)
    assert text.tolist() == model.generate(ids, max_new_tokens=40, do_sample=False).tolist()
    tr.generate(model, ids, drafter=taught, max_new_tokens=40, do_sample=False)
    assert len(taught.matrix.history), "further outputs enter it"


def test_outputs_begin_with_the_token_that_begins_texts(loaded, tmp_path):
    """Its id may be 0."""
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(0)
    roots, hook = noted(loaded.model, lambda given: given["input_ids"][:, 0])
    warmed(loaded.model, tokenizer, output=tmp_path / "own.matrix")
    hook.remove()
    assert roots[0].unique().tolist() == [0]


def test_interrupted_warming_saves_what_was_learned(loaded, tmp_path):
    def interrupt(tokens):
        raise KeyboardInterrupt

    drafter, file = tr.make_drafter("recycling"), tmp_path / "own.matrix"
    found = tr.warm(loaded.model, loaded.tokenizer, drafter, minutes=10, output=file, progress=interrupt)
    assert found.tokens > 0
    saved = tr.make_drafter("recycling").prepare(Target(loaded.model))
    saved.load(file)
    np.testing.assert_array_equal(saved.candidates, drafter.matrix.candidates)


def test_chat_model_generates_questions_and_answers(loaded, monkeypatch, tmp_path):
    """Its outputs enter the history here, and the caller chooses the file."""
    monkeypatch.setattr(loaded.tokenizer, "chat_template", TEMPLATE, raising=False)
    calls, generate = [], type(loaded.model).generate

    def noted(model, ids, **arguments):
        calls.append((ids.tolist(), arguments["do_sample"]))
        return generate(model, ids, **arguments)

    monkeypatch.setattr(type(loaded.model), "generate", noted)
    drafter, found = warmed(loaded.model, loaded.tokenizer, history=True, output=tmp_path / "own.matrix")
    assert found.file == tmp_path / "own.matrix"
    assert len(drafter.matrix.history)
    (asked, drawn), (answered, sampled) = calls[:2]
    begin, end = (loaded.tokenizer(part, add_special_tokens=False)["input_ids"] for part in ("ab", "cdef"))
    assert (drawn, sampled) == (True, False)
    assert asked == [begin] * len(answered)
    for seed in (0, 1):
        calls.clear()
        warmed(loaded.model, loaded.tokenizer, seed=seed, output=tmp_path / "own.matrix")
        assert (calls[1][0] == answered) == (seed == 0), "0 is the default"
    assert all(row[-len(end) :] == end for row in answered)


def test_invalid_calls_are_rejected(model, loaded):
    with pytest.raises(ValueError, match=r"not warmed .* run `token-recycling warm"):
        tr.generate(model, tiny.prompt(0, 9), drafter="recycling:warmed=true", max_new_tokens=3)
    for minutes, drafter in ((0, "recycling"), (1, "suffix")):
        with pytest.raises(ValueError, match="got 0" if not minutes else "suffix"):
            tr.warm(loaded.model, loaded.tokenizer, tr.make_drafter(drafter), minutes=minutes)


UNBATCHED = [
    *(case for case in architectures.BORDERS if "rotary" in str(case) or "longrope" in str(case)),
    architectures.named("llama4_text", "chunks of 8, temperature step at 16"),
]


@pytest.mark.parametrize("case", UNBATCHED, ids=str)
def test_family_without_batches_is_warmed_one_sequence_at_a_time(case, tmp_path):
    model, drafter = architectures.model_of(case), tr.make_drafter("recycling")
    assert tr.check(model).why_not_batch is not None
    found = tr.warm(model, tiny.tokenizer(), drafter, minutes=0.001, output=tmp_path / "own.matrix")
    assert found.tokens > 0
    assert drafter.matrix.candidates.any()


@pytest.mark.falls_back
def test_nothing_is_saved_if_nothing_was_learned(loaded, tmp_path, monkeypatch):
    """As with a model whose calls all fall back to transformers, or that ends every output immediately."""
    file = tmp_path / "own.matrix"
    with monkeypatch.context() as patched:
        patched.setattr(loaded.model.generation_config, "use_cache", False)
        with pytest.raises(ValueError, match="not accelerated: the call uses no cache"):
            warmed(loaded.model, loaded.tokenizer, output=file)
    monkeypatch.setattr(warm_module, "_without_end", lambda tokenizer, ids: [])
    with pytest.raises(ValueError, match="nothing was learned"):
        warmed(loaded.model, loaded.tokenizer, output=file)
    assert not file.exists()


def test_questions_and_answers_fit_the_context(loaded, tmp_path):
    """A GPT-2 of 24 positions fails on the 25th."""
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.chat_template = TEMPLATE
    model = tiny.gpt2(n_positions=24, vocab_size=len(tokenizer))
    assert warmed(model.eval(), tokenizer, output=tmp_path / "own.matrix")[1].tokens > 0
