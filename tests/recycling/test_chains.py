"""Chains of many texts that grow together: what they say, how they share a pass, and the slots that texts have."""

import numpy as np
import pytest

from token_recycling.costs.budget import NO_COSTS
from token_recycling.recycling.options import Options
from token_recycling.recycling.recycler import Recycler
from token_recycling.recycling.suffix_index import BREAK, masked

NODES = 12
TEXTS = [list(range(place, place + 20)) * 3 for place in (0, 30, 60)]


class Drafting:
    """A recycler of chains, asked as an engine would."""

    def __init__(self):
        options = Options(k=4, memory=0.01, history=64)
        self.recycler = Recycler(options.new_matrix(100), options, NODES, chains=True, corrected=True)

    @property
    def arrays(self):
        return self.recycler._sequences.arrays

    def take(self):
        text = self.recycler.begin(np.zeros(1, np.int64))
        text.recorded = 1000  # nothing is added to the past
        return text

    def __call__(self, texts, slots, rooms=NODES, costs=NO_COSTS):
        tokens = np.zeros((len(texts), max(map(len, texts))), np.int32)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        lengths, room = np.array([len(text) for text in texts]), np.full(len(texts), rooms)
        counts = self.recycler.draft(slots, tokens, np.arange(len(texts)), lengths, room, costs)
        return [self.recycler.chain(slot, count) for slot, count in zip(slots, counts, strict=True)]


def test_where_every_token_pays_each_text_has_the_chain_that_it_has_alone():
    drafting, wanted = Drafting(), []
    for text in TEXTS:
        alone = Drafting()
        wanted += alone([text], [alone.take()])
    assert drafting(TEXTS, [drafting.take() for _ in TEXTS]) == wanted
    assert wanted[1] == TEXTS[1][:NODES]


@pytest.mark.parametrize("token_cost", [0.01, 0.1, 0.3, 0.9])
def test_a_pass_brings_the_most_tokens_per_time(token_cost):
    drafting = Drafting()
    slots = [drafting.take() for _ in TEXTS]
    drafting(TEXTS, slots)
    grown = drafting.arrays
    gains = np.sort(grown.trees.values[[slot.slot for slot in slots], 1:].ravel())[::-1]
    rates = (3 + np.append(0, gains.cumsum())) / (1 + token_cost * np.arange(len(gains) + 1))
    wanted = int(rates.argmax())
    costs = np.append(np.ones(2), 1 + token_cost * np.arange(100))
    drafting = Drafting()
    assert sum(map(len, drafting(TEXTS, [drafting.take() for _ in TEXTS], costs=costs))) == wanted


def test_a_pass_is_not_larger_than_its_costs_are_known():
    drafting = Drafting()
    drafts = drafting(TEXTS, [drafting.take() for _ in TEXTS], costs=np.ones(10))
    assert sum(map(len, drafts)) == 10 - 3


def test_drafts_are_longer_where_earlier_ones_were_right_and_shorter_where_they_were_wrong():
    said = {}
    for right in (True, False):
        drafting = Drafting()
        slot, text, costs = drafting.take(), list(range(40)) * 2, 1 + 0.3 * np.arange(40)
        lengths = []
        for _ in range(6):
            (made,) = drafting([text], [slot], costs=costs)
            lengths.append(len(made))
            following = (text[-1] + 1) % 40
            text = [*text, following if right else (following + 7) % 40]
        said[right] = lengths
    assert said[True][-1] > said[True][0] > said[False][-1]


def test_what_stands_in_other_texts_is_not_drafted():
    drafting = Drafting()
    drafting(TEXTS[:1], [drafting.take()])
    assert drafting([TEXTS[0][:1]], [drafting.take()]) == [[]]


def test_slots_are_used_again_and_forget_their_text():
    drafting = Drafting()
    slots = [drafting.take() for _ in range(5)]
    assert sorted(slot.slot for slot in slots) == [0, 1, 2, 3, 4]
    drafting(TEXTS, slots[:3])
    del slots[1]
    slots.append(drafting.take())
    assert slots[-1].slot == 1
    assert drafting([TEXTS[1][:1]], slots[-1:]) == [[]]
    assert drafting(TEXTS[:1], slots[:1]) == [TEXTS[0][:NODES]], "others stay"


def test_a_long_match_is_copied_and_where_it_ends_what_followed_elsewhere_is():
    drafting = Drafting()
    slot, said = drafting.take(), list(range(20, 60))
    text = [*said, 90, *said[:20]]
    for end in range(30, len(text) + 1):  # until the calibration has seen that long matches are right
        (made,) = drafting([text[:end]], [slot])
    assert made == said[20 : 20 + NODES]
    (made,) = drafting([[*text, *said[20:35]]], [slot])
    assert made[:6] == [*said[35:], 90], "the last tokens before the text repeats itself"
    assert made[6:] == said[: NODES - 6], "what followed the text's own end"


def test_what_earlier_texts_said_is_copied_up_to_their_end():
    drafting = Drafting()
    slot, said, prompt = drafting.take(), list(range(20)), list(range(60, 80))
    drafting.recycler.matrix.history.extend([*masked(np.array(prompt)).tolist(), *said, BREAK, 50, 51])
    text = [*prompt, *said[:12]]
    for end in range(1, 13):
        (made,) = drafting([text[: 20 + end]], [slot])
        if end == 7:
            assert made == said[7 : 7 + NODES]
    assert made == said[12:], "nothing of the prompt, nothing beyond the break"


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.1])
def test_gains_are_scaled_by_the_forecast_ratio(ratio):
    drafting, costs = Drafting(), 1 + 0.2 * np.arange(NODES + 1)
    tokens = np.array(TEXTS[0])
    tree = drafting.recycler.draft_one(drafting.take(), tokens, NODES)
    rates = (1 + ratio * np.append(0, tree.values[1:].cumsum())) / costs
    drafting = Drafting()
    tree = drafting.recycler.draft_one(drafting.take(), tokens, NODES, costs, ratio)
    assert len(tree.tokens) == 1 + int(rates.argmax())
