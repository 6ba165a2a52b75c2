"""Sampled outputs follow the distribution that `generate` samples from, by chi-square tests at fixed seeds.

The reference is transformers: one call of `generate` over a batch of prefixes returns the processed scores after each
prefix, so the exact probability of every output is known. Two checks use it. One counts every output of three tokens
against its probability. The other checks long outputs, of which there are too many to count. With the correct sampler,
the position of each token in the cumulative distribution at its prefix, smeared over the token's own probability, is
uniform and independent of all earlier positions (Rosenblatt, 1952). So pairs of consecutive positions fill a square
evenly.

A check is worth only what it can reject: wrong samplers, some of them known from published code, replace the correct
one, and the same checks must detect them.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from support import tiny
from support.architectures import model_of
from support.batches import padded
from support.cases import parameter, thinned
from support.chi_square import p_value
from support.recurrent_architectures import recurrent

import token_recycling as tr
from token_recycling.drafters.eagle.formats import save_head
from token_recycling.loop import batch as loop
from token_recycling.loop.accept import accept_walk
from token_recycling.training.continuations import Continuations
from token_recycling.training.declaration import EagleTraining
from token_recycling.training.eagle import new_head
from token_recycling.trees.draft import Step

VOCABULARY = 6
DRAFTERS = {"tree": "published:k=4,tree=0 1 2 00 01 10 000", "chain": "recycling:k=4,tree=chain:3"}
PROMPTS = [[1, 3, 2], [4], [2, 2, 5, 1, 3], [5, 1]]
"""Prompts of a batch; the shorter ones are padded with token 0."""
PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.15},
    "typical": {"typical_p": 0.7},
    "repetition penalty": {"repetition_penalty": 1.5},
    "top-k, top-p, repetition penalty": {"top_k": 4, "top_p": 0.9, "repetition_penalty": 1.3},
    "min-p, typical, bad words": {"min_p": 0.02, "typical_p": 0.95, "bad_words_ids": [[3, 1], [2, 2, 4]]},
}
PLAUSIBLE, IMPOSSIBLE = 1e-3, 1e-5
"""The p-value of the correct sampler is above the first at the seeds used here; that of a wrong one is below the
second.
"""


@cache
def model():
    """Return a llama of six tokens. No token is certain or impossible, and more than the newest token matters."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    made = tiny.llama(13, context=0.3, vocab_size=VOCABULARY, initializer_range=0.4, **sizes)
    made.generation_config.pad_token_id = 0
    return made


@cache
def hybrid():
    """Return a model of six tokens with a recurrent layer."""
    case = recurrent("qwen3_5_text")
    return model_of(replace(case, config={**case.config, "vocab_size": VOCABULARY}))


def distributions(texts, sampling):
    """Return the probability of every next token after each text, (texts, vocabulary), as plain `generate` samples it.
    Texts of equal length are read together without padding, which penalties of the lowest supported releases would
    count as tokens.
    """
    shown = {"return_dict_in_generate": True, "output_scores": True}
    probabilities = torch.empty(len(texts), VOCABULARY, dtype=torch.double)
    for length in {len(text) for text in texts}:
        rows = [row for row, text in enumerate(texts) if len(text) == length]
        alike = padded([texts[row] for row in rows])
        output = model().generate(**alike, do_sample=True, max_new_tokens=1, **shown, **sampling)
        probabilities[rows] = output.scores[0].double().softmax(-1)
    return probabilities


class Sampler:
    """Accelerated sampling with a drafter that learns from call to call: a name in `DRAFTERS` or any spec."""

    def __init__(self, shape, rows, sampling, seed=0):
        self.prompts = [PROMPTS[row % len(PROMPTS)] for row in range(rows)]
        self.sampling, self.stats = sampling, tr.Stats()
        self.drafter = tr.make_drafter(DRAFTERS.get(shape, shape))
        torch.manual_seed(seed)

    def __call__(self, new):
        """Return the output after each prompt, from one call of `generate`."""
        inputs, how = padded(self.prompts), {"drafter": self.drafter, "stats": self.stats}
        texts = tr.generate(model(), **inputs, **how, do_sample=True, max_new_tokens=new, **self.sampling)
        return texts[:, inputs["input_ids"].shape[1] :].tolist()


def probabilities_of_three_tokens(prompt, sampling):
    """Return the probability of every output of three tokens after a prompt."""
    tokens = range(VOCABULARY)
    beginnings = [text for length in range(3) for text in product(tokens, repeat=length)]
    after = dict(
        zip(beginnings, distributions([[*prompt, *text] for text in beginnings], sampling).tolist(), strict=True)
    )
    return {(a, b, c): after[()][a] * after[a,][b] * after[a, b][c] for a, b, c in product(tokens, repeat=3)}


def p_value_of_three_tokens(sampler, calls):
    """Return the p-value of all outputs of three tokens against their probabilities."""
    seen = {tuple(prompt): Counter[tuple[int, ...]]() for prompt in sampler.prompts}
    for _ in range(calls):
        for prompt, text in zip(sampler.prompts, sampler(3), strict=True):
            seen[tuple(prompt)][tuple(text)] += 1
    tables = []
    for prompt, found in seen.items():
        exact = probabilities_of_three_tokens(prompt, sampler.sampling)
        tables.append(([found[text] for text in exact], [odd * found.total() for odd in exact.values()]))
    return p_value(*tables)


def p_value_of_long_outputs(sampler, calls, new=28):
    """Return the p-value of pairs of consecutive positions in a square of 9 cells; probable tokens come first."""
    beginnings, drawn = [], []
    for _ in range(calls):
        for prompt, text in zip(sampler.prompts, sampler(new), strict=True):
            beginnings += [[*prompt, *text[:end]] for end in range(new)]
            drawn += text
    probabilities, order = distributions(beginnings, sampler.sampling).sort(dim=-1, descending=True, stable=True)
    places = (order == torch.tensor(drawn)[:, None]).int().argmax(dim=-1, keepdim=True)
    share = probabilities.gather(1, places)
    if not share.all():
        return 0.0
    smear = torch.rand(share.shape, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    uniform = probabilities.cumsum(dim=-1).gather(1, places) - share * smear
    cells = (uniform * 3).long().clamp(0, 2).view(-1, 2) @ torch.tensor([3, 1])
    return p_value((cells.bincount(minlength=9).tolist(), [len(cells) / 9] * 9))


MANY = 16
WAYS = [("tree", 1), ("chain", MANY), ("chain", 1), ("tree", MANY)]
"""Draft shapes and batch sizes. A single sequence uses the same random numbers as `generate`, and tests of drafters,
processors and stopping compare its tokens at a seed. So single sequences are tested nightly here, as is a second
setting for outputs of three tokens.
"""
TEMPERATURES = [0.5, 1.0, 1.5]
LONG = [
    parameter(
        *way,
        {"temperature": TEMPERATURES[(place + turn) % 3], **processors},
        every_run=place % 3 == 0 and way[1] > 1,
    )
    for place, processors in enumerate(PROCESSORS.values())
    for turn, way in enumerate(WAYS[place % 2 * 2 :][:2])
]
THREE = [
    parameter(*way, sampling, every_run=way[1] > 1 and place == 0)
    for place, sampling in enumerate([{}, {"temperature": 0.5, "repetition_penalty": 1.5}])
    for way in WAYS[place * 2 :][:2]
]


def named(value):
    return " ".join(value) if isinstance(value, dict) else str(value)


CALLS_LONG, CALLS_THREE = {1: 14, MANY: 2}, {1: 180, MANY: 40}
"""Number of calls by batch size: more rows cost little more time."""


@pytest.mark.parametrize(("shape", "rows", "sampling"), LONG, ids=named)
def test_long_outputs_follow_the_distribution(shape, rows, sampling):
    sampler = Sampler(shape, rows, sampling)
    assert p_value_of_long_outputs(sampler, CALLS_LONG[rows]) > PLAUSIBLE
    assert sampler.stats.mat > 1.3


@pytest.mark.parametrize(("shape", "rows"), thinned([("chain", MANY), ("tree", 1)], every=2))
def test_outputs_of_a_hybrid_follow_the_distribution(shape, rows, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "model", hybrid)
    sampler = Sampler(shape, rows, {"temperature": 0.8, "top_p": 0.9})
    assert p_value_of_long_outputs(sampler, CALLS_LONG[rows], new=24) > PLAUSIBLE
    assert sampler.stats.mat > 1.3


@pytest.mark.core
@pytest.mark.parametrize(("shape", "rows", "sampling"), THREE, ids=named)
def test_outputs_of_three_tokens_follow_the_distribution(shape, rows, sampling):
    sampler = Sampler(shape, rows, sampling)
    assert p_value_of_three_tokens(sampler, CALLS_THREE[rows]) > PLAUSIBLE
    assert sampler.stats.mat > 1.3


@pytest.mark.parametrize(
    ("rows", "sampling", "tree"),
    thinned([(MANY, {}, "0 1 2 00 01 10 000"), (1, {"repetition_penalty": 1.3, "temperature": 1.5}, 12)], every=2),
    ids=named,
)
def test_outputs_drafted_by_an_eagle_head_follow_the_distribution(rows, sampling, tree, tmp_path):
    """The trees of an EAGLE head are selected, not sampled."""
    head = new_head(model(), Continuations([], []), EagleTraining(version=1))
    save_head(tmp_path, head, model())
    sampler = Sampler(f"eagle:head={tmp_path},tree={tree},k=4", rows, sampling)
    assert p_value_of_long_outputs(sampler, CALLS_LONG[rows], new=24) > PLAUSIBLE
    assert sampler.stats.mat > 1.3


# Wrong samplers


def walking(chosen):
    """Return a walk that follows the child that `chosen` picks from the logits, and samples a token if it picks none.
    Like every walk, it appends the accepted nodes to `path`.
    """

    def walk(draft, logits, append, choose, row=0, path=None):
        accepted, emitted = [] if path is None else path, []
        accepted.append(0)
        while True:
            children = list(draft.children[accepted[-1]])
            child = chosen(draft, children, logits[accepted[-1]])
            emitted.append(choose(logits[accepted[-1]]) if child is None else int(draft.tokens[child]))
            finished = append(emitted[-1])
            if finished or child is None:
                return Step(draft, logits, accepted, emitted, finished, None, row)
            accepted.append(child)

    return walk


def accept_all(draft, children, logits):
    """Accept every drafted token."""
    return children[0] if children else None


def ignore_rejections(draft, children, logits):
    """Accept a child with its probability, but sample after a rejection as if nothing had been rejected."""
    shares = logits.softmax(-1)[draft.tokens[children]]
    return children[0] if children and torch.rand(()) < shares[0] else None


def applied_at_the_root(draft, logits, append, choose, row=0, path=None):
    """Sample at every node with the processors of the root: the sequence grows only after the walk."""
    step = accept_walk(draft, logits, lambda token: False, choose, row, path)
    for place, token in enumerate(step.tokens):
        if append(token):
            return Step(draft, logits, step.accepted[: place + 1], step.tokens[: place + 1], True, None, row)
    return step


def replace_accept(wrong, monkeypatch):
    """Replace every accept function that the loop may call."""
    ways = [name for name in vars(loop) if name.startswith("accept_")]
    assert ways
    for name in ways:
        monkeypatch.setattr(loop, name, wrong)


@pytest.mark.parametrize(("wrong", "rows"), [(accept_all, MANY), (ignore_rejections, MANY)])
def test_wrong_samplers_are_detected(wrong, rows, monkeypatch):
    """Drafts that are always accepted can have the right positions, too, but repeat the same outputs."""
    replace_accept(walking(wrong), monkeypatch)
    assert p_value_of_three_tokens(Sampler("chain", rows, {}), CALLS_THREE[rows]) < IMPOSSIBLE


@pytest.mark.parametrize(("shape", "rows"), thinned([("chain", MANY), ("tree", 1)], every=2))
def test_processors_applied_only_at_the_root_are_detected(shape, rows, monkeypatch):
    replace_accept(applied_at_the_root, monkeypatch)
    counting = {"sequence_bias": {(token, (token + 1) % VOCABULARY): 3.0 for token in range(VOCABULARY)}}
    assert p_value_of_long_outputs(Sampler(shape, rows, counting), CALLS_LONG[rows]) < IMPOSSIBLE
