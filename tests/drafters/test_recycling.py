"""Token Recycling beyond the paper: learning across sequences and in batches, and tree sizes by cost."""

from __future__ import annotations

import pytest
import torch
from support import tiny
from support.batches import batch
from support.runs import fix_costs
from transformers import LogitsProcessorList, TemperatureLogitsWarper

import token_recycling as tr
from token_recycling.loop import request
from token_recycling.recycling.ngram_matrix import NgramMatrix

# Learning


def test_later_prompts_profit_from_earlier_ones():
    """Each prompt is decoded twice; all contexts fit in memory, so the second output is known."""
    model, hot = tiny.llama(seed=6), tr.make_drafter("recycling", tree=12, memory=2.0)
    cold, warm = tr.Stats(), tr.Stats()
    for stats in (cold, warm):
        for seed in range(4):
            tr.generate(model, tiny.prompt(seed, 5), drafter=hot, stats=stats, max_new_tokens=30)
    assert warm.mat > 1.3 * cold.mat
    for matrix, message in ((NgramMatrix(64, k=5), "got k=5, orders=3"), (NgramMatrix(64, orders=2), "orders=2")):
        hot.matrix = matrix
        with pytest.raises(ValueError, match=message):
            tr.generate(model, tiny.prompt(0, 5), drafter=hot, max_new_tokens=4)


def test_sequences_of_a_batch_are_separate_in_the_history(model):
    drafter, given = tr.make_drafter("recycling", tree=8), batch([9, 9, 9], 0)
    wanted = model.generate(**given, max_new_tokens=40)[:, 9:].tolist()
    tr.generate(model, **given, drafter=drafter, max_new_tokens=40)
    places = [str(text)[1:-1] for text in wanted]
    pieces = str(drafter.matrix.history.tokens.tolist())[1:-1].split("-1, ")[1:]
    assert all(any(piece.rstrip(", ") in text for text in places) for piece in pieces)
    assert len(pieces) >= 3


def test_first_token_emitted_by_the_prefill_is_learned(model):
    drafter, ids = tr.make_drafter("recycling"), tiny.prompt(0, 40)
    steps = tr.stream(model, ids, drafter, max_new_tokens=3)
    first = next(steps)
    assert (len(first.draft), drafter.matrix.lessons) == (1, 0)
    next(steps)
    steps.close()
    assert drafter.matrix.look_up(*ids[0, -3:].tolist())[0][0] == first.tokens[0]


# Tree size by cost


@pytest.fixture
def rise(monkeypatch):
    """Set the cost of every further node, in forward passes over a lone root; drafting takes no time."""
    monkeypatch.setattr(request, "now", lambda: 0.0)

    def set_rise(each):
        fix_costs(monkeypatch, (1, 64), (1.0, 1.0 + 63 * each))

    return set_rise


def drafted_nodes(model, drafter, tokens, **how):
    """Return the number of drafted nodes of each step."""
    steps = tr.stream(model, torch.tensor([0]), drafter, max_new_tokens=tokens, **how)
    return [len(step.draft) - 1 for step in steps]


@pytest.mark.measured
def test_drafting_resumes_once_candidates_prove_correct(counting, rise):
    """A node pays from a probability of 0.9 on. The model's own probability is a third, but always correct: calibration
    learns this after some steps without a draft.
    """
    rise(1.1)
    assert set(drafted_nodes(counting, tr.make_drafter("recycling"), 40)) == {0}, "even a certain token does not pay"
    rise(0.9)
    drafted = drafted_nodes(counting, tr.make_drafter("recycling", suffix=False, orders=1), 80)
    assert set(drafted[:20]) == {0}
    assert min(drafted[-3:-1]) > 0


@pytest.fixture
def clock(monkeypatch):
    """Record readings of the drafting clock, which advances by a twentieth of a forward pass each time: before and
    after drafting, unless it is disabled, and after learning.
    """
    line_styles = []
    monkeypatch.setattr(request, "now", lambda: (line_styles.append(1), len(line_styles) / 20)[1])
    return line_styles


@pytest.mark.measured
def test_drafting_backs_off_where_it_does_not_pay_and_resumes(counting, rise, clock):
    """Its overhead is a tenth of a forward pass: where drafting gains nothing, a probe every tenth step takes 1% of the
    time. Two sequences calibrate all kinds of candidates; in the last one all candidates are correct.
    """
    rise(0.2)
    torch.manual_seed(0)
    drafter = tr.make_drafter("recycling")
    warper = LogitsProcessorList([TemperatureLogitsWarper(100.0)])
    for _ in range(2):
        drafted_nodes(counting, drafter, 200, do_sample=True, logits_processor=warper)
    before = len(clock)
    steps = len(drafted_nodes(counting, drafter, 200, do_sample=True, logits_processor=warper))
    assert 200 / 20 < (len(clock) - before) / 2 - steps < 200 / 7
    drafted = drafted_nodes(counting, drafter, 100)
    assert min(drafted[-3:-1]) > 0
