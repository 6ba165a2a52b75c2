"""The accounting, on a model that counts modulo 16: every acceptance can be worked out by hand."""

import json

import pytest
import torch
from support import tiny
from support.drafters import learned

import token_recycling as tr
from token_recycling.loop import stats as stats_module
from token_recycling.loop.stats import PARTS, Clock


def run(model, drafter, tokens, start=0, **options):
    stats = tr.Stats()
    steps = tr.stream(model, torch.tensor([start]), drafter, max_new_tokens=tokens, stats=stats, **options)
    emitted = [token for step in steps for token in step.tokens]
    assert emitted == [(start + 1 + place) % 16 for place in range(tokens)]
    return stats


def test_the_counting_llama_counts(counting):
    assert counting.generate(torch.tensor([[3]]), max_new_tokens=20)[0].tolist() == [
        (3 + place) % 16 for place in range(21)
    ]
    logits = counting(input_ids=torch.arange(16)[None]).logits[0]
    assert torch.equal(logits.argsort(-1, descending=True), (torch.arange(16)[:, None] + 1 + torch.arange(16)) % 16)


def test_plain_decoding_has_a_mat_of_one(counting):
    stats = run(counting, "plain", 10)
    assert (stats.tokens, stats.steps, stats.mat) == (10, 10, 1.0)
    assert (stats.drafted, stats.discarded, stats.plain_steps) == (0, 0, 1.0)
    assert stats.acceptance_by_depth == stats.acceptance_by_rank == {}


def test_a_matrix_that_knows_everything_fills_the_chain(counting):
    stats = run(counting, learned(counting, "chain:4"), 20)
    assert (stats.tokens, stats.steps, stats.mat) == (20, 4, 5.0)
    assert (stats.drafted, stats.discarded, stats.plain_steps) == (16, 0, 0.0)
    assert dict(stats.lengths) == {5: 4}
    assert stats.acceptance_by_depth == {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}
    assert stats.acceptance_by_rank == {0: 1.0}


def test_the_draft_is_cut_at_the_end_of_the_text(counting):
    """12 tokens in steps of 5, 5 and 2: for the last one only one node can be of use."""
    stats = run(counting, learned(counting, "chain:4"), 12)
    assert (stats.steps, stats.mat) == (3, 4.0)
    assert (stats.drafted, stats.discarded) == (4 + 4 + 1, 0)
    assert stats.acceptance_by_depth == {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}


def test_discarded_nodes_are_counted_by_depth_and_rank(counting):
    """Of 5 nodes (0, 1, 2, 00, 10) only 0 and 00 are right: 3 tokens a step, 3 nodes thrown away."""
    stats = run(counting, learned(counting, "0 1 2 00 10"), 9)
    assert (stats.steps, stats.mat) == (3, 3.0)
    assert (stats.drafted, stats.discarded) == (15, 9)
    assert stats.acceptance_by_depth == {1: 1.0, 2: 1.0}
    # Node 10 is not tried, since its parent was never accepted.
    assert stats.acceptance_by_rank == {0: 1.0, 1: 0.0, 2: 0.0}


def test_a_cold_matrix_learns_on_the_way(counting):
    """15 steps of one token see 15 new rows; row 15 is still zero, which happens to be right; then all is known."""
    stats = run(counting, "published", 15 + 3 * 4, tree="chain:2", k=4)
    assert dict(stats.lengths) == {1: 15, 3: 4}
    assert stats.mat == pytest.approx(27 / 19)
    assert (stats.drafted, stats.discarded) == (2 * 19, 2 * 19 - 2 * 4)
    assert stats.acceptance_by_depth == pytest.approx({1: 4 / 19, 2: 4 / 19})
    # Rank 0 is tried 19 times below the root and 4 times below an accepted node.
    assert stats.acceptance_by_rank == pytest.approx({0: 8 / 23})


def test_runs_are_added_up(counting):
    drafter = learned(counting, "0 1 2 00 10")
    parts = [run(counting, drafter, 9), run(counting, drafter, 6), run(counting, learned(counting, "chain:4"), 10)]
    total = parts[0] + parts[1] + parts[2]
    assert (total.tokens, total.steps, total.prompt_tokens) == (25, 3 + 2 + 2, 3)
    assert total.drafted == sum(part.drafted for part in parts)
    assert total.discarded == sum(part.discarded for part in parts)
    assert total.mat == pytest.approx(25 / 7)
    assert total.acceptance_by_depth == pytest.approx({1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0})
    assert total.acceptance_by_rank[1] == 0.0
    assert total.seconds == pytest.approx({name: sum(part.seconds[name] for part in parts) for name in PARTS})
    assert total.drafter == parts[2].drafter
    assert parts[0].tokens == 9


def test_the_parts_of_a_step_sum_up(model):
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


def test_time_between_steps_is_not_counted(model, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("token_recycling.loop.stats.time.perf_counter", lambda: now[0])
    stats = tr.Stats()
    for _ in tr.stream(model, tiny.prompt(0, 5), max_new_tokens=10, stats=stats):
        now[0] += 100
    assert stats.decode_seconds == 0


def test_nothing_run_gives_zeros():
    stats = tr.Stats()
    assert (stats.mat, stats.tokens_per_second, stats.overhead, stats.drafted, stats.discarded) == (0, 0, 0, 0, 0)
    assert stats.acceptance_by_depth == {}


def test_everything_can_be_written_as_json(counting):
    drafter = learned(counting, "0 1 2 00 10")
    written = json.loads(json.dumps(run(counting, drafter, 9).as_dict()))
    assert written["mat"] == 3.0
    assert written["drafted_tokens"] == 15
    assert (written["tokens"], written["first_tokens"]) == (9, 3)
    assert written["discarded_tokens"] == 9
    assert written["steps_by_length"] == {"3": 3}
    assert written["acceptance_by_rank"] == {"0": 1.0, "1": 0.0, "2": 0.0}
    assert set(written["seconds"]) == set(PARTS)
    assert written["drafter"] == drafter.describe()


def test_compiling_is_a_part_of_neither_the_prompt_nor_a_step(monkeypatch):
    times, compiled = iter([0.0, 10.0, 12.0, 20.0]), iter([1.0, 8.0, 8.0, 11.0])
    monkeypatch.setattr(stats_module.time, "perf_counter", lambda: next(times))

    class Compiling:
        seconds = property(lambda self: next(compiled))

    monkeypatch.setattr(stats_module, "compiling", Compiling())
    stats = tr.Stats()
    clock = Clock(stats, torch.device("cpu"))
    clock.lap("forward")
    clock.reads_prompt = False
    clock.lap("forward")
    clock.lap("retrieve")
    monkeypatch.undo()
    assert (stats.prefill_seconds, stats.seconds["forward"], stats.seconds["retrieve"]) == (3.0, 2.0, 5.0)
    assert stats.compile_seconds == stats.as_dict()["compile_seconds"] == 10.0
    assert (stats + stats).compile_seconds == 20.0
