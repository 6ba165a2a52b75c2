"""Who waits for whom in a running batch: long prompts are read in pieces, and nobody waits for the rest of one."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from support import tiny
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
    """A batch that tells what it does, `events`: the length of every piece of a prompt, and 0 for every pass of all.
    All pieces are as those behind many tokens.
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


def begun(texts, row):
    """Goes on until a text has said something."""
    while not texts.said[row]:
        texts.step()


def test_a_short_prompt_does_not_wait_for_the_rest_of_a_long_one(texts):
    long = texts.join(LONG, 6)
    texts.step()
    texts.step()
    short = texts.join(SHORT, 6)
    texts.step()
    assert texts.events[:3] == [PIECE, PIECE, SHORT.shape[1]]
    assert texts.said[short]
    assert not texts.said[long]
    texts.finish()
    assert [texts.said[row] for row in (long, short)] == [plain(MODEL, ids, 6) for ids in (LONG, SHORT)]


def test_others_make_steps_for_as_long_as_a_piece_took(texts):
    """The last piece, which is short and gives a token, is not put off."""
    texts.seconds["piece"] = 3.0
    texts.join(SHORT, 200, "plain")
    begun(texts, texts.join(LONG, 6, "plain"))
    pieces = "".join("." if event == 0 else "P" for event in texts.events)
    assert pieces[1:] == "." + "P..." * 5 + "P.P."


@pytest.mark.parametrize("length", [PIECE, PIECE + 1], ids=["less than a piece", "a whole piece"])
def test_many_short_prompts_do_not_keep_a_long_one_from_being_read(texts, length):
    """Whether there are others that have begun or not."""
    long = texts.join(LONG, 6)
    others = []
    for _ in range(60):
        others.append(texts.join(tiny.prompt(0, length), 1))
        texts.step()
    assert texts.said[long]
    assert sum(bool(texts.said[other]) for other in others) > 40
    texts.finish()
    assert texts.said[long] == plain(MODEL, LONG, 6)


def test_what_others_have_read_makes_a_prompt_short(texts):
    prefixes = PrefixCache(texts.batch.target, 10**9).of("")
    begun(texts, texts.join(LONG, 1, hints=Hints(prefixes)))
    other = texts.join(tiny.prompt(3, 3 * PIECE), 1)
    texts.step()
    texts.events.clear()
    longer = torch.cat([LONG, SHORT], dim=1)
    again = texts.join(longer, 1, hints=Hints(prefixes))
    texts.step()
    assert texts.events[0] == SHORT.shape[1]
    assert texts.said[again] == plain(MODEL, longer, 1)
    assert not texts.said[other]


@pytest.mark.parametrize("begins", [True, False], ids=["being read", "waiting"])
def test_whoever_leaves_while_a_prompt_is_read_is_let_go_at_once(texts, begins):
    """What was read of it is kept, and the others go on."""
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
    assert texts.said[left] == []
    assert texts.said[other] == plain(MODEL, SHORT, 60)


@dataclass
class Learning(tr.Drafter):
    """Keeps the hidden states that it is shown of prompts."""

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
def test_what_is_learned_of_a_prompt_is_the_same_in_pieces(texts, length, streamed):
    drafter, ids = Learning(), tiny.prompt(2, length)
    other = texts.join(SHORT, 60)
    texts.step()
    row = texts.join(ids, 4, drafter, streamed=streamed)
    texts.finish()
    assert {row.error, other.error} == {None}
    assert texts.said[row] == plain(MODEL, ids, 4)
    assert len([event for event in texts.events if event > PIECE + 1]) == 0
    whole = MODEL(ids, output_hidden_states=True).hidden_states[-1][0, :-1]
    read = torch.cat(drafter.read)
    assert torch.allclose(read, whole, atol=1e-4)


def test_a_prompt_read_alone_is_cut_at_the_same_places(texts):
    """A streamer with `reading_prompt` is asked before each piece, and may end the call."""
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
