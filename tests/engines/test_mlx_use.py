"""Options and state in mlx-lm, and when it drafts; `nox -s mlx` runs this in its own environment."""

import copy
import gc
import logging
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from support import tiny

pytest.importorskip("mlx_lm", reason="mlx-lm has an environment of its own: nox -s mlx")

import mlx.core as mx
import mlx_lm
from mlx_lm.models.cache import KVCache, make_prompt_cache, trim_prompt_cache
from support.mlx_models import TOKENIZER, VOCABULARY, made

from token_recycling import MatrixFileError, fingerprint
from token_recycling.engines import mlx as engine
from token_recycling.engines.mlx import TokenRecycling, stream_generate

mx.set_default_device(mx.cpu)
PROMPT = tiny.prompt(1, 12, VOCABULARY)[0].tolist()


@pytest.fixture(scope="module")
def llama():
    return made("llama")


def drafter(**options):
    return TokenRecycling(**{"token_cost": 0.0, "memory": 0.1, "history": 4096, **options})


def run(model, draft_model, max_tokens=40, **options):
    """Return the tokens, and the number of drafted tokens among them."""
    answers = stream_generate(model, TOKENIZER, PROMPT, max_tokens, draft_model, **options)
    found = [(one.token, one.from_draft) for one in answers]
    return [token for token, _ in found], sum(was_drafted for _, was_drafted in found)


def plain(model, max_tokens=40, **options):
    return [one.token for one in mlx_lm.stream_generate(model, TOKENIZER, PROMPT, max_tokens, **options)]


def test_learned_state_lives_as_long_as_its_model():
    models, before = [made("llama"), made("llama", seed=2)], len(engine._kept)
    counts = [run(model, None)[1] for model in models]
    kept = [engine._kept[id(model)] for model in models]
    assert kept[0] is not kept[1]
    assert all(run(model, None)[1] > max(30, count) for model, count in zip(models, counts, strict=True))
    del models
    gc.collect()
    assert len(engine._kept) == before


def test_draft_length_depends_on_cost(llama):
    """Whole outputs are known to the drafter, so only the cost curve limits drafts."""
    warm = drafter()
    run(llama, warm)
    accepted = {}
    for cost in (0.0, 0.5, 0.99):
        warm.passes = engine.StepCosts(1 + cost * np.arange(warm.most + 1), learns=False)
        accepted[cost] = run(llama, warm)[1]
    assert accepted[0.0] > 30
    warm.passes = engine.StepCosts(np.append(1.0, np.full(warm.most, 50.0)), learns=False)
    assert run(llama, warm) == (plain(llama), 0)


@pytest.mark.measured
def test_forward_passes_are_timed_by_default(llama, monkeypatch):
    """The clock advances by one per token of a forward pass, and by 1,000 while the consumer of the stream runs."""
    clock, call = [0.0], type(llama).__call__

    def working(self, inputs, *args, **kwargs):
        clock[0] += inputs.shape[1]
        return call(self, inputs, *args, **kwargs)

    def reading():
        clock[0] += 1e-6  # mlx-lm divides by the elapsed time
        return clock[0]

    monkeypatch.setattr(type(llama), "__call__", working)
    monkeypatch.setattr(time, "perf_counter", reading)
    monkeypatch.setattr(engine.compiling, "seconds", 0.0)
    draft, taken, record_time = TokenRecycling(memory=0.1, history=4096), [], engine.StepCosts.record_time
    monkeypatch.setattr(
        engine.StepCosts, "record_time", lambda costs, *step: taken.append(step) or record_time(costs, *step)
    )
    for _ in range(3):
        for _ in stream_generate(llama, TOKENIZER, PROMPT, 40, draft):
            clock[0] += 1000
    costs = draft.passes.seconds
    assert costs[1] > 1.3 * costs[0], "initially 1.06"
    assert costs[8] > 2 * costs[0], "initially 1.48"
    tokens, seconds = np.transpose(taken)
    assert min(tokens) == 1 < max(tokens)
    np.testing.assert_allclose(seconds, tokens, rtol=0.01)


def test_sequence_of_a_cache_is_remembered(llama):
    """In the next turn mlx-lm gets only new tokens; earlier tokens of the cache must be known for copying."""
    draft = drafter(orders=1, history=0, learns=True)
    cache = make_prompt_cache(llama)
    run(llama, draft, prompt_cache=cache)
    text = draft.sequence_of(cache)
    assert text[: len(PROMPT)].tolist() == PROMPT
    assert len(text) == cache[0].offset
    trim_prompt_cache(cache, 7)
    assert draft.sequence_of(cache).tolist() == text[:-7].tolist()
    drafting = engine.Drafting(llama, cache, draft, 31, 10, None)
    assert len(drafting._text) == len(text) - 7
    assert len(drafter().sequence_of(cache)) == 0
    assert len(draft.sequence_of(make_prompt_cache(llama))) == 0
    del cache, drafting
    gc.collect()
    assert len(draft._sequences) == 0


def test_unknown_cache_type_runs_without_drafts_and_is_named(llama, caplog):
    class OtherCache(KVCache):
        pass

    draft = drafter()
    run(llama, draft)
    with caplog.at_level(logging.WARNING, "token_recycling"):
        for _ in range(2):
            cache = [OtherCache() for _ in llama.layers]
            assert run(llama, draft, prompt_cache=cache) == (plain(llama), 0)
    assert ["OtherCache" in record.message for record in caplog.records] == [True]


def test_matrix_file_is_saved_and_bound_to_its_tokenizer(llama, tmp_path, monkeypatch):
    file = tmp_path / "tiny.matrix"
    draft = drafter(matrix=str(file))
    cold = run(llama, draft)
    rows = [array.copy() for array in draft.recycler.matrix.rows]
    assert not file.exists()
    del draft
    gc.collect()
    assert file.exists()
    again = drafter(matrix=str(file), learns=False)
    warm = run(llama, again)
    assert warm[0] == cold[0]
    assert warm[1] > cold[1]
    for before, after in zip(rows, again.recycler.matrix.rows, strict=True):
        np.testing.assert_array_equal(before, after)
    again.recycler.matrix.load(file, fingerprint(TOKENIZER))
    file.unlink()
    monkeypatch.setattr("token_recycling.engines.engine.SAVED_EVERY", 1e-9)
    run(llama, drafter(matrix=str(file)))
    assert file.exists()
    other = copy.deepcopy(TOKENIZER)
    other.add_tokens(["<more>"])
    with pytest.raises(MatrixFileError):
        list(stream_generate(llama, other, PROMPT, 5, drafter(matrix=str(file))))


def test_every_row_of_logits_is_learned_with_its_context():
    """For a new and for a known output, compared with one forward pass over the whole sequence."""
    model, draft, learned = made("gemma3_text"), drafter(orders=4), []
    run(model, draft, 1)
    learn = draft.recycler.learn_logits

    def recording(ngrams, logits):
        learned.extend(zip(map(tuple, ngrams.tolist()), logits.copy(), strict=True))
        learn(ngrams, logits)

    draft.recycler.learn_logits, counts = recording, []
    for _ in range(2):
        learned.clear()
        tokens, drafted = run(model, draft)
        counts.append(drafted)
        text = PROMPT + tokens
        whole = np.asarray(model(mx.array([text]))[0])
        places = {tuple(text[place - 3 : place + 1][::-1]): place for place in range(len(PROMPT) - 1, len(text) - 2)}
        often = Counter(ngram for ngram, _ in learned)
        assert places.keys() <= often.keys()
        compared = [(logits, places[ngram]) for ngram, logits in learned if ngram in places and often[ngram] == 1]
        assert len(compared) > 20
        for logits, place in compared:
            np.testing.assert_allclose(logits, whole[place], atol=1e-4)
    assert counts[0] < 10 < 30 < counts[1]


def two_processes(llama, patch):
    patch.setattr(mx.distributed, "init", lambda: SimpleNamespace(size=lambda: 2))
    run(llama, None)


def another_version(llama, patch):
    patch.setattr(engine.mlx_lm, "__version__", "0.33")
    TokenRecycling()


def another_model(llama, patch):
    draft = drafter()
    run(llama, draft)
    run(made("llama"), draft)


WRONG = {
    "a model that drafts": (lambda llama, patch: run(llama, llama), "Model"),
    "too many tokens": (lambda llama, patch: run(llama, None, num_draft_tokens=32), "got 32"),
    "embeddings": (lambda llama, patch: run(made("gpt_oss"), None, input_embeddings=mx.zeros((2, 32))), "embeddings"),
    "no tokens": (lambda llama, patch: run(llama, None, max_tokens=0), "non-zero"),
    "unknown argument": (lambda llama, patch: run(llama, None, color="red"), "color"),
    "unknown option": (lambda llama, patch: TokenRecycling(depth=3), "'depth'"),
    "another model": (another_model, "another model"),
    "two processes": (two_processes, "2 processes"),
    "another version": (another_version, "got 0.33"),
}


@pytest.mark.parametrize(("use", "value"), WRONG.values(), ids=WRONG)
def test_wrong_use_is_refused(llama, monkeypatch, use, value):
    with pytest.raises((ValueError, TypeError, RuntimeError), match=value):
        use(llama, monkeypatch)
