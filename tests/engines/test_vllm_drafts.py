"""Drafts for all requests of a step, without an engine: state on the engine's records, history, and times."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from token_recycling.engines.engine import EngineOptions, Replica, StepCosts
from token_recycling.engines.vllm import VLLM
from token_recycling.recycling.suffix_index import BREAK, masked

PROMPT, SAID = list(range(10, 50)), list(range(50, 90))


def new_proposer(nodes=8, token_cost=0, **options):
    """Return the proposer without an engine, for forward passes of 64 tokens at most."""
    replica = Replica(100, nodes, EngineOptions.parse({"k": 4, **options}), chains=True, corrected=True)
    proposer = object.__new__(VLLM)
    costs = StepCosts(0.01 * (1 + token_cost * np.arange(64))) if token_cost else None
    vars(proposer).update(recycler=replica, costs=costs, _tokens=0, _began=0.0, _chains={})
    return proposer


def drafts(batches, records, texts, room=8):
    tokens = np.zeros((len(texts), 256), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    lengths, rooms = np.array([len(text) for text in texts]), np.full(len(texts), room)
    return batches.draft(records, tokens, np.arange(len(texts)), lengths, rooms)


def run_request(batches, prompt, said):
    """Decode one request, token by token."""
    record = SimpleNamespace()
    for length in range(len(said) + 1):
        drafts(batches, [record], [prompt + said[:length]], room=len(said) - length)


def test_repeated_request_is_drafted_from_its_first_token():
    batches = new_proposer()
    run_request(batches, PROMPT, SAID)
    assert drafts(batches, [SimpleNamespace()], [PROMPT]) == [SAID[:8]]
    assert drafts(batches, [SimpleNamespace()], [[1, 2, *PROMPT[-3:]]]) == [SAID[:8]], "also after an edit of it"


def test_prediction_of_a_request_is_drafted(caplog):
    """As token ids or as text; the first token of the output exists before anything is drafted."""
    batches, said = new_proposer(), list(range(60, 90))
    batches._tokenizer = lambda: lambda text, add_special_tokens: {"input_ids": list(map(int, text.split()))}
    for given in (said, " ".join(map(str, said))):
        asked = SimpleNamespace(extra_args={"prediction": given})
        record = SimpleNamespace(sampling_params=asked, output_token_ids=said[:1])
        assert drafts(batches, [record], [PROMPT + said[:1]]) == [said[1:9]]
    for wrong in ([1000], ["a"], 5, {}):
        record = SimpleNamespace(sampling_params=SimpleNamespace(extra_args={"prediction": wrong}))
        assert drafts(batches, [record], [[1, 2, 3]]) == [[]]
    assert caplog.text.count("prediction must be") == 4


def test_requests_without_drafts_are_recorded_in_the_history():
    """Seeded requests have no drafts at any step. Pieces of two concurrent requests do not mix."""
    batches, records = new_proposer(), [SimpleNamespace(), SimpleNamespace()]
    outputs = [list(range(50, 90)), list(range(89, 49, -1))]
    for length in range(41):
        drafts(batches, records, [PROMPT + output[:length] for output in outputs], room=0)
    records.clear()
    drafts(batches, [SimpleNamespace()], [[1]])
    history = batches.recycler.matrix.history.tokens.tolist()
    assert set(outputs[0]) <= set(history)
    assert len(history) < 2 * sum(32 + len(output) for output in outputs)


def test_prompts_are_never_drafted_for_other_requests():
    batches = new_proposer()
    run_request(batches, PROMPT, SAID)
    assert drafts(batches, [SimpleNamespace()], [PROMPT[:20]]) == [[]]
    assert drafts(batches, [SimpleNamespace()], [PROMPT[-8:-1]]) == [[]]
    kept = batches.recycler.matrix.history.tokens.tolist()
    assert kept[:33] == [BREAK, *masked(np.array(PROMPT[-32:]))]
    assert set(SAID) <= set(kept)
    assert not set(PROMPT) & set(kept)
    frozen = new_proposer(learns=False)
    run_request(frozen, PROMPT, SAID)
    assert not len(frozen.recycler.matrix.history.tokens)


def test_requests_change_rows_join_and_leave():
    batches = new_proposer(history=0)
    first, second = SimpleNamespace(), SimpleNamespace()
    loops = [[1, 2, 3, 4] * 3, [5, 6, 7] * 4]
    assert drafts(batches, [first, second], loops) == [[1, 2, 3, 4] * 2, [5, 6, 7, 5, 6, 7, 5, 6]]
    assert drafts(batches, [second, first], [[*loops[1], 5], [*loops[0], 1]]) == [
        [6, 7, 5, 6, 7, 5, 6, 7],
        [2, 3, 4, 1, 2, 3, 4, 1],
    ]
    del first
    third = SimpleNamespace()
    assert drafts(batches, [third, second], [[1], [*loops[1], 5, 6]]) == [[], [7, 5, 6, 7, 5, 6, 7, 5]]


@pytest.mark.measured
def test_times_of_forward_passes_are_learned_between_calls(monkeypatch):
    """If every token of a forward pass takes as long as the pass and one in three is wrong, few drafted tokens pay."""
    now = [0.0]
    monkeypatch.setattr("token_recycling.engines.vllm.time.perf_counter", lambda: now[0])
    drafted, accepted, record_outcome = {}, [], StepCosts.record_outcome
    monkeypatch.setattr(StepCosts, "record_outcome", lambda *one: (accepted.append(one[4]), record_outcome(*one)))
    for a_token in (0.0, 1.0):
        batches, record, text, lengths = new_proposer(token_cost=0.02), SimpleNamespace(), [1, 2, 3] * 3, []
        for step in range(60):
            (draft,) = drafts(batches, [record], [text])
            lengths.append(len(draft))
            batches._tokens = 1 + len(draft)
            now[0] += 1 + a_token * len(draft)
            text = [*text, text[-3] if step % 3 else 4 + step]
        drafted[a_token] = np.mean(lengths[-20:])
    assert drafted[1.0] < drafted[0.0] / 2
    assert {*accepted} == {0}, "every step emits one token, which is the model's own"


@pytest.mark.parametrize("seed", [1, 2])
def test_drafting_backs_off_when_the_output_departs_from_a_repetitive_prompt(seed):
    """Twelve requests that copy their prompts calibrate copies as correct; the next repetitive prompt misleads."""
    rng = random.Random(seed)
    batches = new_proposer()
    batches.recycler = Replica(100, 24, EngineOptions(), chains=True, corrected=True)
    batches.costs = StepCosts(0.01 * (1 + 0.02 * np.arange(64)))
    for _ in range(12):
        phrase = [rng.randrange(100) for _ in range(35)]
        decode(batches, phrase * 6, (phrase * 4)[:120])
    phrase = [rng.randrange(100) for _ in range(35)]
    drafted = decode(batches, phrase * 14, [rng.choice(phrase) for _ in range(60)])
    assert sum(drafted[:2]) > 24, "the first drafts are long"
    assert sum(drafted[2:6]) <= 12, "25 to 36 if only the probability of a rejection is scaled"


def decode(batches, prompt, output):
    """Decode one request, verifying a draft at each step; return the number of tokens drafted at each step."""
    record, text, drafted, end = SimpleNamespace(), list(prompt), [], len(prompt) + len(output)
    while len(text) < end:
        tokens = np.array([text], np.int32)
        room = np.array([min(24, end - len(text) - 1)])
        (draft,) = batches.draft([record], tokens, np.array([0]), np.array([len(text)]), room)
        rest = output[len(text) - len(prompt) :]
        right = next((place for place, token in enumerate(draft) if token != rest[place]), len(draft))
        text += rest[: right + 1]
        drafted.append(len(draft))
    return drafted


def test_chains_are_padded_to_the_cheapest_step_within_each_requests_limit():
    """Steps of one, two or three tokens take longer than one of four. With two requests, the second has no draft."""
    batches = new_proposer()
    batches._config = SimpleNamespace(compilation_config=compilation(mode="PIECEWISE"))
    batches.costs = StepCosts(np.append([5.0, 7.0, 5.0, 4.0], 8.0 + np.arange(60)), learns=False)
    for chains, depths, filled in (
        ([[]], [8], [[0, 0, 0]]),
        ([[1]], [8], [[1, 0, 0]]),
        ([[1]], [2], [[1, 0]]),
        ([[]], [0], [[]]),
        ([[1, 2, 3]], [8], [[1, 2, 3]]),
        ([[], []], [0, 8], [[], [0, 0]]),
    ):
        batches._fill(chains, np.array(depths), alone=True)
        assert chains == filled
    chains = [[1]]
    batches._fill(chains, np.array([8]), alone=False)
    assert chains == [[1]], "a prompt in the same step costs more than padding saves"


def runner_for(requests, tokens, computed, scheduled):
    """Return the fields of vLLM's model runner that are read; `tokens`, `computed` and `scheduled` are per request."""
    batch = SimpleNamespace(
        num_reqs=len(requests),
        req_ids=[str(place) for place in range(len(requests))],
        token_ids_cpu=np.array(tokens, np.int32),
        num_computed_tokens_cpu=np.array(computed, np.int32),
    )
    starts = SimpleNamespace(np=np.array([0, *np.cumsum(scheduled)], np.int32))
    known = dict(zip(batch.req_ids, requests, strict=True))
    return SimpleNamespace(requests=known, input_batch=batch, query_start_loc=starts)


def new_request(**parameters):
    usual = {"seed": None, "temperature": 0.0, "max_tokens": None, "min_tokens": 0, "structured_outputs": None}
    return SimpleNamespace(sampling_params=SimpleNamespace(**{**usual, **parameters}), output_token_ids=[])


def test_logits_masked_by_a_grammar_are_not_learned():
    """Of three requests with drafts of one token, the second is guided: its logits are -inf for disallowed tokens."""
    batches = new_proposer()
    requests = [new_request(), new_request(structured_outputs={"regex": "a*"}), new_request()]
    runner = runner_for(requests, [[1, 2], [3, 4], [5, 6]], [0, 0, 0], [2, 2, 2])
    logits = torch.full((6, 100), -torch.inf)
    logits[torch.arange(6), 20 + torch.arange(6)] = 1.0
    batches.observe(runner, logits, SimpleNamespace(num_draft_tokens=[1, 1, 1]))
    learned = {token: batches.recycler.matrix.look_up(token)[0][0] for token in (1, 2, 5, 6)}
    assert learned == {1: 20, 2: 21, 5: 24, 6: 25}
    assert batches.recycler.matrix.filled.nonzero()[0].tolist() == [1, 2, 5, 6]


def compilation(mode="FULL", separate=True, most=512):
    """Return the fields of vLLM's configuration of CUDA graphs that are read."""
    decode = SimpleNamespace(name=mode)
    cudagraph_mode = SimpleNamespace(separate_routine=lambda: separate, decode_mode=lambda: decode)
    return SimpleNamespace(cudagraph_mode=cudagraph_mode, max_cudagraph_capture_size=most)


@pytest.mark.parametrize(
    ("graphs", "seconds", "drafts", "pays"),
    [
        (compilation(), None, [[1], []], True),
        (compilation(), None, [[], []], False),
        (compilation(), 1 + 0.005 * np.arange(64), [[1], []], True),
        (compilation(), 1 + 0.5 * np.arange(64), [[1], []], False),
        (compilation(), np.ones(17), [[1], []], False),
        (compilation(mode="PIECEWISE"), None, [[1], []], False),
        (compilation(separate=False), None, [[1], []], False),
        (compilation(most=17), None, [[1], []], False),
        (SimpleNamespace(cudagraph_mode=None), None, [[1], []], False),
    ],
)
def test_full_cuda_graph_pays_if_captured_and_further_tokens_are_cheap(graphs, seconds, drafts, pays):
    """Two requests with drafts of at most 8 tokens: a step of 18 tokens replays a full graph."""
    batches = new_proposer()
    batches.costs = None if seconds is None else SimpleNamespace(seconds=seconds)
    batches._config = SimpleNamespace(compilation_config=graphs)
    assert batches._full_graph_pays(drafts) == pays


def test_logits_of_padding_tokens_are_not_learned():
    batches, requests = new_proposer(history=0), [new_request(), new_request()]
    batches._config = SimpleNamespace(
        compilation_config=compilation(), model_config=SimpleNamespace(max_model_len=1000)
    )
    tokens = np.array([[7, 1, 2, 7, 1, 2], [5, 6, 8, 9, 10, 11]], np.int32)
    ending, seeded = new_request(max_tokens=5), new_request(seed=0, temperature=1.0)
    ending.output_token_ids.extend([1, 2])
    batches._runner = runner_for([ending, seeded], tokens, [0, 0], [6, 6])
    drafts = batches.propose([[2], [11]], np.array([6, 6]), tokens)
    assert drafts == [[7, 1], []], "the model adds the last token; a seeded request may have no draft"
    batches._runner = runner_for([new_request(min_tokens=4, seed=0), new_request()], tokens, [0, 0], [6, 6])
    drafts = batches.propose([[2], [11]], np.array([6, 6]), tokens)
    assert drafts == [[7, 1, 2], []], "the fourth token may be followed by a stop token"
    batches._runner = runner_for(requests, tokens, [0, 0], [6, 6])
    drafts = batches.propose([[2], [11]], np.array([6, 6]), tokens)
    assert drafts == [[7, 1, 2, 7, 1, 2, 7, 1], [0] * 8], "the second draft is padding only"
    runner = runner_for(requests, [[2, *drafts[0]], [11, *drafts[1]]], [0, 0], [9, 9])
    logits = torch.arange(100.0).expand(18, 100)
    batches.observe(runner, logits, SimpleNamespace(num_draft_tokens=[8, 8]))
    assert batches.recycler.matrix.filled.nonzero()[0].tolist() == [1, 2, 7, 11]
