"""Chains of many texts that grow together: what they say, how they share a pass, and the slots that texts have."""

import numpy as np
import pytest

from token_recycling.costs.budget import NO_COSTS
from token_recycling.recycling.options import Options
from token_recycling.recycling.recycler import Recycler

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


@pytest.mark.parametrize("token_cost", [0.1, 0.9])
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


@pytest.mark.parametrize("ratio", [1.0, 0.1])
def test_gains_are_scaled_by_the_forecast_ratio(ratio):
    drafting, costs = Drafting(), 1 + 0.2 * np.arange(NODES + 1)
    tokens = np.array(TEXTS[0])
    tree = drafting.recycler.draft_one(drafting.take(), tokens, NODES)
    rates = (1 + ratio * np.append(0, tree.values[1:].cumsum())) / costs
    drafting = Drafting()
    tree = drafting.recycler.draft_one(drafting.take(), tokens, NODES, costs, ratio)
    assert len(tree.tokens) == 1 + int(rates.argmax())
