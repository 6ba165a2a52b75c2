"""Copies that go on behind an edit: what is drafted after every token of an answer that repeats a file."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from token_recycling.recycling.ngram_matrix import Options
from token_recycling.recycling.recycler import Recycler

FILE = list(range(100, 160))
ASKED = [1, 2, 3]


class Answering:
    """A text that is answered token by token, and what is drafted for it."""

    def __init__(self, prompt, prediction=None, nodes=12):
        options = Options(k=4, memory=0.01, history=64)
        self.tokens = list(prompt)
        self.recycler = Recycler(options.new_matrix(1000), np.array(self.tokens), nodes)
        if prediction is not None:
            self.recycler.predict(np.array(prediction))

    def draft(self, room=99):
        """The tokens of the likeliest path."""
        tree = self.recycler.draft(np.array(self.tokens), room)
        path, node = [], 0
        while True:
            below = [other for other in range(1, len(tree)) if tree["parent"][other] == node]
            if not below:
                return path
            node = max(below, key=lambda other: tree["value"][other])
            path.append(int(tree["token"][node]))

    def drafted(self):
        """The first tokens that may follow."""
        tree = self.recycler.draft(np.array(self.tokens), 99)
        return {int(tree["token"][node]) for node in range(1, len(tree)) if tree["parent"][node] == 0}

    def say(self, *tokens, ends=False):
        for token in tokens:
            self.draft()
            self.tokens.append(token)
            self.recycler.observe([token], ends and token == tokens[-1])


def test_a_prediction_is_drafted_from_its_first_token():
    answering = Answering(ASKED, FILE)
    assert answering.draft() == FILE[:12]
    answering.say(*FILE[:5])
    assert answering.draft() == FILE[5:17]
    assert Answering(ASKED).draft() == []


@pytest.mark.parametrize(
    ("said", "following"),
    [
        ([*FILE[:10], 900, FILE[11]], 12),  # a replacement
        ([*FILE[:10], 900, 901, 902, FILE[10]], 11),  # an insertion
        ([*FILE[:10], *FILE[30:32]], 32),  # a deletion
    ],
    ids=["replaced", "inserted", "left out"],
)
@pytest.mark.parametrize("in_prompt", [False, True])
def test_after_an_edit_the_copy_goes_on(said, following, in_prompt):
    answering = Answering([*ASKED, *FILE, 4]) if in_prompt else Answering(ASKED, FILE)
    answering.say(*said[:-1])
    assert said[-1] in answering.drafted()
    answering.say(said[-1])
    assert answering.draft()[:10] == FILE[following : following + 10]


def test_the_next_place_is_taken_where_several_have_the_same_tokens():
    """Four functions that begin alike: the copy goes on in the one that it was in."""
    parts = [[200, 201, 202, *range(300 + 20 * part, 310 + 20 * part), 203] for part in range(4)]
    file = [token for part in parts for token in part]
    for part in range(3):
        answering = Answering(ASKED, file)
        answering.say(*file[: 14 * part], 200, 201, 900, 202)
        assert parts[part][3] in answering.drafted()
        answering.say(parts[part][3])
        assert answering.draft()[:9] == parts[part][4:13]


def test_a_name_that_was_replaced_is_replaced_again():
    """Of the old name's two tokens one is replaced, by two; elsewhere they stand apart."""
    file = [*FILE[:8], 50, 51, *FILE[8:16], 50, 51, *FILE[16:30], 50, 51, *FILE[30:]]
    edited = [*FILE[:8], 60, 61, 51, *FILE[8:16], 60, 61, 51, *FILE[16:30], 60, 61, 51, *FILE[30:]]
    answering = Answering(ASKED, file)
    answering.say(*edited[:14])
    assert answering.draft(room=30)[:8] == edited[14:22]
    answering.say(*edited[14:27])
    assert answering.draft(room=30)[:8] == edited[27:35]


def test_a_prediction_is_of_one_text_alone_and_what_it_had_is_counted():
    answering = Answering(ASKED, FILE)
    answering.say(*FILE[:5])
    other = Recycler(answering.recycler.matrix, np.array(ASKED), 12)
    assert len(other.draft(np.array([*ASKED, FILE[7]]), 9)) == 1
    answering.say(*FILE[5:20], 900, *FILE[21:40], ends=True)
    assert answering.recycler.predicted == 39


@pytest.mark.parametrize("chains", [False, True])
@given(
    file=st.lists(st.integers(0, 6), max_size=40),
    answer=st.lists(st.integers(0, 6), min_size=1, max_size=60),
    prompt=st.lists(st.integers(0, 6), min_size=1, max_size=30),
    pieces=st.lists(st.integers(1, 5), min_size=1, max_size=60),
)
def test_any_text_is_drafted_for(chains, file, answer, prompt, pieces):
    """Drafts are trees of tokens of the vocabulary, whatever was predicted and whatever is said."""
    options = Options(k=2, memory=0.001, history=64)
    recycler, tokens = Recycler(options.new_matrix(7), np.array(prompt), 9, chains=chains), list(prompt)
    recycler.predict(np.array(file, np.int64))
    for piece in pieces:
        if not answer:
            break
        tree = recycler.draft(np.array(tokens), 8)
        assert tree["token"][0] == tokens[-1]
        assert ((tree["token"] >= 0) & (tree["token"] < 7)).all()
        assert (tree["parent"][1:] < np.arange(1, len(tree))).all()
        assert (tree["value"] > 0).all()
        said, answer = answer[:piece], answer[piece:]
        tokens += said
        recycler.observe(said, not answer)
    assert 0 <= recycler.predicted <= len(file)
