"""Chains for batched sequences: their tokens, and how many of them each sequence verifies."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from token_recycling.costs import NO_COSTS
from token_recycling.recycling.batch import draft_together
from token_recycling.recycling.ngram_matrix import Options
from token_recycling.recycling.recycler import Recycler

NODES = 12
TEXTS = [list(range(place, place + 20)) * 3 for place in (0, 30, 60)]


class Drafting:
    """Chain recyclers that share one matrix, as in an engine."""

    def __init__(self):
        self.matrix = Options(k=4, memory=0.01, history=64).new_matrix(100)

    def recycler(self):
        recycler = Recycler(self.matrix, np.zeros(1, np.int64), NODES, chains=True, corrected=True)
        recycler.recorded = 1000  # nothing is added to the history
        return recycler

    def __call__(self, texts, recyclers, max_depth=NODES, costs=NO_COSTS):
        sequences = [np.array(text, np.int32) for text in texts]
        counts = draft_together(recyclers, sequences, [max_depth] * len(texts), costs)
        return [recycler.chain(count) for recycler, count in zip(recyclers, counts, strict=True)]


def test_chains_equal_those_of_single_sequences_when_every_token_pays():
    drafting, wanted = Drafting(), []
    for text in TEXTS:
        alone = Drafting()
        wanted += alone([text], [alone.recycler()])
    assert drafting(TEXTS, [drafting.recycler() for _ in TEXTS]) == wanted
    assert wanted[1] == TEXTS[1][:NODES]


def gains_of(texts):
    """Return the gains of each text's candidate tokens."""
    drafting = Drafting()
    recyclers = [drafting.recycler() for _ in texts]
    drafting(texts, recyclers)
    return [recycler.gains(recycler.grown).astype(np.float64) for recycler in recyclers]


OWN_GAINS = gains_of(TEXTS)
GAINS = np.sort(np.concatenate(OWN_GAINS))[::-1]


@given(
    rises=st.lists(st.sampled_from([0.0, 0.1, 0.4, 0.9, 3.0]), max_size=45),
    least_gain=st.sampled_from([0.0, 0.05, 0.5, 0.99]),
)
@example(rises=[0.0, 0.0, 2.0, *[0.0] * 42], least_gain=0.0)  # a kernel processes 16 rows
def test_batch_size_maximizes_tokens_per_second(rises, least_gain):
    """Compared with every size on the cost curve, for curves of any shape and any minimum gain left by the previous
    batch.
    """
    costs, drafting = np.cumsum([1.0, *rises]), Drafting()
    drafting.matrix.least_gain = least_gain
    drafted = drafting(TEXTS, [drafting.recycler() for _ in TEXTS], costs=costs)
    rates = (len(TEXTS) + np.append(0, GAINS.cumsum()))[: max(1, len(costs) - 2)]
    rates /= costs[min(2, len(costs) - 1) :][: len(rates)]
    size = sum(map(len, drafted))
    assert rates[size] == pytest.approx(rates.max(), rel=1e-6)
    expected = sum(own[: len(tokens)].sum() for own, tokens in zip(OWN_GAINS, drafted, strict=True))
    assert expected == pytest.approx(GAINS[:size].sum()), "the best tokens of all sequences"


def test_one_token_sequence_has_no_draft_and_leaves_others_unchanged():
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
