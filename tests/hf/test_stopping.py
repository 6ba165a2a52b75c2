"""Every stopping condition: it is evaluated once per token, so output and number of tokens equal those of `generate`.

Drafts continue past the end with the model's own tokens, so most outputs end in the middle of an accepted path. The
classes of criteria are looked up in transformers: a later release with a new one fails the first test.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import tiny
from support.batches import padded
from support.oracle import Oracle
from support.side_by_side import SideBySide
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation import ConfidenceCriteria, stopping_criteria

import token_recycling as tr

NEW = 32
PLACES = range(0, NEW, 4)
"""Positions at which outputs end."""
SCORED = {"return_dict_in_generate": True, "output_scores": True}
LOGITS = {"return_dict_in_generate": True, "output_logits": True}
TESTED = {"MaxLengthCriteria", "MaxTimeCriteria", "StopStringCriteria", "EosTokenCriteria", "ConfidenceCriteria"}


def test_every_criterion_of_transformers_is_listed():
    found = {
        name
        for name, value in vars(stopping_criteria).items()
        if isinstance(value, type) and issubclass(value, StoppingCriteria) and value is not StoppingCriteria
    }
    assert found == TESTED, "test new criteria, remove missing ones"


@dataclass
class PastTheEnd(Oracle):
    """Counts the steps that were cut in the middle of an accepted path."""

    cut: int = 0

    def observe(self, step):
        self.cut += step.beyond is not None


@pytest.fixture(scope="module")
def writer():
    """A random llama with the vocabulary of the tiny tokenizer."""
    model = tiny.llama(4, context=0.4, vocab_size=300)
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(scope="module")
def readable(tokenizer):
    """Arguments that suppress all tokens except printable characters."""
    texts = [tokenizer.decode([token]) for token in range(300)]
    others = [token for token, text in enumerate(texts) if not (text.isascii() and text.isprintable() and text)]
    return {"suppress_tokens": others}


def unlimited_output(model, ids, **arguments):
    """Return the output of the model without a stopping condition."""
    return model.generate(ids, max_new_tokens=NEW + 12, **arguments)


def assert_same_end(model, ids, following, **arguments):
    """Return the accelerated output, after asserting that it and the generator's state equal the plain ones."""
    drafter, stats = PastTheEnd(following), tr.Stats()
    wanted, wanted_state = tiny.seeded(model.generate, ids, **arguments)
    ours, state = tiny.seeded(tr.generate, model, ids, drafter=drafter, stats=stats, **arguments)
    if not isinstance(wanted, torch.Tensor):
        ours, wanted = ours.sequences, wanted.sequences
    assert torch.equal(ours, wanted)
    assert torch.equal(state, wanted_state)
    assert stats.tokens == ours.shape[1] - ids.shape[1]
    return ours, drafter


def test_length_limits(writer):
    ids = tiny.prompt(4, 6, 300)
    following = unlimited_output(writer, ids)
    for length, spare in itertools.product(range(1, 13, 2), (0, 3)):
        inputs = {"attention_mask": torch.nn.functional.pad(torch.ones_like(ids), (spare, 0))}
        begun = torch.nn.functional.pad(ids, (spare, 0))
        by_new, drafter = assert_same_end(writer, begun, following, max_new_tokens=length, **inputs)
        by_all, _ = assert_same_end(writer, begun, following, max_length=spare + 6 + length, **inputs)
        assert torch.equal(by_new, by_all)
        assert by_new.shape[1] == spare + 6 + length
        assert drafter.cut == 0, "a draft is never deeper than the text may become"


@pytest.mark.parametrize("limit", [torch.tensor(9), np.int32(9), 8.5, math.inf], ids=repr)
def test_limits_that_are_no_integers(limit):
    """Such as the sum of an attention mask, which the compiled drafter cannot take."""
    arguments = {"max_new_tokens": limit, "eos_token_id": [30], "pad_token_id": 0, "do_sample": False}
    SideBySide(tiny.llama).assert_same(lambda model: model.generate(tiny.prompt(0, 9), **arguments), times=2)


@pytest.mark.parametrize("sample", [False, True])
def test_end_of_sequence_tokens(writer, sample):
    """Output tokens as end tokens, alone and among others. Tokens that only the prompt contains end nothing."""
    ids = tiny.prompt(5, 7, 300)
    sampling = {"do_sample": sample}
    torch.manual_seed(0)
    following = unlimited_output(writer, ids, **sampling)
    others, cut, lengths = sorted(set(range(300)) - set(following[0].tolist())), 0, set()
    for place in PLACES:
        end = int(following[0, 7 + place])
        eos = [*others[:2], end] if place % 2 else end
        ours, drafter = assert_same_end(writer, ids, following, eos_token_id=eos, max_new_tokens=NEW, **sampling)
        assert end in ours[0, 7:]
        cut, lengths = cut + drafter.cut, lengths | {ours.shape[1]}
    assert cut > len(PLACES) / 4
    assert len(lengths) > len(PLACES) / 2
    prompt = sorted(set(ids[0].tolist()) - set(following[0, 7:].tolist()))
    ours, _ = assert_same_end(writer, ids, following, eos_token_id=prompt, max_new_tokens=NEW, **sampling)
    assert ours.shape[1] == 7 + NEW


def test_stop_strings_across_tokens(writer, tokenizer, readable):
    """Stop strings that begin within one token and end within another, one to four tokens later."""
    ids = tiny.prompt(6, 5, 300)
    following = unlimited_output(writer, ids, **readable)
    tokens = [tokenizer.decode([token]) for token in following[0, 5 : 5 + NEW].tolist()]
    cut, lengths = 0, set()
    for place in PLACES[:-2]:
        span = tokens[place : place + 2 + place % 4]
        stop = span[0][-1:] + "".join(span[1:-1]) + span[-1][:1]
        stopping = {"stop_strings": [stop, "never said"], "tokenizer": tokenizer}
        ours, drafter = assert_same_end(writer, ids, following, max_new_tokens=NEW, **stopping, **readable)
        assert stop in tokenizer.decode(ours[0, 5:])
        assert ours.shape[1] < 5 + NEW
        cut, lengths = cut + drafter.cut, lengths | {ours.shape[1]}
    assert cut > len(PLACES) / 4
    assert len(lengths) > len(PLACES) / 4
    assert max(map(len, tokens)) > 1, "some stop strings end within a token"


def test_time_limit(writer, monkeypatch):
    """The clock advances by a second per query, which is once per token."""
    ids = tiny.prompt(7, 4, 300)
    following = unlimited_output(writer, ids)
    cut = 0
    for seconds in range(1, 20, 2):
        clock = iter(range(10**6))
        monkeypatch.setattr(stopping_criteria, "time", SimpleNamespace(time=lambda clock=clock: next(clock)))
        ours, drafter = assert_same_end(writer, ids, following, max_new_tokens=NEW, max_time=float(seconds))
        assert ours.shape[1] == 4 + seconds + 1
        cut += drafter.cut
    assert cut > 2


def test_time_limit_ends_all_rows_of_a_batch_in_the_same_column(writer, monkeypatch):
    """In the same column as in plain `generate`, however far each row is."""
    lengths, width = (6, 2, 9), 9
    inputs = padded([tiny.prompt(seed, length, 300)[0] for seed, length in enumerate(lengths)])
    following = writer.generate(**inputs, max_new_tokens=NEW + 12)
    drafter = Oracle([row[width - length :] for row, length in zip(following, lengths, strict=True)])
    for seconds in (1, 6, 11):
        outputs = []
        for make in (contextlib.nullcontext, lambda model: tr.accelerated(model, drafter)):
            clock = iter(range(10**6))
            monkeypatch.setattr(stopping_criteria, "time", SimpleNamespace(time=lambda clock=clock: next(clock)))
            with make(writer):
                outputs.append(writer.generate(**inputs, max_new_tokens=NEW, max_time=seconds, eos_token_id=299))
        assert torch.equal(*outputs)


def test_confidence_criterion(writer):
    """The criterion reads scores, which must include those of the newest token and all earlier ones."""
    cut, lengths = 0, set()
    for seed in range(6):
        ids = tiny.prompt(seed, 4, 300)
        plain = unlimited_output(writer, ids, **SCORED)
        threshold = float(torch.cat(plain.scores).softmax(-1).max(-1).values.quantile(0.2))
        stopping = {"stopping_criteria": StoppingCriteriaList([ConfidenceCriteria(threshold)])}
        ours, drafter = assert_same_end(writer, ids, plain.sequences, max_new_tokens=NEW, **stopping, **SCORED)
        cut, lengths = cut + drafter.cut, lengths | {ours.shape[1]}
    assert cut > 1
    assert len(lengths) > 2


def test_rows_of_a_batch_end_independently(writer, tokenizer, readable):
    """End tokens, stop strings across tokens, length limits and an expired time limit, taken from every row in turn."""
    lengths, width = (6, 2, 9, 4), 9
    prompts = [tiny.prompt(seed, length, 300)[0] for seed, length in enumerate(lengths)]
    inputs = {**padded(prompts), **readable}
    following = writer.generate(**inputs, max_new_tokens=NEW + 12)
    wanted = [row[width - length :] for row, length in zip(following, lengths, strict=True)]
    said = following[:, width:].tolist()
    ways = [{"max_new_tokens": 7}, {"max_length": 20}, {"max_time": 1e-9, "eos_token_id": 299}]
    for row in range(4):
        stop = "".join(tokenizer.decode([token]) for token in said[row][12:14])
        ways.append({"eos_token_id": [said[row][10], said[row - 1][5]]})
        ways.append({"eos_token_id": 299, "stop_strings": [stop], "tokenizer": tokenizer})
    ends = set()
    for way in ways:
        arguments = {"max_new_tokens": NEW, **inputs, **way} if "max_length" not in way else {**inputs, **way}
        plain = writer.generate(**arguments)
        with tr.accelerated(writer, PastTheEnd(wanted)) as acceleration:
            assert torch.equal(writer.generate(**arguments), plain)
        assert acceleration.fallback is None
        ends |= {row[width:].index(0) for row in plain.tolist() if 0 in row[width:]}
    assert len(ends) > 5


@pytest.mark.falls_back
def test_criteria_that_may_read_scores_of_a_batch_fall_back(writer):
    ids = torch.cat([tiny.prompt(0, 5, 300), tiny.prompt(1, 5, 300)])
    stopping = {"eos_token_id": 299, "stopping_criteria": StoppingCriteriaList([ConfidenceCriteria(0.01)])}
    with tr.accelerated(writer) as acceleration:
        writer.generate(ids, max_new_tokens=6, **stopping, **SCORED)
    assert "ConfidenceCriteria" in str(acceleration.fallback)


@pytest.mark.parametrize("ends", [{}, {"eos_token_id": 299}], ids=["together", "each"])
def test_logits_of_a_batch_end_where_a_custom_criterion_ends_it(writer, ends):
    """Including logits of tokens that were accepted before it saw the other rows."""

    class Columns(StoppingCriteria):
        def __call__(self, ids, scores, **kwargs):
            return torch.full((len(ids),), ids.shape[1] >= columns)

    ids = torch.cat([tiny.prompt(0, 5, 300), tiny.prompt(1, 5, 300)])
    following = unlimited_output(writer, ids)
    for columns in (7, 9, 12):
        arguments = {**ends, "max_new_tokens": NEW, "stopping_criteria": [Columns()], **LOGITS}
        plain = writer.generate(ids, **arguments)
        with tr.accelerated(writer, Oracle(following)) as acceleration:
            ours = writer.generate(ids, **arguments)
        assert acceleration.fallback is None
        assert torch.equal(ours.sequences, plain.sequences)
        assert len(ours.logits) == len(plain.logits) == columns - 5
        torch.testing.assert_close(torch.stack(ours.logits), torch.stack(plain.logits), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("prompts", [1, 2])
def test_warning_beyond_the_position_limit_equals_that_of_generate(prompts, monkeypatch):
    """transformers warns once about sequences longer than the model supports."""
    told: list[list[str]] = [[], []]
    for said, make in zip(told, (lambda model: model, tr.accelerate), strict=True):
        monkeypatch.setattr(stopping_criteria.logger, "warning_once", said.append)
        for positions in (12, 60):
            model = make(tiny.llama(max_position_embeddings=positions))
            ids = tiny.prompt(0, 8).repeat(prompts, 1)
            model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
        said[:] = set(said)
    assert model.acceleration.fallback is None
    assert told[1] == told[0] != []


@pytest.mark.parametrize("limits", [[], [type("Limit", (stopping_criteria.MaxLengthCriteria,), {})(12)]], ids=len)
@pytest.mark.falls_back
def test_call_without_a_length_criterion_falls_back(counting, limits):
    """The caller's `_get_stopping_criteria` has an end-token criterion last, which plain `generate` accepts."""
    own = StoppingCriteriaList([*limits, stopping_criteria.EosTokenCriteria(torch.tensor([9]))])
    counting._get_stopping_criteria = lambda *args, **others: own
    how = {"do_sample": False, "pad_token_id": 0, "eos_token_id": 9}
    wanted = counting.generate(torch.tensor([[1]]), **how)
    assert torch.equal(tr.accelerate(counting).generate(torch.tensor([[1]]), **how), wanted)
    assert "limit the length" in counting.acceleration.fallback


def test_shortest_of_several_length_limits_ends_the_output(model):
    ids = tiny.prompt(0, 6)
    for lengths in ((10, 14), (14, 10)):
        limits = [stopping_criteria.MaxLengthCriteria(length) for length in lengths]
        steps = tr.stream(model, ids, max_new_tokens=12, stopping_criteria=limits)
        assert sum(len(step.tokens) for step in steps) == 4
