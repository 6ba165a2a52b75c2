"""The arithmetic of a report, on constructed rows."""

import pytest
from support.measured import failed, row

from token_recycling.bench import summary
from token_recycling.bench.summary import QUARTILES, frame_of

NONE = float("nan")


def figures(*rows, baseline=(), clock="wall"):
    """Return the figures of the only method of these rows."""
    measured = frame_of(rows, clock)
    found = summary.figures_of(measured, summary.paired(measured, frame_of(baseline, clock)), ["method"])
    assert len(found) == 1
    return found.iloc[0]


def different_row(margin):
    return row(identical=False, divergence={"turn": 0, "place": 1, "margin": margin, "expected": 1, "got": 2})


UNCOUNTED = row(steps=5, loop_tokens=None, loop_steps=None)
TIMED = [
    row(tokens=10, seconds=[1.0, 9.0, 2.0], total_seconds=[3.0]),
    row(tokens=30, first_tokens=3, seconds=[4.0, 6.0], total_seconds=[7.0], processor_seconds=[2.5]),
]
SILENT = row(prompt="a/2", tokens=1, seconds=[0.001], total_seconds=[0.1])
FIGURES = {
    "MAT is all tokens divided by all steps": ([row(tokens=10, steps=5), row(tokens=30, steps=10)], {"mat": 40 / 15}),
    "tokens and steps of loops are excluded": (
        [row(tokens=10, steps=5, loop_tokens=6, loop_steps=1), row(tokens=30, steps=10)],
        {"mat_without_loops": 34 / 14},
    ),
    "an output that is one loop": ([row(loop_tokens=10, loop_steps=5)], {"mat_without_loops": NONE}),
    "rows without counts of loops": (
        [UNCOUNTED, row(tokens=30, steps=10, loop_tokens=15)],
        {"mat_without_loops": 15 / 10, "mat": 40 / 15},
    ),
    "rates are weighted by tokens": (
        [row(repeated_4grams=0.5, discarded=20), row(tokens=30, repeated_4grams=0.1, discarded=10), row()],
        {"repeated_4grams": pytest.approx(8 / 50), "discard_rate": 30 / 40},
    ),
    "median of repeats, tokens of the prefill excluded": (
        TIMED,
        {"decoding": (9 + 27) / (2 + 5), "whole_call": 40 / 10},
    ),
    "an answer of one token has no speed": ([SILENT], {"decoding": NONE}),
    "an answer of one token does not count": ([row(seconds=[2.0]), SILENT], {"decoding": 9 / 2}),
    "a batch of one token each has no speed": ([row(tokens=4, batch=4, seconds=[0.001])], {"decoding": NONE}),
    "drafted nodes per step, without the root": ([row(nodes={"9": 3}), row(nodes={"1": 1}), row()], {"drafted": 6}),
    "nothing drafted": ([row()], {"drafted": NONE, "speedup": NONE}),
    "margins of different outputs": (
        [row(identical=True), different_row(-0.5), row(), different_row(0.3)],
        {"compared": 3, "identical": 1, "largest_margin": 0.5},
    ),
    "first and last quarter of the prompts": (
        [row(steps=steps) for steps in (1, 2, 4, 5)],
        {"mat_first_quarter": 10, "mat_last_quarter": 2},
    ),
    "an unknown margin": ([different_row(0.3), different_row(None)], {"largest_margin": float("inf")}),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures(name):
    rows, wanted = FIGURES[name]
    found = figures(*rows)
    assert {column: found[column] for column in wanted} == pytest.approx(wanted, nan_ok=True)


def test_clock_can_be_processor_time():
    found = figures(*TIMED, clock="processor")
    assert found["whole_call"] == found["decoding"] == 40 / (1.5 + 2.5)
    ours, theirs = row(processor_seconds=[1.0]), row("plain", processor_seconds=[3.0])
    assert figures(ours, baseline=[theirs])["speedup"] == 1.0
    assert figures(ours, baseline=[theirs], clock="processor")["speedup"] == 3.0


def test_speedup_of_equal_outputs_is_the_ratio_of_summed_times():
    ours = [row("ours", "a/1", total_seconds=[1.0]), row("ours", "a/2", total_seconds=[2.0, 3.0, 2.0])]
    theirs = [row("plain", "a/2", total_seconds=[3.0]), row("plain", "a/1", total_seconds=[4.0])]
    found = figures(*ours, baseline=theirs)
    assert found["speedup"] == pytest.approx((4 + 3) / (1 + 2))
    assert list(found[QUARTILES]) == [2.125, 2.75, 3.375]
    ours, theirs = ([row("m", str(n), total_seconds=[n * each]) for n in range(1, 9)] for each in (1, 3))
    assert summary.interval_of(summary.paired(frame_of(ours), frame_of(theirs))) == pytest.approx((3, 3))


def test_shorter_output_is_not_faster():
    """Half of the tokens in half of the time, as after a divergence in 16 bits: no speedup."""
    ours, theirs = row("ours", tokens=50, total_seconds=[1.0]), row("plain", tokens=100, total_seconds=[2.0])
    assert figures(ours, baseline=[theirs])["speedup"] == 1.0


def test_only_prompts_that_both_finished_are_paired():
    ours = [row("ours", "a/1"), failed("ours", "a/2"), row("ours", "a/3"), row("ours", "a/4", tokens=0), SILENT]
    theirs = [row("plain", "a/1"), row("plain", "a/2"), failed("plain", "a/3"), row("plain", "a/4")]
    assert list(summary.paired(frame_of(ours), frame_of(theirs))["prompt"]) == ["a/1"]
    found = figures(*ours[:4], baseline=theirs)
    assert (found["prompts"], found["failures"], found["speedup"]) == (3, 1, 1.0)


def test_repeat_spread_is_slowest_minus_fastest():
    times = [[1.0, 1.1, 0.9], [2.0, 2.0], [5.0]]
    assert summary.repeat_spread(times) == pytest.approx(0.1)  # the median of 0.2 and 0
    assert summary.repeat_spread(times[2:]) is None


def test_seconds_per_step_and_acceptance_by_node():
    """Shares of all steps, and of the nodes tried at each depth and rank."""
    rows = [
        row(steps=2, parts={"retrieve": 1.0, "forward": 8.0}),
        row(steps=3, parts={"retrieve": 2.0, "forward": 12.0, "verify": 5.0}),
        row(tried=[[1, 0, 4], [1, 1, 4]], accepted=[[1, 0, 3]]),
        row(tried=[[1, 0, 6], [2, 0, 1]], accepted=[[1, 0, 2], [2, 0, 1]]),
    ]
    parts = summary.seconds_per_step(frame_of(rows)).loc["recycling"]
    assert parts.to_dict() == {"retrieve": 3 / 5, "forward": 20 / 5, "verify": 5 / 5}
    assert summary.acceptance_by_node(frame_of(rows))["recycling"].to_dict() == {(1, 0): 0.5, (1, 1): 0.0, (2, 0): 1.0}
    assert summary.seconds_per_step(frame_of([row()])).empty
