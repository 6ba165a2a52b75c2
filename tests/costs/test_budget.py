"""Draft sizes that pay, computed by hand on simulated machines; drafters follow them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import tiny
from support.draft_tables import FORK, grown
from support.runs import fix_costs, freeze_overhead

import token_recycling as tr
from token_recycling.costs import best_size, paying_prefix
from token_recycling.drafters._shared.draft_models import CausalDrafter
from token_recycling.drafters._shared.graph import Rules
from token_recycling.loop.pacer import Ledger, paying_size, prune
from token_recycling.trees.draft import Budget

pytestmark = pytest.mark.measured

CHEAP, STEP = np.array([1.0, 1.0, 1.0, 2.0]), 0.1
"""Two nodes besides the root are free, the third doubles the time; a drafting step costs 0.1."""


def test_drafting_continues_while_a_step_pays():
    """With one certain node the rate is 2 / 1.1, so a step of 0.1 must add more than 0.18 expected tokens."""
    budget = Budget(CHEAP, of_pass=STEP)
    assert budget.pays([1.0])
    assert not budget.pays([0.18], [1.0])
    assert budget.passes == 1
    assert budget.pays([0.19], [1.0])
    other = Budget(CHEAP, of_pass=STEP)
    assert other.pays([1.0])
    assert other.pays([0.1, 0.09], [1.0])


@given(st.lists(st.floats(0, 1), max_size=20), st.integers(0, 5))
def test_best_size_maximizes_tokens_per_second(probabilities, steps):
    costs = np.linspace(1, 3, 12)
    chosen, rate = best_size(probabilities, costs + steps * 0.2)
    most_probable = sorted(probabilities, reverse=True)
    rates = [(1 + sum(most_probable[:n])) / (costs[n] + steps * 0.2) for n in range(min(12, len(most_probable) + 1))]
    assert rate == pytest.approx(max(rates))
    assert rates[chosen] == pytest.approx(rate)
    assert paying_prefix(np.arange(1.0, 5), 1, np.arange(1.0, 4)) == 2, "of equal rates, the larger draft"


def test_graph_is_grown_and_pruned_to_what_pays():
    """1 (0.6) and its child 3 (0.54) are verified. Two steps of 0.6 forward passes give 2.14 tokens in 2.2; a third
    would have to add 0.58, but children of 3 add 0.54 at most. A step of 0.1 pays.
    """
    rules, times = Rules(depth=5, k=2, nodes=3), np.array([1.0, 1.0, 1.0, 3.0])
    for of_pass, layers in ((0.1, [[1, 2], [3]]), (0.6, [[1, 2]])):
        budget = Budget(times, of_pass=of_pass)
        graph, reader = grown(FORK, rules, budget=budget)
        (verified,) = prune([graph.unrolled(rules.nodes)], budget.times, [1.0])
        assert verified.tokens.tolist() == [0, 1, 3]
        assert reader.layers == layers


falling = st.lists(st.floats(0.01, 1), max_size=4).map(lambda values: np.array(sorted(values, reverse=True)))


@given(st.lists(falling, max_size=3), st.integers(1, 4), st.lists(st.floats(0, 2), min_size=1, max_size=6))
def test_common_size_of_all_trees_maximizes_tokens_per_second(values, least, more):
    probabilities, costs = [np.append(1.0, own) for own in values], np.cumsum([1.0, *more])
    chosen = paying_size(probabilities, costs, least)
    sizes = range(least, min(len(costs), max(map(len, probabilities), default=1)) + 1)

    def rate(size):
        return sum(own[:size].sum() for own in probabilities) / costs[size - 1]

    if not sizes:
        assert chosen == least
    else:
        assert chosen in sizes
        assert rate(chosen) >= max(map(rate, sizes)) - 1e-9


@pytest.fixture
def machine(monkeypatch):
    """Cost of a forward pass of the draft model, relative to the target; up to eight rows cost the same."""
    cost = [0.25]
    fix_costs(monkeypatch, (1, 8, 16), (1.0, 1.0, 3.0))
    freeze_overhead(monkeypatch)
    monkeypatch.setattr(CausalDrafter, "step_cost", lambda *_: cost[0])
    return cost


@pytest.fixture
def small():
    return tiny.llama(0, num_hidden_layers=1)


def run(model, draft, sequences=1, **options):
    stats, ids = tr.Stats(), tiny.prompt(0, 6).repeat(sequences, 1)
    model.generation_config.pad_token_id = 0
    drafter = tr.make_drafter("draft_model", model=draft, **options)
    ours = tr.generate(model, ids, drafter=drafter, stats=stats, max_new_tokens=20)
    assert torch.equal(ours, model.generate(ids, max_new_tokens=20))
    return stats


def test_default_tree_size_is_the_one_that_pays(model, small, machine):
    stats = run(model, small, theta_prob=0.0, theta_sib=0.0)
    assert "as many nodes as pay" in stats.drafter
    assert 2 < max(stats.nodes) <= 9
    machine[0] = 0.9
    assert run(model, small, theta_prob=0.0, theta_sib=0.0).drafted < stats.drafted
    assert max(run(model, small, theta_prob=0.0, theta_sib=0.0, nodes=30).nodes) == 31


def test_nothing_is_drafted_where_nothing_pays(model, small, machine):
    """A draft model as slow as the target; or four sequences, each drafted separately."""
    machine[0] = 1.0
    stats = run(model, small)
    assert (stats.steps, stats.drafted) == (20, 0)
    assert stats.drafter.endswith("nothing drafted, since a drafting step costs as much as it may save")
    machine[0] = 0.25
    assert run(model, small, sequences=4).drafted == 0
    assert run(model, small, sequences=2).drafted > 0


def test_disabled_draft_model_probes_and_resumes(model, small, machine):
    """Its steps once took five forward passes of the target, as on a busy machine; now they are fast again."""
    drafter = tr.make_drafter("draft_model", model=small)

    def drafted():
        stats = tr.Stats()
        tr.generate(model, tiny.prompt(0, 6), drafter=drafter, stats=stats, max_new_tokens=20)
        return stats.drafted

    assert drafted()
    (overhead,) = Ledger.of(drafter).overheads.values()
    overhead.step = 5.0
    runs = [drafted() for _ in range(20)]
    assert runs[0] == 0
    assert runs[-1] > 0


def test_chains_and_sampled_drafts_have_fixed_sizes(model, small, machine):
    """On every machine a seed gives the same output."""
    sequences = []
    for cost in (0.1, 5.0):
        machine[0] = cost
        assert max(run(model, small, mode="sequence", depth=3).nodes) == 4
        drafter, stats = tr.make_drafter("draft_model", model=small, sampled=True), tr.Stats()
        torch.manual_seed(0)
        sampling = {"do_sample": True, "max_new_tokens": 20}
        sequences.append(tr.generate(model, tiny.prompt(0, 6), drafter=drafter, stats=stats, **sampling))
        assert stats.drafted
    assert torch.equal(*sequences)
