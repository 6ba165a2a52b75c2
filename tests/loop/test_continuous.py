"""Texts that join and leave a running batch: each is what it is alone, whatever its neighbours do."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
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
    "penalised": ({"repetition_penalty": 1.3}, [RepetitionPenaltyLogitsProcessor(1.3)]),
    "sampled": ({"do_sample": True, "temperature": 0.8, "top_k": 0}, [TemperatureLogitsWarper(0.8)]),
}


class Joining(RuleBasedStateMachine):
    """Texts that join, leave and fail at any step, go on from one another, and share a prefix cache: each says a
    beginning of what it says alone, and all of it if it stays.
    """

    def __init__(self):
        super().__init__()
        self.texts, self.wanted = Texts(LLAMA), {}
        self.prefixes = PrefixCache(self.texts.batch.target, 200_000)

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
        self.texts.batch.leave(going[which % len(going)], GoneError())

    @invariant()
    def every_text_says_what_it_says_alone(self):
        for row, said in self.texts.said.items():
            assert said == self.wanted[row][: len(said)]
            assert row.error is None or isinstance(row.error, GoneError), row.error

    def teardown(self):
        self.texts.finish()
        assert len(self.texts.ended) == len(set(self.texts.ended)) == len(self.wanted)
        for row, said in self.wanted.items():
            assert isinstance(row.error, GoneError) or self.texts.said[row] == said
            assert row.stats.tokens == len(self.texts.said[row])
        assert self.texts.batch._batch is None, "nothing is held for nobody"
        assert self.prefixes.nbytes <= 200_000


Joining.TestCase.settings = settings(max_examples=12, stateful_step_count=20)
TestJoining = Joining.TestCase


def assert_each_is_what_it_is_alone(model, prompts, new, drafter, apart):
    """Texts that begin `apart` steps after one another."""
    texts, rows = Texts(model), []
    for ids in prompts:
        rows.append(texts.join(ids, new, drafter))
        for _ in range(apart):
            texts.step()
    texts.finish()
    for row, ids in zip(rows, prompts, strict=True):
        assert row.error is None, row.error
        assert texts.said[row] == plain(model, ids, new)


@pytest.mark.parametrize("name", NAMES)
def test_every_drafter_drafts_among_others(model, name, tmp_path):
    prompts = [tiny.prompt(seed, 3 + 2 * seed).repeat(1, 2) for seed in range(3)]
    assert_each_is_what_it_is_alone(model, prompts, 12, example(name, model, tmp_path), apart=2)


FAMILIES = [
    *map(named, ("gpt2", "bloom")),
    *(named(family, "window of 8") for family in ("gemma3_text", "mistral", "gpt_oss")),
    *map(recurrent, ("qwen3_next", "falcon_h1", "lfm2", "mamba", "mamba2", "qwen4_exp_text")),
]
EVERY_RUN = ("gpt2", "bloom", "gemma3_text", "falcon_h1", "mamba2")


@pytest.mark.parametrize("case", thinned(FAMILIES, kept=lambda case: case.family in EVERY_RUN, ids=str))
def test_families_whose_layers_see_or_keep_other_things(case):
    model = architectures.model_of(case)
    model.generation_config.pad_token_id = 0
    if why_not_batched(Target(model)) is not None:
        pytest.skip("its texts cannot share passes")
    prompts = [tiny.prompt(seed, length, architectures.VOCABULARY) for seed, length in enumerate([12, 1, 40, 5])]
    assert_each_is_what_it_is_alone(model, prompts, 20, "suffix", apart=3)


def failing(*_, **__):
    raise GoneError


class FailingDrafter(tr.Drafter):
    def __init__(self, at):
        setattr(self, at, failing)

    def draft(self, context):
        return tr.make_drafter("plain").draft(context)


@cache
def beside():
    """What three texts say alone."""
    return [plain(LLAMA, tiny.prompt(seed, 5), 40) for seed in range(3)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"processors": [lambda ids, scores: scores if ids.shape[1] < 9 else failing()]},
        {"criteria": [lambda ids, scores, **_: False if ids.shape[1] < 9 else failing()]},
        {"on_step": failing},
        {"on_step": lambda step: step.row and failing()},  # once it shares passes
        *({"drafter": FailingDrafter(at)} for at in ("start", "draft", "observe")),
    ],
    ids=["processor", "criterion", "client", "client beside others", "start", "draft", "observe"],
)
def test_what_fails_for_one_text_ends_that_text_alone(wrong):
    """Beside others that accept several nodes in the step that fails."""
    texts, ids = Texts(LLAMA), [tiny.prompt(seed, 5) for seed in range(3)]
    oracle = Oracle([torch.cat([own[0], torch.tensor(said)]) for own, said in zip(ids, beside(), strict=True)])
    first = texts.join(ids[0], 40, oracle)
    texts.step()
    failed = texts.join(ids[1], 20, **wrong)
    last = texts.join(ids[2], 40, oracle)
    texts.finish()
    assert isinstance(failed.error, GoneError)
    assert texts.said[failed] == beside()[1][: len(texts.said[failed])]
    for row, said in ((first, beside()[0]), (last, beside()[2])):
        assert row.error is None
        assert texts.said[row] == said


def test_each_text_that_ends_leaves_its_own_beginning():
    """All of it but the last token, whose slot is not there yet."""
    texts = Texts(LLAMA)
    prefixes = PrefixCache(texts.batch.target, 10**8).of("")
    rows = [texts.join(tiny.prompt(seed, 6), 12 - 3 * seed, hints=Hints(prefixes)) for seed in range(3)]
    texts.finish()
    for row in rows:
        said = row.sequence.tokens
        assert prefixes.cached_tokens(torch.cat([said, said[:1]])) == row.sequence.length - 1


def test_what_a_text_left_that_failed_within_a_step_is_no_wrong_beginning_of_others():
    """Beside a longer text, so that there are states for its last tokens, of something else. Of slots alone
    `hf/test_long_prompts.py` says it.
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
        assert texts.said[again] == plain(model, longer, 12)


@dataclass
class Drawing(tr.Drafter):
    """Draws one token, from a distribution that is not the model's: what is accepted depends on other draws then."""

    @property
    def traits(self):
        return tr.DrafterTraits(samples=True)

    def draft(self, context):
        if context.remaining < 2:
            return tr.Draft.chain(context.root)
        source = torch.tensor([0.1, 0.2, 0.3, 0.4])
        drawn = torch.multinomial(source, 1, generator=context.generator)
        return tr.Draft(torch.cat([context.root, drawn]), [-1, 0], sampled_from={1: source})


def test_texts_with_drawn_drafts_have_the_distribution_of_the_model():
    """They are other texts than alone, of the same distribution: those of two tokens are counted."""
    model = tiny.llama(13, context=0.3, vocab_size=4, initializer_range=0.4, hidden_size=16, num_hidden_layers=1)
    texts, ids, drafter = Texts(model), torch.tensor([[1, 3, 2]]), Drawing()
    rows = [texts.join(ids, 2, drafter, seed, streamed=False) for seed in range(500)]
    texts.finish()
    possible = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    with torch.no_grad():
        shares = model(torch.cat([ids.expand(16, -1), possible], dim=1)).logits[:, 2:4].double().softmax(-1)
    exact = shares.gather(2, possible[:, :, None])[..., 0].prod(dim=1)
    assert fit(Counter(tuple(texts.said[row]) for row in rows), possible, exact) > 1e-3
    assert sum((row.stats for row in rows), tr.Stats()).accepted.total() > 100


def sizes(monkeypatch, texts, curve, drafter="recycling"):
    """Nodes of the trees that are verified while so many texts are decoded, all of which repeat themselves."""
    fix_costs(monkeypatch, [*curve], [*curve.values()])
    batch, seen = Texts(tiny.counting_llama()), set()
    for _ in range(texts):
        batch.join(torch.arange(16)[None].repeat(1, 3), 40, drafter, on_step=lambda step: seen.add(len(step.draft)))
    while len(batch.batch.requests) == texts:
        batch.step()
    return seen


def test_nodes_are_divided_by_what_passes_cost(monkeypatch):
    """Where rows are free up to 16, one text has more of them than each of four; where each costs a pass of its own,
    and nothing is left to share, none is drafted.
    """
    free = {1: 1.0, 16: 1.0, 17: 20.0, 64: 70.0}
    assert max(sizes(monkeypatch, 1, free)) > max(sizes(monkeypatch, 4, free)) > 1
    assert max(sizes(monkeypatch, 4, free)) <= 4
    fused = "fuse:recycling+suffix"
    assert 4 >= max(sizes(monkeypatch, 4, free, fused)) > 1
    dear = {1: 1.0, 4: 1.0, 5: 50.0, 64: 700.0}
    assert sizes(monkeypatch, 4, dear) == {1}


def test_models_whose_texts_cannot_share_passes_are_refused():
    model = architectures.model_of(named("llama", "dynamic rotary scaling from 32"))
    with pytest.raises(tr.UnsupportedModelError, match="one sequence"):
        RunningBatch(Target(model))
    split = tiny.llama()
    split._tp_size = 2
    with pytest.raises(tr.UnsupportedModelError, match="got 2 processes"):
        RunningBatch(Target(split))


class Seeing(tr.Drafter):
    def __init__(self, number):
        self.number = number

    @property
    def traits(self):
        return tr.DrafterTraits(states=lambda layers: [self.number])

    def draft(self, context):
        return tr.make_drafter("plain").draft(context)


def test_drafters_that_need_other_hidden_states_do_not_share_a_batch():
    texts = Texts(LLAMA)
    for number in (1, 1):
        texts.join(tiny.prompt(0, 5), 6, Seeing(number))
    with pytest.raises(ValueError, match=r"hidden states, \[\d\], got \[\d\]"):
        texts.join(tiny.prompt(2, 5), 6, Seeing(2))
    texts.finish()
    assert all(row.error is None for row in texts.ended)
