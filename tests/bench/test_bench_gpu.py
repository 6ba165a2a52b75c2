"""The program that measures the fast path on an accelerator, tried on a CPU with a tiny shape."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import typer
from support import tiny

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu import steps as gpu
from benchmarks.gpu.grown import grown
from benchmarks.gpu.grown import main as grow
from benchmarks.gpu.profiled import _covered, profiled
from benchmarks.gpu.report import BARS, Times, judged
from benchmarks.gpu.shapes import Shape


def test_it_measures_goes_on_and_reports(tmp_path, monkeypatch):
    options = {"shape": ["tiny"], "context": [40], "device": "cpu"}
    options |= {"dtype": "float32", "output": tmp_path, "few": True}
    with pytest.raises(typer.Exit) as stopped:
        gpu.main(**options, seconds=-1)
    assert stopped.value.exit_code == 3
    ticks = iter(range(10_000))
    monkeypatch.setattr(gpu.time, "monotonic", lambda: float(next(ticks)))
    with pytest.raises(typer.Exit):
        gpu.main(**options, seconds=3.5)
    first = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert 1 <= len(first) < 12
    gpu.main(**options, seconds=1000)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows[: len(first)] == first
    found = {(row["what"], row["kind"], row["nodes"]) for row in rows}
    steps = {("step", "captured", nodes) for nodes in (1, 4, 64)}
    others = {(what, "captured", nodes) for what in ("forward", "profile") for nodes in (1, 64)}
    eager = {("generate", "eager", 1), ("generate", "compiled", 1), ("profile", "eager", 1)}
    compared = {("step", kind, 1) for kind in ("eager", "compiled")}
    assert found == steps | others | eager | compared
    assert len(rows) == 12
    assert all(row["seconds"] > 0 for row in rows)
    profiles = [row for row in rows if row["what"] == "profile"]
    assert all(0 < row["busy"] <= row["seconds"] and row["operations"] > 20 for row in profiles)
    gpu.main(**options, seconds=1000)
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 12
    report = (tmp_path / "report.md").read_text()
    assert re.search(r"\| tiny +\| +40 \|", report)
    assert "no accelerator" in report
    assert "python -m benchmarks.gpu" in report


def test_bars_are_judged_by_the_times():
    """Eager 20 ms, plain step 4 ms, 64 nodes 4.4 ms of which 4.3 are the forward pass."""
    rows = [
        {"what": what, "kind": kind, "nodes": nodes, "seconds": seconds}
        for what, kind, nodes, seconds in (
            ("generate", "eager", 1, 0.020),
            ("generate", "compiled", 1, 0.005),
            ("step", "captured", 1, 0.004),
            ("step", "captured", 64, 0.0044),
            ("forward", "captured", 64, 0.0043),
        )
    ]
    written = [judged(bar, Times(rows)) for bar in BARS]
    assert written == ["5.00 pass", "1.25 pass", "1.10 pass", "2.3% pass", "2.45 pass", "12.27 pass"]
    assert [judged(bar, Times(rows[:3])) for bar in BARS] == ["5.00 pass", "1.25 pass", "-", "-", "-", "-"]
    rows[3]["seconds"] = 0.006
    assert [judged(bar, Times(rows)) for bar in BARS][2:] == [
        "1.50 FAIL",
        "28.3% FAIL",
        "1.80 FAIL",
        "9.00 pass",
    ]


def test_what_cannot_be_measured_is_refused(tmp_path):
    with pytest.raises(typer.BadParameter, match="70B"):
        gpu.main(shape=["70B"], device="cpu", output=tmp_path)


def test_waiting_is_what_no_operation_covers():
    assert _covered([(0, 4), (1, 2), (3, 6), (10, 11)]) == 7
    weight = torch.ones(64, 64)
    found = profiled(lambda: [weight @ weight for _ in range(5)], torch.device("cpu"))
    assert found["operations"] == 5
    assert found["longest"][0][0] == "aten::matmul"
    assert 0 < found["busy"] <= found["seconds"]


@pytest.mark.parametrize(
    "shape",
    [Shape(64, 3, 16, 4, 80, 999), Shape(128, 2, 8, 8, 64, 999), Shape(32, 2, 4, 2, 64, 64)],
    ids=["shared keys", "a head's own keys", "as it was"],
)
def test_a_grown_model_says_what_the_small_one_says(model, shape):
    large, ids = grown(model, shape), tiny.prompt(0, 9)
    assert large.config.hidden_size == large.model.layers[0].mlp.down_proj.weight.shape[0] == shape.hidden_size
    assert len(large.model.layers) == shape.num_hidden_layers
    with torch.no_grad():
        torch.testing.assert_close(large(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)
    texts = [each.generate(ids, max_new_tokens=20, do_sample=False) for each in (large, model)]
    assert torch.equal(*texts)


def test_a_model_does_not_grow_smaller(model, tmp_path):
    with pytest.raises(ValueError, match="width 32"):
        grown(model, Shape(16, 2, 2, 2, 64, 64))
    with pytest.raises(typer.BadParameter, match="70B"):
        grow(tmp_path, "70B")
