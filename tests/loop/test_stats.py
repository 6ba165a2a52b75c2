"""Statistics, on a model that counts modulo 16: every acceptance can be computed by hand."""

import json
from collections import Counter
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny
from support.drafters import Garbage, learned
from support.strategies import trees

import token_recycling as tr
from token_recycling import Template
from token_recycling.loop.stats import PARTS

SMALL = tiny.llama(vocab_size=5, num_hidden_layers=1)


def run(model, drafter, tokens, start=0, **options):
    stats = tr.Stats()
    steps = tr.stream(model, torch.tensor([start]), drafter, max_new_tokens=tokens, stats=stats, **options)
    emitted = [token for step in steps for token in step.tokens]
    assert emitted == [(start + 1 + place) % 16 for place in range(tokens)]
    return stats


@pytest.mark.parametrize(
    ("tree", "tokens", "lengths", "drafted", "discarded", "by_depth", "by_rank"),
    [
        (None, 10, {1: 10}, 0, 0, {}, {}),
        ("chain:4", 20, {5: 4}, 16, 0, {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}, {0: 1.0}),
        # Steps of 5, 5 and 2: only one node is useful in the last step.
        ("chain:4", 12, {5: 2, 2: 1}, 4 + 4 + 1, 0, {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}, {0: 1.0}),
        # Only 0 and 00 are correct. Node 10 is never tried, since its parent is never accepted.
        ("0 1 2 00 10", 9, {3: 3}, 15, 9, {1: 1.0, 2: 1.0}, {0: 1.0, 1: 0.0, 2: 0.0}),
    ],
)
def test_accepted_and_discarded_nodes_are_counted(
    counting, tree, tokens, lengths, drafted, discarded, by_depth, by_rank
):
    stats = run(counting, learned(counting, tree) if tree else "plain", tokens)
    assert dict(stats.lengths) == lengths
    assert (stats.tokens, stats.mat) == (tokens, tokens / stats.steps)
    assert stats.first_tokens == next(iter(lengths)), "all tokens of the step that includes the prefill"
    assert (stats.drafted, stats.discarded) == (drafted, discarded)
    assert (stats.discard_rate, stats.verification_rate) == (discarded / tokens, stats.steps / tokens)
    assert (stats.acceptance_by_depth, stats.acceptance_by_rank) == (by_depth, by_rank)
    assert json.loads(json.dumps(stats.as_dict()))["discarded_tokens"] == discarded


def figures_of(steps):
    """Recompute the statistics from the steps."""
    tokens, drafts = [len(step.tokens) for step in steps], [step.draft for step in steps]
    accepted, depths = [len(step.accepted) - 1 for step in steps], [draft.depth for draft in drafts]
    drafted, tried, right = sum(map(len, drafts)) - len(drafts), Counter(), Counter()
    for step in steps:
        tried.update(rank for node in step.accepted for rank in range(len(step.draft.children[node])))
        right.update(step.draft.ranks[node] for node in step.accepted[1:])
    return {
        "tokens": sum(tokens),
        "steps": len(steps),
        "mat": sum(tokens) / len(steps),
        "drafted": drafted,
        "discarded": drafted - sum(accepted),
        "discard_rate": (drafted - sum(accepted)) / sum(tokens),
        "verification_rate": len(steps) / sum(tokens),
        "acceptance_rate": sum(accepted) / max(1, sum(depths)),
        "plain_steps": [*map(len, drafts)].count(1) / len(steps),
        "lengths": Counter(tokens),
        "nodes": Counter(map(len, drafts)),
        "depths": Counter(depths),
        "acceptance_by_depth": {
            depth: sum(number >= depth for number in accepted) / sum(number >= depth for number in depths)
            for depth in range(1, max(depths) + 1)
        },
        "acceptance_by_rank": {rank: right[rank] / number for rank, number in sorted(tried.items())},
    }


@settings(max_examples=12)
@given(st.lists(st.lists(trees(max_nodes=12), min_size=1, max_size=4), min_size=1, max_size=3), st.integers(0, 10**6))
def test_statistics_equal_those_recomputed_from_steps_for_runs_and_sums(shapes, seed):
    """Trees of every shape, including a lone root, with random tokens that are sometimes correct."""
    parts, steps, length = [], [], 0
    for place, trees_of_run in enumerate(shapes):
        stats, prompt = tr.Stats(cached_tokens=place), tiny.prompt(place, 3 + place, 5)
        drafter = Garbage([Template([-1], [0]), *trees_of_run], seed, 5)
        own = list(tr.stream(SMALL, prompt, drafter, max_new_tokens=12, stats=stats))
        parts, steps, length = [*parts, stats], [*steps, own], length + prompt.shape[1]
    total = sum(parts[1:], parts[0])
    for stats, said in (*zip(parts, steps, strict=True), (total, [step for own in steps for step in own])):
        wanted = figures_of(said)
        assert {name: getattr(stats, name) for name in wanted} == wanted
    assert (total.prompt_tokens, total.cached_tokens) == (length, sum(range(len(parts))))
    assert total.first_tokens == sum(len(own[0].tokens) for own in steps)
    assert total.seconds == pytest.approx({name: sum(part.seconds[name] for part in parts) for name in PARTS})


def test_sum_synchronizes_if_one_run_does_and_keeps_the_last_description():
    waiting, other = tr.Stats(synchronize=True, drafter="first", path="eager"), tr.Stats(drafter="second")
    for total, waits, drafter, path in (
        (waiting + other, True, "second", "eager"),
        (other + waiting, True, "first", "eager"),
        (waiting + tr.Stats(), True, "first", "eager"),
        (other + other, False, "second", ""),
    ):
        assert (total.synchronize, total.drafter, total.path) == (waits, drafter, path)


def test_times_of_the_parts_of_a_step_sum_up(model):
    stats = tr.Stats(synchronize=True)
    for _ in tr.stream(model, tiny.prompt(0, 20), max_new_tokens=30, stats=stats):
        pass
    assert set(stats.seconds) == set(PARTS)
    assert all(seconds > 0 for seconds in stats.seconds.values())
    assert sum(stats.seconds.values()) == pytest.approx(stats.decode_seconds)
    assert stats.prefill_seconds > 0
    assert stats.tokens_per_second == pytest.approx((30 - stats.first_tokens) / stats.decode_seconds)
    assert stats.overhead == pytest.approx(stats.decode_seconds / stats.seconds["forward"] - 1)
    assert stats.prompt_tokens == 20


def test_dictionary_has_every_field_and_property(counting):
    """Under the same names, with these exceptions."""
    names = {
        "lengths": "steps_by_length",
        "nodes": "steps_by_nodes",
        "depths": "steps_by_depth",
        "tried": "tried_by_depth_and_rank",
        "accepted": "accepted_by_depth_and_rank",
        "drafted": "drafted_tokens",
        "discarded": "discarded_tokens",
        "overhead": "overhead_share_of_forward",
    }
    stats = run(counting, learned(counting, "0 1 2 00 10"), 9)
    stats.cached_tokens = 3
    written = json.loads(json.dumps(stats.as_dict()))
    figures = {name for name, value in vars(tr.Stats).items() if isinstance(value, property)}
    counted = {field.name for field in fields(tr.Stats)} | figures
    assert {names.get(name, name) for name in counted} == written.keys()
    assert written["cached_tokens"] == 3
    assert written["steps_by_depth"] == {"2": 3}
    assert written["tried_by_depth_and_rank"] == {"1": {"0": 3, "1": 3, "2": 3}, "2": {"0": 3}}
    assert written["accepted_by_depth_and_rank"] == {"1": {"0": 3}, "2": {"0": 3}}
