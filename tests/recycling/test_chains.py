"""Chains of many sequences that share forward passes: their tokens, and how many of each are verified."""

import numpy as np
import pytest

from token_recycling.costs.budget import NO_COSTS
from token_recycling.recycling.options import Options
from token_recycling.recycling.recycler import Recycler, draft_together

NODES = 12
TEXTS = [list(range(place, place + 20)) * 3 for place in (0, 30, 60)]


class Drafting:
    """Recyclers of chains with one matrix, as an engine has them."""

    def __init__(self):
        self.matrix = Options(k=4, memory=0.01, history=64).new_matrix(100)

    def recycler(self):
        recycler = Recycler(self.matrix, np.zeros(1, np.int64), NODES, chains=True, corrected=True)
        recycler.recorded = 1000  # nothing is added to the past
        return recycler

    def __call__(self, texts, recyclers, max_depth=NODES, costs=NO_COSTS, ratio=1.0):
        sequences = [np.array(text, np.int32) for text in texts]
        counts = draft_together(recyclers, sequences, [max_depth] * len(texts), costs, ratio)
        return [recycler.chain(count) for recycler, count in zip(recyclers, counts, strict=True)]


def test_where_every_token_pays_each_text_has_the_chain_that_it_has_alone():
    drafting, wanted = Drafting(), []
    for text in TEXTS:
        alone = Drafting()
        wanted += alone([text], [alone.recycler()])
    assert drafting(TEXTS, [drafting.recycler() for _ in TEXTS]) == wanted
    assert wanted[1] == TEXTS[1][:NODES]


def grown():
    """The gains of every token that may be drafted, best first."""
    drafting = Drafting()
    recyclers = [drafting.recycler() for _ in TEXTS]
    drafting(TEXTS, recyclers)
    return np.sort(np.concatenate([recycler._gains for recycler in recyclers]).astype(np.float64))[::-1]


@pytest.mark.parametrize("ratio", [1.0, 0.3])
@pytest.mark.parametrize("token_cost", [0.1, 0.9])
def test_a_pass_brings_the_most_tokens_per_time(token_cost, ratio):
    gains = grown()
    rates = (3 / ratio + np.append(0, gains.cumsum())) / (1 + token_cost * np.arange(len(gains) + 1))
    costs = np.append(np.ones(2), 1 + token_cost * np.arange(100))
    drafting = Drafting()
    drafted = drafting(TEXTS, [drafting.recycler() for _ in TEXTS], costs=costs, ratio=ratio)
    assert sum(map(len, drafted)) == int(rates.argmax())


def test_nodes_that_pay_after_others_that_do_not_are_drafted():
    """As where a kernel works on 16 rows: the first drafted tokens cost much, the others nothing."""
    gains, costs = grown(), np.append(np.ones(3), np.full(100, 3.0))
    drafting = Drafting()
    drafted = drafting(TEXTS, [drafting.recycler() for _ in TEXTS], costs=costs)
    pays = (3 + gains.sum()) / 3 > 1
    assert sum(map(len, drafted)) == (len(gains) if pays else 0)
    assert pays


@pytest.mark.parametrize("least", [0.05, 0.5, 0.99])
@pytest.mark.parametrize("texts", [TEXTS, TEXTS[:1]], ids=["together", "alone"])
def test_what_paid_in_the_last_batch_decides_nothing(texts, least):
    """It only says from which gain on nodes are added at once."""
    costs, drafted = 1 + 0.1 * np.arange(100), []
    for least_gain in (0.0, least):
        drafting = Drafting()
        drafting.matrix.least_gain = least_gain
        drafted.append(drafting(texts, [drafting.recycler() for _ in texts], costs=costs))
    assert drafted[0] == drafted[1]
    assert sum(map(len, drafted[0])) > len(texts)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_no_more_is_drafted_than_costs_are_known_of(rows):
    drafting = Drafting()
    drafted = drafting(TEXTS, [drafting.recycler() for _ in TEXTS], costs=np.ones(rows))
    assert sum(map(len, drafted)) == max(0, rows - 3)


def test_a_sequence_of_one_token_has_no_draft_and_others_stay():
    drafting = Drafting()
    recyclers = [drafting.recycler() for _ in TEXTS]
    drafting(TEXTS, recyclers)
    other = drafting.recycler()
    assert drafting([TEXTS[1][:1]], [other]) == [[]]
    assert drafting(TEXTS[:1], recyclers[:1]) == [TEXTS[0][:NODES]]


@pytest.mark.parametrize("ratio", [1.0, 0.1])
def test_gains_are_scaled_by_the_forecast_ratio(ratio):
    drafting, costs = Drafting(), 1 + 0.2 * np.arange(NODES + 1)
    tokens = np.array(TEXTS[0])
    tree = drafting.recycler().draft(tokens, NODES)
    rates = (1 + ratio * np.append(0, tree["value"][1:].cumsum())) / costs
    drafting = Drafting()
    tree = drafting.recycler().draft(tokens, NODES, costs, ratio)
    assert len(tree) == 1 + int(rates.argmax())
