"""The arithmetic of a report, on rows made by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.measured import failed, row

from token_recycling.bench.report import arithmetic
from token_recycling.bench.report.arithmetic import CALL, DECODE, NodeAcceptance, Spread


def test_mat_is_all_tokens_by_all_steps():
    rows = [row(tokens=10, steps=5), row(tokens=30, steps=10)]
    assert arithmetic.mat(rows) == 40 / 15
    assert arithmetic.mat([]) is None


def test_mat_without_loops_leaves_looping_stretches_out():
    rows = [row(tokens=10, steps=5, loop_tokens=6, loop_steps=1), row(tokens=30, steps=10)]
    assert arithmetic.mat_without_loops(rows) == 34 / 14
    assert arithmetic.mat_without_loops([row(tokens=10, steps=5, loop_tokens=10, loop_steps=5)]) is None


def test_rows_in_which_loops_were_not_counted_are_left_out_of_that_figure():
    rows = [row(tokens=10, steps=5, loop_tokens=None, loop_steps=None), row(tokens=30, steps=10, loop_tokens=15)]
    assert arithmetic.mat_without_loops(rows) == 15 / 10
    assert arithmetic.mat(rows) == 40 / 15


def test_repeated_4grams_are_weighted_by_tokens():
    rows = [row(tokens=10, repeated_4grams=0.5), row(tokens=30, repeated_4grams=0.1), row(repeated_4grams=None)]
    assert arithmetic.repeated_4grams(rows) == pytest.approx((5 + 3) / 40)


def test_tokens_per_second_take_the_median_of_repeats_and_the_clock_asked_for():
    rows = [
        row(tokens=10, seconds=[1.0, 9.0, 2.0], total_seconds=[3.0]),
        row(tokens=30, seconds=[4.0, 6.0], total_seconds=[7.0]),
    ]
    assert arithmetic.tokens_per_second(rows, DECODE) == 40 / (2 + 5)
    assert arithmetic.tokens_per_second(rows, CALL) == 40 / 10


def test_an_answer_that_ends_at_once_is_no_speed():
    silent = row("ours", "a/2", tokens=1, seconds=[0.001], total_seconds=[0.1])
    rows = [row("ours", "a/1", tokens=10, seconds=[2.0], total_seconds=[3.0]), silent]
    assert arithmetic.tokens_per_second(rows, DECODE) == 5
    assert arithmetic.tokens_per_second([silent], DECODE) is None
    assert arithmetic.paired(rows, [row("plain", "a/1"), row("plain", "a/2")]) == [(rows[0], row("plain", "a/1"))]
    assert arithmetic.paired([row("ours", "a/2")], [silent]) == []
    assert arithmetic.tokens_per_second([row(tokens=4, batch=4, seconds=[0.001])]) is None


def test_speedup_of_equal_outputs_is_the_ratio_of_summed_times():
    ours = [row("ours", "a/1", total_seconds=[1.0]), row("ours", "a/2", total_seconds=[2.0, 3.0, 2.0])]
    theirs = [row("plain", "a/2", total_seconds=[3.0]), row("plain", "a/1", total_seconds=[4.0])]
    pairs = arithmetic.paired(ours, theirs)
    assert arithmetic.speedup(pairs) == pytest.approx((4 + 3) / (1 + 2))
    assert arithmetic.speedups(pairs) == [4.0, 1.5]


def test_a_shorter_output_is_not_a_faster_one():
    """Half of the tokens in half of the time, as after a divergence in 16 bits: no speedup."""
    ours = [row("ours", tokens=50, total_seconds=[1.0])]
    theirs = [row("plain", tokens=100, total_seconds=[2.0])]
    assert arithmetic.speedup(arithmetic.paired(ours, theirs)) == 1.0


def test_only_prompts_that_both_finished_are_paired():
    ours = [row("ours", "a/1"), failed("ours", "a/2"), row("ours", "a/3"), row("ours", "a/4", tokens=0)]
    theirs = [row("plain", "a/1"), row("plain", "a/2"), failed("plain", "a/3"), row("plain", "a/4")]
    assert [pair[0]["prompt"] for pair in arithmetic.paired(ours, theirs)] == ["a/1"]
    assert arithmetic.speedup([]) is None
    assert arithmetic.finished(ours) == [ours[0], ours[2], ours[3]]


def test_spread():
    assert arithmetic.spread([5, 1, 4, 2, 3]) == Spread(1, 2, 3, 4, 5)
    assert arithmetic.spread([1.0, 2.0]) == Spread(1.0, 1.25, 1.5, 1.75, 2.0)
    assert arithmetic.spread([7.0]) == Spread(7.0, 7.0, 7.0, 7.0, 7.0)
    assert arithmetic.spread([]) is None


def test_repeats_lie_apart_by_slowest_less_fastest():
    rows = [row(total_seconds=[1.0, 1.1, 0.9]), row(total_seconds=[2.0, 2.0]), row(total_seconds=[5.0])]
    assert arithmetic.repeat_spread(rows) == pytest.approx(0.1)  # the median of 0.2 and 0
    assert arithmetic.repeat_spread(rows[2:]) is None


def test_parts_are_per_step_and_overhead_is_what_the_model_does_not_take():
    rows = [
        row(steps=2, parts={"retrieve": 1.0, "forward": 8.0}),
        row(steps=3, parts={"retrieve": 2.0, "forward": 12.0, "verify": 5.0}),
        row(steps=100),
    ]
    parts = arithmetic.part_seconds(rows)
    assert parts == {"retrieve": 3 / 5, "forward": 20 / 5, "verify": 5 / 5}
    assert arithmetic.overhead(parts) == pytest.approx(8 / 20)
    assert arithmetic.part_seconds([row()]) == {}
    assert arithmetic.overhead({}) is None


def test_lengths_are_shares_of_the_steps():
    rows = [row(lengths={"1": 3, "10": 1}), row(lengths={"2": 2, "1": 2}), row()]
    assert arithmetic.lengths(rows) == {1: 5 / 8, 2: 2 / 8, 10: 1 / 8}
    assert list(arithmetic.lengths(rows)) == [1, 2, 10]


def test_mean_nodes_are_weighted_by_steps():
    assert arithmetic.mean_nodes([row(nodes={"9": 3}), row(nodes={"1": 1}), row()]) == 28 / 4
    assert arithmetic.mean_nodes([row()]) is None


def test_acceptance_by_place_and_by_path():
    rows = [
        row(tried=[[1, 0, 4], [1, 1, 4]], accepted=[[1, 0, 3]], paths=[["0", 4, 3], ["0.10", 3, 1]]),
        row(tried=[[1, 0, 6], [2, 0, 1]], accepted=[[1, 0, 2], [2, 0, 1]], paths=[["0", 6, 2]]),
        row(),
    ]
    found = arithmetic.by_place(rows)
    assert found == {(1, 0): NodeAcceptance(10, 5), (1, 1): NodeAcceptance(4, 0), (2, 0): NodeAcceptance(1, 1)}
    assert found[1, 0].share == 0.5
    assert NodeAcceptance(0, 0).share == 0.0
    assert arithmetic.by_path(rows) == {(0,): NodeAcceptance(10, 5), (0, 10): NodeAcceptance(3, 1)}


def test_divergences_the_widest_margin_first():
    def differing(margin):
        return row(identical=False, divergence={"turn": 0, "place": 1, "margin": margin, "expected": 1, "got": 2})

    rows = [row(identical=True), differing(0.1), row(), differing(None), differing(0.3)]
    assert arithmetic.compared(rows) == [rows[0], rows[1], rows[3], rows[4]]
    assert arithmetic.divergences(rows) == [rows[3], rows[4], rows[1]]
    assert arithmetic.margin(rows[3]) == float("inf")


_times = st.floats(0.01, 100)


@given(st.lists(st.tuples(st.integers(2, 500), _times, _times), min_size=1, max_size=8))
def test_a_pooled_speedup_lies_within_those_of_the_prompts(runs):
    ours = [row("ours", f"a/{n}", tokens=t, total_seconds=[mine]) for n, (t, mine, _) in enumerate(runs)]
    theirs = [row("plain", f"a/{n}", tokens=t, total_seconds=[other]) for n, (t, _, other) in enumerate(runs)]
    pairs = arithmetic.paired(ours, theirs)
    each = arithmetic.spread(arithmetic.speedups(pairs))
    assert each.least * 0.999 <= arithmetic.speedup(pairs) <= each.most * 1.001
    assert arithmetic.speedup(arithmetic.paired(ours, ours)) == pytest.approx(1.0)
    assert list(each) == sorted(each)
