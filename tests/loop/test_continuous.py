"""Requests that join and leave a running batch: outputs equal those of single decoding, whatever the others do."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support import architectures, tiny
from support.architectures import named
from support.cases import thinned
from support.chi_square import fit
from support.drafters import NAMES, example
from support.noting import noted
from support.oracle import Oracle
from support.recurrent_architectures import recurrent
from support.running import GoneError, Texts
from support.runs import fix_costs, plain
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

import token_recycling as tr
from token_recycling.loop.continuous import RunningBatch, why_not_batched
from token_recycling.loop.request import Hints
from token_recycling.model.prefixes import PrefixCache
from token_recycling.model.target import Target

LLAMA = tiny.llama(seed=3, vocab_size=architectures.VOCABULARY)


SHARED = tr.make_drafter("recycling")
KINDS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "greedy": ({}, []),
    "penalize": ({"repetition_penalty": 1.3}, [RepetitionPenaltyLogitsProcessor(1.3)]),
    "sampled": ({"do_sample": True, "temperature": 0.8, "top_k": 0}, [TemperatureLogitsWarper(0.8)]),
}


class Joining(RuleBasedStateMachine):
    """Requests join, leave and fail at any step, continue one another and share a prefix cache. Each output is a prefix
    of single decoding, and complete if the request stays.
    """

    def __init__(self):
        super().__init__()
        self.texts, self.wanted = Texts(LLAMA), {}
        self.prefixes = PrefixCache(self.texts.batch.target, 30_000)

    @rule(
        prompt=st.tuples(st.integers(0, 99), st.sampled_from([1, 3, 33, 70])),
        goes_on=st.none() | st.integers(0, 7),
        new=st.integers(1, 20),
        kind=st.sampled_from(sorted(KINDS)),
        drafter=st.sampled_from([SHARED, "oracle", "oracle", "suffix", "plain"]),
        streamed=st.booleans(),
        key=st.sampled_from([None, "", "", "another"]),
        fails=st.sampled_from([None, None, None, "client", "processor", "criterion"]),
        after=st.integers(1, 6),
    )
    def join(self, prompt, goes_on, new, kind, drafter, streamed, key, fails, after):
        ids, (arguments, processors), seed = tiny.prompt(*prompt), KINDS[kind], len(self.wanted)
        if goes_on is not None and self.wanted:
            before = [*self.wanted][goes_on % len(self.wanted)].sequence
            ids = torch.cat([before.padded, ids[:, :1]], dim=1) if before.length < 200 else ids
        torch.manual_seed(seed)
        said = plain(LLAMA, ids, new, **arguments)
        criteria, told, failing_at = [], [], ids.shape[1] + after

        def fragile(ids, scores, **_):
            if ids.shape[1] >= failing_at:
                raise GoneError
            return scores if fails == "processor" else False

        def client(step):
            told.append(step)
            if fails == "client" and len(told) >= after:
                raise GoneError

        if fails == "processor":
            processors = [*processors, fragile]
        elif fails == "criterion":
            criteria = [fragile]
        if drafter == "oracle":
            drafter = Oracle([torch.cat([ids[0], torch.tensor(said)])])
        row = self.texts.join(
            ids, new, drafter, seed if kind == "sampled" else None, processors, criteria,
            on_step=client, streamed=streamed,
            hints=Hints(None if key is None else self.prefixes.of(key)),
        )  # fmt: skip
        self.wanted[row] = said

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            self.texts.step()

    @precondition(lambda self: self.texts.batch.requests)
    @rule(which=st.integers(0, 7))
    def leave(self, which):
        going = self.texts.batch.requests
        going[which % len(going)].fail(GoneError())

    @invariant()
    def outputs_are_prefixes_of_single_decoding(self):
        for row, said in self.texts.outputs.items():
            assert said == self.wanted[row][: len(said)]
            assert row.error is None or isinstance(row.error, GoneError), row.error

    def teardown(self):
        self.texts.finish()
        assert len(self.texts.ended) == len(set(self.texts.ended)) == len(self.wanted)
        for row, said in self.wanted.items():
            assert isinstance(row.error, GoneError) or self.texts.outputs[row] == said
            assert row.stats.tokens == len(self.texts.outputs[row])
            assert row.stats.steps < 2 or row.stats.seconds["forward"] > 0, "time counts for all that share a pass"
        held = self.texts.batch._batch, self.texts.batch._captured, self.texts.batch._callbacks
        assert not any(held), "no state remains without requests"
        assert self.prefixes.nbytes <= 30_000


Joining.TestCase.settings = settings(max_examples=12, stateful_step_count=20)
TestJoining = Joining.TestCase


def assert_equal_to_single_decoding(model, prompts, new, drafter, apart):
    """Start the requests `apart` steps after one another."""
    texts, rows = Texts(model), []
    for ids in prompts:
        rows.append(texts.join(ids, new, drafter))
        for _ in range(apart):
            texts.step()
    texts.finish()
    for row, ids in zip(rows, prompts, strict=True):
        assert row.error is None, row.error
        assert texts.outputs[row] == plain(model, ids, new)


@pytest.mark.parametrize("name", NAMES)
def test_every_drafter_works_in_a_running_batch(model, name, tmp_path):
    prompts = [tiny.prompt(seed, 3 + 2 * seed).repeat(1, 2) for seed in range(3)]
    assert_equal_to_single_decoding(model, prompts, 12, example(name, model, tmp_path), apart=2)


FAMILIES = [
    *map(named, ("gpt2", "bloom")),
    *(named(family, "window of 8") for family in ("gemma3_text", "mistral", "gpt_oss")),
    *map(recurrent, ("qwen3_next", "falcon_h1", "lfm2", "mamba", "mamba2", "qwen4_exp_text")),
]
EVERY_RUN = ("gpt2", "bloom", "gemma3_text", "falcon_h1", "mamba2", "qwen4_exp_text")


@pytest.mark.parametrize("case", thinned(FAMILIES, kept=lambda case: case.family in EVERY_RUN, ids=str))
def test_families_with_other_attention_or_recurrent_layers(case):
    model = architectures.model_of(case)
    model.generation_config.pad_token_id = 0
    if why_not_batched(Target(model)) is not None:
        pytest.skip("its sequences cannot be batched")
    prompts = [tiny.prompt(seed, length, architectures.VOCABULARY) for seed, length in enumerate([12, 1, 40, 5])]
    assert_equal_to_single_decoding(model, prompts, 20, "suffix", apart=3)


def test_joining_shorter_request_causes_no_second_prefill():
    """The cache of this model has no slots that show its length."""
    model = architectures.model_of(recurrent("mamba2"))
    texts, (read, hook) = Texts(model), noted(model, lambda given: given["input_ids"].shape[1])
    for length in (12, 5):
        texts.join(tiny.prompt(0, length), 9, "plain")
        texts.step()
    texts.finish()
    hook.remove()
    assert [tokens for tokens in read if tokens > 1] == [12, 5]


def failing(*_, **__):
    raise GoneError


class FailingDrafter(tr.Drafter):
    def __init__(self, at):
        setattr(self, at, failing)

    def draft(self, context):
        return tr.make_drafter("plain").draft(context)


AT = ("start", "draft", "observe", "statistics", "describe")


def failing_prefixes(at):
    """Return a prefix cache that cannot be read, or that cannot store the slots of a batched request."""
    take = failing if at == "take" else lambda ids: (Target(LLAMA).new_cache(), 0)
    later = iter([None])  # once after the first step
    return SimpleNamespace(
        cached_tokens=lambda ids: 0, take=take, keep=lambda *_: next(later, at) == "keep" and failing()
    )


@cache
def single_outputs():
    """Return the outputs of single decoding for three prompts."""
    return [plain(LLAMA, tiny.prompt(seed, 5), 40) for seed in range(3)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"processors": [lambda ids, scores: scores if ids.shape[1] < 9 else failing()]},
        {"criteria": [lambda ids, scores, **_: False if ids.shape[1] < 9 else failing()]},
        {"on_step": failing},
        {"on_step": lambda step: step.row and failing()},  # once it is batched
        *({"drafter": FailingDrafter(at)} for at in AT),
        *({"hints": Hints(failing_prefixes(at))} for at in ("take", "keep")),
    ],
    ids=["processor", "criterion", "client", "client of a batched request", *AT, "take", "keep"],
)
def test_failure_of_one_request_ends_only_that_request(wrong):
    """The others accept several nodes in the failing step."""
    texts, ids = Texts(LLAMA), [tiny.prompt(seed, 5) for seed in range(3)]
    oracle = Oracle([torch.cat([own[0], torch.tensor(said)]) for own, said in zip(ids, single_outputs(), strict=True)])
    first = texts.join(ids[0], 40, oracle)
    texts.step()
    failed = texts.join(ids[1], 8, **wrong)
    last = texts.join(ids[2], 40, oracle)
    texts.finish()
    assert isinstance(failed.error, GoneError)
    assert texts.outputs[failed] == single_outputs()[1][: len(texts.outputs[failed])]
    for row, said in ((first, single_outputs()[0]), (last, single_outputs()[2])):
        assert row.error is None
        assert texts.outputs[row] == said


def test_finished_requests_leave_their_prefix_in_the_cache():
    """All tokens but the last, whose slot is not computed yet. Other requests take their rows."""
    texts = Texts(LLAMA)
    prefixes = PrefixCache(texts.batch.target, 10**8).of("")
    rows = [texts.join(tiny.prompt(seed, 6), 6 + 3 * seed, hints=Hints(prefixes)) for seed in range(3)]
    texts.finish()
    for row in rows:
        longer = torch.cat([row.sequence.tokens, tiny.prompt(9, 1)[0]])[None]
        assert prefixes.cached_tokens(longer[0]) == row.sequence.length - 1
        again = texts.join(longer, 12, hints=Hints(prefixes))
        texts.finish()
        assert texts.outputs[again] == plain(LLAMA, longer, 12)


def test_prefix_of_a_request_that_failed_within_a_step_is_correct():
    """A longer sequence in the batch ensures that states exist for the slots of the last tokens, of other content.
    `hf/test_long_prompts.py` tests models without recurrent states.
    """
    model = architectures.model_of(recurrent("falcon_h1"))
    texts = Texts(model)
    prefixes = PrefixCache(texts.batch.target, 10**8).of("")
    texts.join(tiny.prompt(0, 90), 400, "plain")
    texts.step()
    for seed, after in enumerate((1, 7, 12)):
        ids, failing_at = tiny.prompt(seed, 5), 5 + after
        whole = torch.cat([ids[0], torch.tensor(plain(model, ids, 40))])
        criterion = lambda ids, scores, at=failing_at, **_: False if ids.shape[1] < at else failing()  # noqa: E731
        failed = texts.join(ids, 40, Oracle([whole]), criteria=[criterion], hints=Hints(prefixes))
        while failed in texts.batch.requests:
            texts.step()
        assert isinstance(failed.error, GoneError)
        assert failed.sequence.on_host.tolist() == whole[: failing_at - 1].tolist()
        longer = torch.cat([whole[: 4 + after], ids[0, :2]])[None]
        again = texts.join(longer, 12, hints=Hints(prefixes))
        while again in texts.batch.requests:
            texts.step()
        assert texts.outputs[again] == plain(model, longer, 12)


@pytest.mark.parametrize("rest", [3, 30, 200])
def test_recurrent_states_are_kept_shortly_before_the_end_of_a_prompt(rest):
    """However many tokens its last piece has."""
    texts = Texts(architectures.model_of(recurrent("falcon_h1")))
    ids, prefixes = tiny.prompt(0, 512 + rest), PrefixCache(texts.batch.target, 10**9).of("")
    texts.join(ids, 2, hints=Hints(prefixes))
    texts.finish()
    ids[0, -2:] = 0
    assert 2 < ids.shape[1] - prefixes.cached_tokens(ids[0]) < 64


@dataclass
class Sampling(tr.Drafter):
    """Samples one token from a distribution other than the model's, so acceptance takes further random numbers."""

    @property
    def traits(self):
        return tr.DrafterTraits(samples=True)

    def draft(self, context):
        if context.remaining < 2:
            return tr.Draft.chain(context.root)
        source = torch.tensor([0.1, 0.2, 0.3, 0.4])
        drawn = torch.multinomial(source, 1, generator=context.generator)
        return tr.Draft(torch.cat([context.root, drawn]), [-1, 0], sampled_from={1: source})


def test_batched_outputs_with_sampled_drafts_have_the_models_distribution():
    """They differ from single decoding but have the same distribution, tested on outputs of two tokens."""
    model = tiny.llama(13, context=0.3, vocab_size=4, initializer_range=0.4, hidden_size=16, num_hidden_layers=1)
    texts, ids, drafter = Texts(model), torch.tensor([[1, 3, 2]]), Sampling()
    rows = [texts.join(ids, 2, drafter, seed, streamed=False) for seed in range(500)]
    texts.finish()
    possible = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    with torch.no_grad():
        shares = model(torch.cat([ids.expand(16, -1), possible], dim=1)).logits[:, 2:4].double().softmax(-1)
    exact = shares.gather(2, possible[:, :, None])[..., 0].prod(dim=1)
    assert fit(Counter(tuple(texts.outputs[row]) for row in rows), possible, exact) > 1e-3
    assert sum((row.stats for row in rows), tr.Stats()).accepted.total() > 100


def tree_sizes(monkeypatch, texts, curve, drafter="recycling"):
    """Return the tree sizes verified while `texts` repetitive sequences are decoded in one batch."""
    fix_costs(monkeypatch, [*curve], [*curve.values()])
    batch, seen = Texts(tiny.counting_llama()), set()
    for _ in range(texts):
        batch.join(torch.arange(16)[None].repeat(1, 3), 40, drafter, on_step=lambda step: seen.add(len(step.draft)))
    while len(batch.batch.requests) == texts:
        batch.step()
    return seen


def test_nodes_are_divided_by_forward_cost(monkeypatch):
    """If 16 rows cost the same as one, a single sequence gets more nodes than each of four; if the rows above 4 are
    expensive, nothing is drafted.
    """
    free = {1: 1.0, 16: 1.0, 17: 20.0, 64: 70.0}
    assert max(tree_sizes(monkeypatch, 1, free)) > max(tree_sizes(monkeypatch, 4, free)) > 1
    assert max(tree_sizes(monkeypatch, 4, free)) <= 4
    fused = "fuse:recycling+suffix"
    assert 4 >= max(tree_sizes(monkeypatch, 4, free, fused)) > 1
    dear = {1: 1.0, 4: 1.0, 5: 50.0, 64: 700.0}
    assert tree_sizes(monkeypatch, 4, dear) == {1}


def test_models_that_cannot_be_batched_are_refused():
    model = architectures.model_of(named("llama", "dynamic rotary scaling from 32"))
    with pytest.raises(tr.UnsupportedModelError, match="one sequence"):
        RunningBatch(Target(model))
    split = tiny.llama()
    split._tp_size = 2
    with pytest.raises(tr.UnsupportedModelError, match="got 2 processes"):
        RunningBatch(Target(split))


class NeedsLayer(tr.Drafter):
    def __init__(self, number):
        self.number = number

    @property
    def traits(self):
        return tr.DrafterTraits(states=lambda layers: [self.number])

    def draft(self, context):
        return tr.make_drafter("plain").draft(context)


def test_drafters_with_different_hidden_states_are_refused_in_one_batch():
    texts = Texts(LLAMA)
    for number in (1, 1):
        texts.join(tiny.prompt(0, 5), 6, NeedsLayer(number))
    with pytest.raises(ValueError, match=r"hidden states, \[\d\], got \[\d\]"):
        texts.join(tiny.prompt(2, 5), 6, NeedsLayer(2))
    texts.finish()
    assert all(row.error is None for row in texts.ended)
