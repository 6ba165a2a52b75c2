"""Copying that continues after an edit: drafts at every token of an output that repeats a file."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from token_recycling.recycling.ngram_matrix import Options
from token_recycling.recycling.recycler import Recycler

FILE = list(range(100, 160))
ASKED = [1, 2, 3]


class Decoding:
    """A sequence decoded token by token, with its drafts."""

    def __init__(self, prompt, prediction=None, nodes=12):
        options = Options(k=4, memory=0.01, history=64)
        self.tokens = list(prompt)
        self.recycler = Recycler(options.new_matrix(1000), np.array(self.tokens), nodes)
        if prediction is not None:
            self.recycler.predict(np.array(prediction))

    def draft(self, room=99):
        """Return the tokens of the most probable path."""
        tree = self.recycler.draft(np.array(self.tokens), room)
        path, node = [], 0
        while True:
            below = [other for other in range(1, len(tree)) if tree["parent"][other] == node]
            if not below:
                return path
            node = max(below, key=lambda other: tree["value"][other])
            path.append(int(tree["token"][node]))

    def next_tokens(self):
        """Return the candidates for the next token."""
        tree = self.recycler.draft(np.array(self.tokens), 99)
        return {int(tree["token"][node]) for node in range(1, len(tree)) if tree["parent"][node] == 0}

    def emit(self, *tokens, ends=False):
        for token in tokens:
            self.draft()
            self.tokens.append(token)
            self.recycler.observe([token], ends and token == tokens[-1])


def test_prediction_is_drafted_from_its_first_token():
    decoding = Decoding(ASKED, FILE)
    assert decoding.draft() == FILE[:12]
    decoding.emit(*FILE[:5])
    assert decoding.draft() == FILE[5:17]
    assert Decoding(ASKED).draft() == []


@pytest.mark.parametrize(
    ("said", "following"),
    [
        ([*FILE[:10], 900, FILE[11]], 12),  # a replacement
        ([*FILE[:10], 900, 901, 902, FILE[10]], 11),  # an insertion
        ([*FILE[:10], *FILE[30:32]], 32),  # a deletion
    ],
    ids=["replaced", "inserted", "deleted"],
)
@pytest.mark.parametrize("in_prompt", [False, True])
def test_copying_continues_after_an_edit(said, following, in_prompt):
    decoding = Decoding([*ASKED, *FILE, 4]) if in_prompt else Decoding(ASKED, FILE)
    decoding.emit(*said[:-1])
    assert said[-1] in decoding.next_tokens()
    decoding.emit(said[-1])
    assert decoding.draft()[:10] == FILE[following : following + 10]


def test_copying_resumes_at_the_nearest_of_several_matches():
    """Four functions begin alike: copying resumes in the current one."""
    parts = [[200, 201, 202, *range(300 + 20 * part, 310 + 20 * part), 203] for part in range(4)]
    file = [token for part in parts for token in part]
    for part in range(3):
        decoding = Decoding(ASKED, file)
        decoding.emit(*file[: 14 * part], 200, 201, 900, 202)
        assert parts[part][3] in decoding.next_tokens()
        decoding.emit(parts[part][3])
        assert decoding.draft()[:9] == parts[part][4:13]


def test_a_repeated_replacement_is_drafted():
    """Two tokens replace the first token of a two-token name. Its other occurrences are elsewhere in the file."""
    file = [*FILE[:8], 50, 51, *FILE[8:16], 50, 51, *FILE[16:30], 50, 51, *FILE[30:]]
    edited = [*FILE[:8], 60, 61, 51, *FILE[8:16], 60, 61, 51, *FILE[16:30], 60, 61, 51, *FILE[30:]]
    decoding = Decoding(ASKED, file)
    decoding.emit(*edited[:14])
    assert decoding.draft(room=30)[:8] == edited[14:22]
    decoding.emit(*edited[14:27])
    assert decoding.draft(room=30)[:8] == edited[27:35]
    file = [token for part in range(6) for token in (50, 51, *range(100 + 10 * part, 110 + 10 * part))]
    decoding = Decoding(ASKED, file)
    decoding.emit(60, *file[1:36])
    assert decoding.draft(room=30)[:8] == file[36:44], "the rule was wrong more often than right"


def test_prediction_serves_one_sequence_and_its_accepted_tokens_are_counted():
    decoding = Decoding(ASKED, FILE)
    decoding.emit(*FILE[:5])
    other = Recycler(decoding.recycler.matrix, np.array(ASKED), 12)
    assert len(other.draft(np.array([*ASKED, FILE[7]]), 9)) == 1
    decoding.emit(*FILE[5:20], 900, *FILE[21:40], ends=True)
    assert decoding.recycler.predicted == 39
    twice = Decoding(ASKED, FILE)  # with edits, then without
    twice.emit(*(900 if place % 10 == 9 else token for place, token in enumerate(FILE)), *FILE, ends=True)
    assert twice.recycler.predicted == len(FILE)
    beside = Decoding([*ASKED, *FILE, 4], [900] * 30)
    beside.emit(*FILE[:30], ends=True)
    assert beside.recycler.predicted == 0, "copied from the prompt"


@pytest.mark.parametrize("chains", [False, True])
@given(
    file=st.lists(st.integers(0, 6), max_size=40),
    answer=st.lists(st.integers(0, 6), min_size=1, max_size=60),
    prompt=st.lists(st.integers(0, 6), min_size=1, max_size=30),
    pieces=st.lists(st.integers(1, 5), min_size=1, max_size=60),
)
def test_drafts_are_valid_trees_for_any_prediction_and_output(chains, file, answer, prompt, pieces):
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
