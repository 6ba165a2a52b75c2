"""The program that measures the fast path on an accelerator, tried on a CPU with a tiny shape."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(PROGRAM.parent)
    spec = importlib.util.spec_from_file_location("benchmark_gpu", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "benchmark_gpu", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SIZES", (1, 4, 64))
    return module


def test_it_measures_goes_on_and_reports(gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"shape": ["tiny"], "context": [40], "device": "cpu"}
    options |= {"dtype": "float32", "output": tmp_path}
    with pytest.raises(typer.Exit) as stopped:
        gpu.main(**options, seconds=-1)
    assert stopped.value.exit_code == 3
    ticks = iter(range(10_000))
    monkeypatch.setattr(gpu.time, "monotonic", lambda: float(next(ticks)))
    with pytest.raises(typer.Exit):
        gpu.main(**options, seconds=3.5)
    first = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert 1 <= len(first) < 6
    gpu.main(**options, seconds=1000)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows[: len(first)] == first
    found = {(row["what"], row["kind"], row["nodes"]) for row in rows}
    steps = {("step", "captured", nodes) for nodes in (1, 4, 64)}
    assert found == {("generate", "eager", 1), *steps, ("forward", "captured", 1), ("forward", "captured", 64)}
    assert len(rows) == 6
    assert all(row["seconds"] > 0 for row in rows)
    gpu.main(**options, seconds=1000)
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 6
    report = (tmp_path / "report.md").read_text()
    assert "| tiny | 40 |" in report
    assert "no accelerator" in report
    assert "python benchmarks/gpu.py" in report


def test_bars_are_judged_by_the_times(gpu: ModuleType) -> None:
    """Eager 20 ms, plain step 4 ms, 64 nodes 4.4 ms of which 4.3 are the forward pass."""
    from gpu_report import BARS, Times, judged

    rows = [
        {"what": what, "kind": kind, "nodes": nodes, "seconds": seconds}
        for what, kind, nodes, seconds in (
            ("generate", "eager", 1, 0.020),
            ("step", "captured", 1, 0.004),
            ("step", "captured", 64, 0.0044),
            ("forward", "captured", 64, 0.0043),
        )
    ]
    written = [judged(bar, Times(rows)) for bar in BARS]
    assert written == ["5.00 pass", "1.10 pass", "2.3% pass", "2.45 pass", "12.27 pass"]
    assert [judged(bar, Times(rows[:2])) for bar in BARS] == ["5.00 pass", "-", "-", "-", "-"]
    rows[2]["seconds"] = 0.006
    assert [judged(bar, Times(rows)) for bar in BARS][1:] == [
        "1.50 FAIL",
        "28.3% FAIL",
        "1.80 FAIL",
        "9.00 pass",
    ]


def test_what_cannot_be_measured_is_refused(gpu: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="got 70B"):
        gpu.main(shape=["70B"], device="cpu", output=tmp_path)
