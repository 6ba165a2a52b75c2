"""The random campaign: cases are the same every time, a planted fault is found and made small, a run goes on, the
report adds up.
"""

import json
import re
import runpy
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import typer

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.campaign import dimensions, worker
from benchmarks.campaign import run as running
from benchmarks.campaign.__main__ import main
from benchmarks.campaign.case import Call, Case, DrafterChoice, draw, words
from benchmarks.campaign.minimise import minimised, smaller
from benchmarks.campaign.program import script
from benchmarks.campaign.report import read
from benchmarks.campaign.run import Result, run
from token_recycling.costs.costs import OnlineCurve, Work
from token_recycling.loop import step as decode
from token_recycling.loop.accept import accept_walk
from token_recycling.model import pass_times

REPETITIVE = Call(rows=((3, 7, 3, 7, 3),))


@pytest.fixture(autouse=True)
def costs_as_they_were():
    """A case says what passes cost, for the length of its process; other tests may be in it."""
    before = pass_times.prior, OnlineCurve.took, Work.count
    yield
    pass_times.prior, OnlineCurve.took, Work.count = before


@pytest.fixture
def wrong_node(monkeypatch):
    """Greedy acceptance that takes the first drafted node whatever the model says."""

    def accepts(draft, logits, *others):
        if len(draft.tree) > 1:
            logits = logits.clone()
            logits[0, draft.tokens[1]] = torch.inf
        return accept_walk(draft, logits, *others)

    monkeypatch.setattr(decode, "accept_walk", accepts)


def test_a_case_is_a_function_of_seed_and_number():
    drawn = [draw(3, number) for number in range(50)]
    assert drawn == [draw(3, number) for number in range(50)]
    assert len({*drawn, *(draw(4, number) for number in range(50))}) == 100


def test_every_value_of_every_dimension_is_drawn_and_can_be_written():
    found = {}
    for number in range(1500):
        case = draw(0, number)
        for dimension, values in words(case).items():
            found.setdefault(dimension, set()).update(values)
        if number < 100:
            compile(script(case, "about"), "script", "exec")
    assert found["family"] == set(dimensions.FAMILIES)
    assert found["option"] == set(dimensions.OPTIONS)
    assert found["event"] == {event for event in dimensions.EVENTS if event}
    assert found["surface"] == set(dimensions.SURFACES)
    assert found["weights"] == set(dimensions.WEIGHTS)
    assert found["drafter"] >= {"fuse", *dimensions.DRAFTERS}
    assert len(found["cache"]) == len(dimensions.CACHES)
    assert found["copied"] == {copied for copied in dimensions.COPIES if copied}


@pytest.mark.parametrize(
    ("case", "outcome", "told"),
    [
        (Case((REPETITIVE, REPETITIVE), drafter=DrafterChoice("recycling", ())), "same", ""),
        (Case((Call(rows=((3,), (4, 5)), options=("all outputs", "eos")),), cache="passed in"), "same", ""),
        (Case((Call(rows=((3, 4),), options=("beams",)),)), "left", "beam search"),
        (Case((Call(rows=((3,), (4,))),), fast=True), "refused", "expected one text"),
        (Case((Call(rows=((3, 4),), new=60),), family="gpt2", positions=40), "same", ""),  # both raise
    ],
    ids=["same", "a batch with scores and a cache", "left", "refused", "beyond the last position"],
)
def test_cases_end_as_they_should(case, outcome, told):
    result = run(case)
    assert (result.outcome, told in result.detail) == (outcome, True), result


@pytest.mark.usefixtures("wrong_node")
def test_a_planted_fault_is_found_and_made_a_script_that_fails(tmp_path, monkeypatch, capsys):
    drawn = (draw(0, number) for number in range(200))
    likely = (case for case in drawn if case.drafter.name in ("suffix", "prompt_lookup", "garbage"))
    case, result = next((case, result) for case in likely if (result := run(case)).outcome == "MISMATCH")
    small, shown = minimised(case, result)
    assert shown.outcome == "MISMATCH"
    assert len(small.calls) == len(small.calls[0].rows) == 1
    assert small == Case(small.calls, drafter=small.drafter)
    assert all(run(one).outcome != "MISMATCH" for one in smaller(small) if one != small)
    file = tmp_path / "script.py"
    file.write_text(script(small, "about"))
    with pytest.raises(AssertionError, match="call 0, tensor 0: from token"):
        runpy.run_path(str(file))
    monkeypatch.undo()
    runpy.run_path(str(file))
    assert "same" in capsys.readouterr().out


@pytest.mark.usefixtures("wrong_node")
def test_a_near_tie_is_told_apart_by_its_margin(monkeypatch):
    case = Case((REPETITIVE,), drafter=DrafterChoice("suffix", ()))
    assert run(case).outcome == "MISMATCH"
    monkeypatch.setattr(running, "_TIE", 10.0)
    result = run(case)
    assert result.outcome == "near-tie"
    assert 0 < float(result.detail) < 2


def test_an_error_and_a_hang_are_results(monkeypatch):
    case = Case((REPETITIVE,))

    def fails(*_):
        raise KeyError("lost")

    monkeypatch.setattr(decode, "accept_walk", fails)
    assert run(case).kind == "ERROR KeyError"
    monkeypatch.setattr(decode, "accept_walk", lambda *_: time.sleep(30))
    monkeypatch.setattr(running, "_LIMIT", 0.5)
    assert run(case).outcome == "HANG"


def test_a_campaign_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(worker, "run", lambda case: ran.append(case) or Result("same", seconds=0.5))
    (tmp_path / "scripts").mkdir()
    later = time.time() + 60
    worker.work(0, tmp_path, 0, 0, 6, later, 2, [])
    assert [row["case"] for row in read(tmp_path / "rows.jsonl")] == [0, 2, 4]
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('\n{"seed": 0, "case"')  # cut off
    worker.work(0, tmp_path, 0, 0, 6, later, 1, [])
    assert [row["case"] for row in read(tmp_path / "rows.jsonl")] == list(range(6))
    assert len(ran) == 6
    worker.work(0, tmp_path, 0, 0, 12, later, 1, [("surface", "stream")])
    assert all(case.surface == "stream" for case in ran[6:])


def test_the_report_adds_up(tmp_path):
    outcomes = ["same", "same", "near-tie", "refused", "MISMATCH", "ERROR"]
    rows = [
        {
            "seed": 0,
            "case": number,
            "outcome": outcome,
            "detail": f"ValueError: expected {number} things",
            "seconds": 0.25,
            "mat": 2.0,
            "words": words(draw(0, number)),
        }
        for number, outcome in enumerate(outcomes)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))
    with pytest.raises(typer.Exit) as ended:
        main(tmp_path, report=True, markdown_file=tmp_path / "report.md")
    assert ended.value.exit_code == 1
    text = (tmp_path / "report.md").read_text()
    assert "6 cases, 4.0 a second on one core; 2.00 accepted tokens a step." in text
    assert all(f"| {outcome} | {number} |" in text for outcome, number in Counter(outcomes).items())
    assert "| ValueError: expected N things | 1 |" in text
    for dimension in ("surface", "fast", "weights", "attention", "cache", "calls"):
        (line,) = (line for line in text.splitlines() if line.startswith(f"| {dimension} "))
        counts = [tuple(map(int, found)) for found in re.findall(r" (\d+)/(\d+)(?:;| \|)", line)]
        assert [sum(column) for column in zip(*counts, strict=True)] == [2, 6]
