"""The bars of the default drafter: ratios by hand, what is met, and a run on tiny models that is gone on with."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from support import benching
from support.measured import row

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.default import __main__ as program
from benchmarks.default import models, report, texts
from benchmarks.default.bars import FIRST_TOKEN, OF_PLAIN
from benchmarks.default.figures import Found, Ratio, ratio
from benchmarks.default.first_token import Clock
from benchmarks.default.scenarios import METHODS, SCENARIOS
from token_recycling.bench.run.prompts import prompt

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
CPU = torch.device("cpu")
TINY = ("written-float32", "sampled-1.0-float32", "replayed-file-float32", "first-token-float32")


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Four scenarios on a tiny model and three short texts; and a function that runs the program on them."""
    chosen = tuple(replace(BY_NAME[name], tokens=6) for name in TINY)
    folder = tmp_path / "prompts"
    folder.mkdir()
    for place, text in enumerate(benching.TEXTS[:3]):
        (folder / f"{place}.py").write_text(text)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": text, "reference": text}) + "\n" for text in benching.TEXTS[:3]))
    where = benching.setup(max_new_tokens=6)
    monkeypatch.setattr(models, "configured", lambda scenario: where)
    monkeypatch.setattr(texts, "CODE", folder)
    monkeypatch.setattr(texts, "DEMO", folder)
    monkeypatch.setattr(texts, "LENGTHS", (5, 9))
    for module in (program, report):
        monkeypatch.setattr(module, "SCENARIOS", chosen)

    def run(**options):
        arguments = {
            "data": [str(data)],
            "only": None,
            "prompts": None,
            "minutes": 5.0,
            "fresh": False,
            "report": False,
        }
        program.main(tmp_path / "out", **{**arguments, **options})
        return {file.parent.name: benching.rows(file.parent) for file in (tmp_path / "out").glob("*/rows.jsonl")}

    return SimpleNamespace(run=run, data=data, out=tmp_path / "out")


def test_a_ratio_is_of_sums_and_its_interval_is_of_prompts():
    assert ratio([2.0, 4.0], [1.0, 2.0]) == Ratio(2.0, 2.0, 2.0)
    found = ratio([1.0] * 50 + [3.0] * 50, [1.0] * 100)
    assert found.value == 2.0
    # The mean of 100 values of deviation 1 has one of 0.1.
    assert found.low == pytest.approx(1.8, abs=0.05)
    assert found.high == pytest.approx(2.2, abs=0.05)
    assert ratio([3.0], [2.0]) == Ratio(1.5, 0.0, math.inf)


@pytest.mark.parametrize(
    ("bar", "found", "wanted"),
    [
        (OF_PLAIN, Ratio(0.98, 0.981, 1.0), "yes"),
        (OF_PLAIN, Ratio(0.979, 0.9, 0.9795), "no"),
        (OF_PLAIN, Ratio(0.979, 0.9, 1.0), "no, in noise"),
        (FIRST_TOKEN, Ratio(1.03, 1.0, 1.04), "yes, in noise"),
        (FIRST_TOKEN, Ratio(1.04, 1.035, 1.05), "no"),
    ],
)
def test_a_bar(bar, found, wanted):
    cell = bar.judged(found)
    assert (cell.text, cell.alarm) == (wanted, wanted.startswith("no"))


def test_figures_are_of_the_prompts_that_all_methods_finished():
    rows = [row("plain", f"set/{n}", steps=10, total_seconds=[9.0], processor_seconds=[4.0]) for n in range(3)]
    rows += [row("recycling", f"set/{n}", steps=4, total_seconds=[3.0], processor_seconds=[1.0]) for n in range(3)]
    rows += [row("suffix", f"set/{n}", processor_seconds=[2.0]) for n in range(2)]
    found = Found.of([*rows, row("suffix", "set/2", failure="ValueError: no", processor_seconds=None)])
    assert found.prompts == 2
    assert found.speed("recycling", "plain").value == 4.0
    assert found.speed("recycling", "plain", "total_seconds").value == 3.0
    assert found.mat("recycling") == found.mat_over("recycling", "plain").value == 2.5
    assert found.best(("plain", "suffix")) == "suffix"


def test_every_workload_is_measured_gone_on_with_and_reported(tiny):
    first = tiny.run(prompts=1, only=["written-float32", "first-token-float32"])
    found = tiny.run(prompts=2)
    assert set(found) == set(TINY)
    for name, rows in found.items():
        methods = METHODS[BY_NAME[name].mode]
        items = 4 if name.startswith("first") else 2
        assert [one["method"] for one in rows] == [*methods] * items
        assert rows[: len(first.get(name, ()))] == first.get(name, [])
        assert all(one["failure"] is None and min(one["processor_seconds"]) > 0 for one in rows)
    assert {one["temperature"] for one in found["sampled-1.0-float32"]} == {1.0}
    assert {one["prompt"].partition("/")[0] for one in found["replayed-file-float32"]} == {"data"}
    assert [one["prompt_tokens"] for one in found["first-token-float32"][::3]] == [5, 9, 5, 9]
    text = (tiny.out / "table.md").read_text()
    assert "| written-float32 | 2 |" in text
    assert "| first-token-float32 | 9 | 2 |" in text
    assert "2 of 2" in text
    assert "of 11 bars are met" in text  # two each of three workloads, two of written text, one of replay, two lengths
    assert "Not measured" not in text


def test_what_is_chosen_is_measured(tiny, capsys):
    assert set(tiny.run(only=["written-float32"], prompts=1)) == {"written-float32"}
    assert (
        "Not measured: sampled-1.0-float32, replayed-file-float32 (needs --data FILE), first" in capsys.readouterr().out
    )
    before = (tiny.out / "written-float32" / "rows.jsonl").read_text()
    tiny.run(report=True, fresh=True)
    assert (tiny.out / "written-float32" / "rows.jsonl").read_text() == before
    tiny.run(only=["written-float32"], prompts=1, fresh=True)
    assert (tiny.out / "written-float32" / "rows.jsonl").read_text() != before
    with pytest.raises(typer.BadParameter, match=r"expected --only with one of written-float32, .* got 'spoken'"):
        tiny.run(only=["spoken"])


def test_without_time_or_data_nothing_is_measured(tiny):
    assert not any(tiny.run(minutes=0.0).values())
    assert (tiny.out / "table.md").read_text().startswith("# The default drafter\n\nNo rows.")
    tiny.data.write_text('{"prompt": "a"}\n')
    assert tiny.run(only=["replayed-file-float32"])["replayed-file-float32"] == []
    assert tiny.run(data=None, only=["replayed-file-float32"])["replayed-file-float32"] == []


def test_of_answers_of_other_lengths_times_a_token_are_compared():
    rows = [row("plain", "set/0", tokens=10, processor_seconds=[4.0])]
    found = Found.of([*rows, row("recycling", "set/0", tokens=5, processor_seconds=[1.0])])
    assert found.speed("recycling", "plain").value == 2.0


def test_time_is_divided_by_shares_and_what_is_left_goes_on(tiny, monkeypatch):
    now, limits = 100.0, []

    def run(scenario, folder, file, prompts, until, fresh):
        nonlocal now
        limits.append(until - now)
        now += 10
        return 1

    monkeypatch.setattr(program, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(program, "run", run)
    tiny.run(minutes=1.0)
    shares = [BY_NAME[name].share for name in TINY]
    assert limits == pytest.approx([(60 - 10 * n) * shares[n] / sum(shares[n:]) for n in range(4)])


def test_two_tokens_at_once_have_one_time():
    together, apart = Clock(CPU), Clock(CPU)
    together([1, 2, 3])
    apart([1])
    apart([2])
    for times in zip(together.times().values(), apart.times().values(), strict=True):
        (first, second), (before, after) = times
        assert first == second
        assert 0 < before < after


@pytest.mark.real
def test_the_model_has_the_type_of_the_scenario_and_reads_its_template():
    scenario = BY_NAME["written-20-tokens-bfloat16"]
    where = models.configured(scenario)
    assert str(where.model.dtype) == "torch.bfloat16"
    ids, most = prompt(where, texts.items(scenario, where)[0].questions[0])
    assert where.tokenizer.decode(ids).startswith("<|im_start|>system")
    assert most == 20
