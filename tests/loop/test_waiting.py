"""Scheduling of prefill in a running batch: long prompts are read in pieces, and other requests do not wait."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from support import tiny
from support.drafters import example
from support.running import GoneError, Texts
from support.runs import plain

import token_recycling as tr
from token_recycling.loop import continuous
from token_recycling.loop.batch import Batch
from token_recycling.loop.request import Hints
from token_recycling.model import prefill
from token_recycling.model.prefixes import PrefixCache
from token_recycling.model.target import Target

MODEL = tiny.llama(max_position_embeddings=4096)
PIECE = 256
LONG, SHORT = tiny.prompt(1, 6 * PIECE + 20), tiny.prompt(0, 5)


@pytest.fixture
def texts(monkeypatch):
    """A batch that records `events`: the length of every piece of a prompt, and 0 for every forward pass of the batch.
    All pieces have the size of pieces that follow many tokens.
    """
    monkeypatch.setattr(prefill, "_FAR", 0)
    made, now = Texts(MODEL), [0.0]
    made.events, made.seconds = [], {"piece": 0.0, "pass": 1.0}
    read, step = Target.read, Batch.step

    def reading(target, tokens, *args, **more):
        made.events.append(tokens.shape[1])
        now[0] += made.seconds["piece"]
        return read(target, tokens, *args, **more)

    def stepping(batch):
        if batch is made.batch._batch:
            made.events.append(0)
            now[0] += made.seconds["pass"]
        return step(batch)

    monkeypatch.setattr(Target, "read", reading)
    monkeypatch.setattr(Batch, "step", stepping)
    monkeypatch.setattr(continuous, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return made


def step_until_begun(texts, row):
    """Step until a request has output."""
    while not texts.outputs[row]:
        texts.step()


def test_short_prompt_does_not_wait_for_the_rest_of_a_long_one(texts):
    long = texts.join(LONG, 6)
    texts.step()
    texts.step()
    short = texts.join(SHORT, 6)
    texts.step()
    assert texts.events[:3] == [PIECE, PIECE, SHORT.shape[1]]
    assert texts.outputs[short]
    assert not texts.outputs[long]
    texts.finish()
    assert [texts.outputs[row] for row in (long, short)] == [plain(MODEL, ids, 6) for ids in (LONG, SHORT)]


def test_other_requests_step_for_as_long_as_a_piece_took(texts):
    """The last piece, which is short and emits a token, is not delayed."""
    texts.seconds["piece"] = 3.0
    texts.join(SHORT, 200, "plain")
    step_until_begun(texts, texts.join(LONG, 6, "plain"))
    pieces = "".join("." if event == 0 else "P" for event in texts.events)
    assert pieces[1:] == "." + "P..." * 5 + "P.P."


@pytest.mark.parametrize("length", [PIECE, PIECE + 1], ids=["less than a piece", "a whole piece"])
def test_many_short_prompts_do_not_starve_a_long_one(texts, length):
    """With and without other requests that have begun."""
    long = texts.join(LONG, 6)
    others = []
    for _ in range(60):
        others.append(texts.join(tiny.prompt(0, length), 1))
        texts.step()
    assert texts.outputs[long]
    assert sum(bool(texts.outputs[other]) for other in others) > 40
    texts.finish()
    assert texts.outputs[long] == plain(MODEL, LONG, 6)


def test_cached_prefix_makes_a_prompt_short(texts):
    prefixes = PrefixCache(texts.batch.target, 10**9).of("")
    step_until_begun(texts, texts.join(LONG, 1, hints=Hints(prefixes)))
    other = texts.join(tiny.prompt(3, 3 * PIECE), 1)
    texts.step()
    texts.events.clear()
    longer = torch.cat([LONG, SHORT], dim=1)
    again = texts.join(longer, 1, hints=Hints(prefixes))
    texts.step()
    assert texts.events[0] == SHORT.shape[1]
    assert texts.outputs[again] == plain(MODEL, longer, 1)
    assert not texts.outputs[other]


@pytest.mark.parametrize("begins", [True, False], ids=["being read", "waiting"])
def test_request_that_leaves_during_prefill_ends_immediately(texts, begins):
    """Slots already computed are cached, and the other requests continue."""
    prefixes, gone = PrefixCache(texts.batch.target, 10**9).of(""), []

    def reading():
        if gone:
            raise GoneError

    other = texts.join(SHORT, 60)
    texts.step()
    if not begins:
        texts.seconds["piece"] = 1000.0
        texts.join(tiny.prompt(5, 2 * PIECE), 1)
        texts.step()
    left = texts.join(LONG, 6, reading=reading, hints=Hints(prefixes))
    texts.step()
    texts.step()
    texts.events.clear()
    gone.append(True)
    texts.step()
    assert texts.events == [0]
    assert isinstance(left.error, GoneError)
    assert left in texts.ended
    assert left not in texts.batch.requests
    assert prefixes.cached_tokens(LONG[0]) == left.cached == (2 * PIECE if begins else 0)
    texts.finish()
    assert texts.outputs[left] == []
    assert texts.outputs[other] == plain(MODEL, SHORT, 60)


@dataclass
class StateRecorder(tr.Drafter):
    """Records the hidden states of prompts."""

    def __post_init__(self):
        self.read = []

    @property
    def traits(self):
        return tr.DrafterTraits(states=lambda layers: [layers])

    def read_prompt(self, states):
        self.read.append(states)

    def draft(self, context):
        return tr.make_drafter("plain").draft(context)


@pytest.mark.parametrize(("length", "streamed"), [(3 * PIECE, True), (3 * PIECE + 1, True), (3 * PIECE + 2, False)])
def test_hidden_states_of_a_prompt_are_the_same_in_pieces(texts, length, streamed):
    drafter, ids = StateRecorder(), tiny.prompt(2, length)
    other = texts.join(SHORT, 60)
    texts.step()
    row = texts.join(ids, 4, drafter, streamed=streamed)
    texts.finish()
    assert {row.error, other.error} == {None}
    assert texts.outputs[row] == plain(MODEL, ids, 4)
    assert len([event for event in texts.events if event > PIECE + 1]) == 0
    whole = MODEL(ids, output_hidden_states=True).hidden_states[-1][0, :-1]
    read = torch.cat(drafter.read)
    assert torch.allclose(read, whole, atol=1e-4)


def test_single_prompt_is_split_into_the_same_pieces(texts):
    """`reading_prompt` of a streamer is called before each piece, and may end the call."""
    asked = []

    def put(tokens):
        pass

    streamer = SimpleNamespace(put=put, end=lambda: None, reading_prompt=lambda: asked.append(len(texts.events)))
    model = tr.accelerate(tiny.llama(max_position_embeddings=4096))
    said = model.generate(LONG, max_new_tokens=6, do_sample=False, streamer=streamer)
    assert said[0, LONG.shape[1] :].tolist() == plain(MODEL, LONG, 6)
    assert texts.events == [PIECE] * 6 + [20]
    assert asked == list(range(7))

    def leave():
        raise GoneError

    streamer.reading_prompt = leave
    texts.events.clear()
    with pytest.raises(GoneError):
        model.generate(LONG, max_new_tokens=6, do_sample=False, streamer=streamer)
    assert texts.events == []


@pytest.mark.parametrize("streamed", [True, False])
def test_first_draft_waits_for_the_hidden_states_of_the_whole_prompt(texts, streamed, tmp_path):
    """A drafter may not draft from those of the first pieces alone."""
    row = texts.join(LONG[:, : 2 * PIECE], 6, example("eagle", MODEL, tmp_path), streamed=streamed)
    texts.finish()
    assert row.error is None, row.error
    assert texts.outputs[row] == plain(MODEL, LONG[:, : 2 * PIECE], 6)
    assert row.stats.drafted > 0
