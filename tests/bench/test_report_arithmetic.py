"""The arithmetic of a report, on rows made by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.measured import failed, row

from token_recycling.bench.report import arithmetic
from token_recycling.bench.report.arithmetic import QUARTILES, frame


def figures(*rows, baseline=(), clock="wall"):
    """Those of the one method of these rows."""
    measured = frame(rows, clock)
    found = arithmetic.figures(measured, arithmetic.paired(measured, frame(baseline, clock)), ["method"])
    assert len(found) == 1
    return found.iloc[0]


def test_mat_is_all_tokens_by_all_steps():
    assert figures(row(tokens=10, steps=5), row(tokens=30, steps=10))["mat"] == 40 / 15


def test_mat_without_loops_leaves_looping_stretches_out():
    rows = [row(tokens=10, steps=5, loop_tokens=6, loop_steps=1), row(tokens=30, steps=10)]
    assert figures(*rows)["mat_without_loops"] == 34 / 14
    assert np.isnan(figures(row(tokens=10, steps=5, loop_tokens=10, loop_steps=5))["mat_without_loops"])


def test_rows_in_which_loops_were_not_counted_are_left_out_of_that_figure():
    found = figures(row(steps=5, loop_tokens=None, loop_steps=None), row(tokens=30, steps=10, loop_tokens=15))
    assert found["mat_without_loops"] == 15 / 10
    assert found["mat"] == 40 / 15


def test_rates_are_weighted_by_tokens():
    rows = [row(tokens=10, repeated_4grams=0.5, discarded=20), row(tokens=30, repeated_4grams=0.1, discarded=10)]
    found = figures(*rows, row(repeated_4grams=None, discarded=None))
    assert found["repeated_4grams"] == pytest.approx((5 + 3) / 40)
    assert found["discard_rate"] == 30 / 40


def test_tokens_per_second_take_the_median_of_repeats():
    rows = [
        row(tokens=10, seconds=[1.0, 9.0, 2.0], total_seconds=[3.0]),
        row(tokens=30, first_tokens=3, seconds=[4.0, 6.0], total_seconds=[7.0], processor_seconds=[2.5]),
    ]
    assert figures(*rows)["decoding"] == (9 + 27) / (2 + 5), "tokens of the first forward pass are not decoded"
    assert figures(*rows)["whole_call"] == 40 / 10
    assert figures(*rows, clock="processor")["whole_call"] == 40 / (1.5 + 2.5)
    assert figures(*rows, clock="processor")["decoding"] == 40 / (1.5 + 2.5)


def test_an_answer_that_ends_at_once_is_no_speed():
    silent = row("ours", "a/2", tokens=1, seconds=[0.001], total_seconds=[0.1])
    rows = [row("ours", "a/1", tokens=10, seconds=[2.0], total_seconds=[3.0]), silent]
    assert figures(*rows)["decoding"] == 9 / 2
    assert np.isnan(figures(silent)["decoding"])
    assert np.isnan(figures(row(tokens=4, batch=4, seconds=[0.001]))["decoding"])
    both = [row("plain", "a/1"), row("plain", "a/2")]
    assert list(arithmetic.paired(frame(rows), frame(both))["prompt"]) == ["a/1"]
    assert arithmetic.paired(frame([row("ours", "a/2")]), frame([silent])).empty


def test_speedup_of_equal_outputs_is_the_ratio_of_summed_times():
    ours = [row("ours", "a/1", total_seconds=[1.0]), row("ours", "a/2", total_seconds=[2.0, 3.0, 2.0])]
    theirs = [row("plain", "a/2", total_seconds=[3.0]), row("plain", "a/1", total_seconds=[4.0])]
    found = figures(*ours, baseline=theirs)
    assert found["speedup"] == pytest.approx((4 + 3) / (1 + 2))
    assert list(found[QUARTILES]) == [1.5, 2.125, 2.75, 3.375, 4.0]


def test_a_speedup_by_processor_time():
    ours, theirs = row(processor_seconds=[1.0]), row("plain", processor_seconds=[3.0])
    assert figures(ours, baseline=[theirs])["speedup"] == 1.0
    assert figures(ours, baseline=[theirs], clock="processor")["speedup"] == 3.0


def test_a_shorter_output_is_not_a_faster_one():
    """Half of the tokens in half of the time, as after a divergence in 16 bits: no speedup."""
    ours, theirs = row("ours", tokens=50, total_seconds=[1.0]), row("plain", tokens=100, total_seconds=[2.0])
    assert figures(ours, baseline=[theirs])["speedup"] == 1.0


def test_only_prompts_that_both_finished_are_paired():
    ours = [row("ours", "a/1"), failed("ours", "a/2"), row("ours", "a/3"), row("ours", "a/4", tokens=0)]
    theirs = [row("plain", "a/1"), row("plain", "a/2"), failed("plain", "a/3"), row("plain", "a/4")]
    assert list(arithmetic.paired(frame(ours), frame(theirs))["prompt"]) == ["a/1"]
    found = figures(*ours, baseline=theirs)
    assert (found["prompts"], found["failures"], found["speedup"]) == (3, 1, 1.0)
    assert np.isnan(figures(*ours)["speedup"])


def test_repeats_lie_apart_by_slowest_less_fastest():
    times = [[1.0, 1.1, 0.9], [2.0, 2.0], [5.0]]
    assert arithmetic.repeat_spread(times) == pytest.approx(0.1)  # the median of 0.2 and 0
    assert arithmetic.repeat_spread(times[2:]) is None


def test_parts_are_per_step():
    rows = [
        row(steps=2, parts={"retrieve": 1.0, "forward": 8.0}),
        row(steps=3, parts={"retrieve": 2.0, "forward": 12.0, "verify": 5.0}),
        row(steps=100),
    ]
    found = arithmetic.parts(frame(rows)).loc["recycling"]
    assert found.to_dict() == {"retrieve": 3 / 5, "forward": 20 / 5, "verify": 5 / 5}
    assert arithmetic.parts(frame([row()])).empty


def test_lengths_are_shares_of_the_steps():
    rows = [row(lengths={"1": 3, "10": 1}), row(lengths={"2": 2, "1": 2}), row()]
    found = arithmetic.lengths(frame(rows)).loc["recycling"]
    assert list(found.items()) == [(1, 5 / 8), (2, 2 / 8), (10, 1 / 8)]


def test_drafted_nodes_are_weighted_by_steps_and_the_root_is_none():
    assert figures(row(nodes={"9": 3}), row(nodes={"1": 1}), row())["drafted"] == 24 / 4
    assert np.isnan(figures(row())["drafted"])


def test_acceptance_by_depth_and_rank():
    rows = [
        row(tried=[[1, 0, 4], [1, 1, 4]], accepted=[[1, 0, 3]]),
        row(tried=[[1, 0, 6], [2, 0, 1]], accepted=[[1, 0, 2], [2, 0, 1]]),
        row(),
    ]
    found = arithmetic.places(frame(rows))["recycling"]
    assert found.to_dict() == {(1, 0): 0.5, (1, 1): 0.0, (2, 0): 1.0}


def test_margins_are_those_of_outputs_that_differ():
    def differing(margin):
        return row(identical=False, divergence={"turn": 0, "place": 1, "margin": margin, "expected": 1, "got": 2})

    rows = [row(identical=True), differing(-0.1), row(), differing(0.3)]
    found = figures(*rows)
    assert (found["compared"], found["identical"], found["largest_margin"]) == (3, 1, 0.3)
    assert figures(*rows, differing(None))["largest_margin"] == float("inf")


_times = st.floats(0.01, 100)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(2, 500), _times, _times), min_size=1, max_size=8))
def test_a_pooled_speedup_lies_within_those_of_the_prompts(runs):
    ours = [row("ours", f"a/{n}", tokens=t, total_seconds=[mine]) for n, (t, mine, _) in enumerate(runs)]
    theirs = [row("plain", f"a/{n}", tokens=t, total_seconds=[other]) for n, (t, _, other) in enumerate(runs)]
    found = figures(*ours, baseline=theirs)
    assert found["least"] * 0.999 <= found["speedup"] <= found["most"] * 1.001
    assert figures(*ours, baseline=ours)["speedup"] == pytest.approx(1.0)
    assert list(found[QUARTILES]) == sorted(found[QUARTILES])
