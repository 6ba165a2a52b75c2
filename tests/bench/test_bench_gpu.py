"""The program that measures captured forward passes on an accelerator, on a CPU with a tiny shape."""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import typer
from support import tiny

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu import __main__ as session
from benchmarks.gpu import calls, report, steps
from benchmarks.gpu.grown import grown
from benchmarks.gpu.grown import main as grow
from benchmarks.gpu.profiled import _covered, profiled
from benchmarks.gpu.report import BARS, Times, judged
from benchmarks.gpu.shapes import Shape, made
from benchmarks.gpu.stages import Stage, rehearsal, stages
from token_recycling.bench.data import RunOptions


def test_bars_are_judged_by_measured_times():
    """Eager 20 ms, plain step 4 ms, 64 nodes 4.4 ms, of which the forward pass takes 4.3."""
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
    assert [judged(bar, Times(rows)) for bar in BARS][2:] == ["1.50 FAIL", "28.3% FAIL", "1.80 FAIL", "9.00 pass"]


def test_busy_time_is_the_union_of_operations():
    assert _covered([(0, 4), (1, 2), (3, 6), (10, 11)]) == 7
    weight = torch.ones(64, 64)
    found = profiled(lambda: [weight @ weight for _ in range(5)], torch.device("cpu"))
    assert found["operations"] == 5
    assert found["longest"][0][0] == "aten::matmul"
    assert 0 < found["busy"] <= found["seconds"]


@pytest.mark.parametrize(
    "shape",
    [Shape(64, 3, 16, 4, 80, 999), Shape(128, 2, 8, 8, 64, 999), Shape(32, 2, 4, 2, 64, 64)],
    ids=["shared keys", "keys per head", "unchanged"],
)
def test_grown_model_equals_the_small_one(model, shape):
    large, ids = grown(model, shape), tiny.prompt(0, 9)
    assert large.config.hidden_size == large.model.layers[0].mlp.down_proj.weight.shape[0] == shape.hidden_size
    assert len(large.model.layers) == shape.num_hidden_layers
    with torch.no_grad():
        torch.testing.assert_close(large(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)
    texts = [each.generate(ids, max_new_tokens=20, do_sample=False) for each in (large, model)]
    assert torch.equal(*texts)


def test_invalid_shapes_are_refused(model, tmp_path):
    with pytest.raises(ValueError, match="width 32"):
        grown(model, Shape(16, 2, 2, 2, 64, 64))
    with pytest.raises(typer.BadParameter, match="70B"):
        grow(tmp_path, "70B")
    with pytest.raises(typer.BadParameter, match="70B"):
        steps.main(shape=["70B"], device="cpu", output=tmp_path)


# Stages of a run on a GPU: resumed, smaller when out of memory, stopped at the time limit


def python(code):
    return sys.executable, "-c", code


FULL = python("import sys; sys.exit('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB')")


def rows(folder):
    return [json.loads(line) for line in (folder / "stages.jsonl").read_text().splitlines()]


def test_stage_out_of_memory_is_retried_at_the_next_size(tmp_path):
    made = [tmp_path / name for name in ("large", "small")]
    touch = [python(f"open({str(path)!r}, 'a').write('x')") for path in made]
    todo = [
        Stage("fits later", 1, ((FULL, touch[0]), (touch[1],))),
        Stage("never fits", 1, ((FULL,), (FULL,))),
        Stage("fails", 1, ((python("raise ValueError(7)"),), (touch[0],))),
        Stage("absent", 1, ((touch[0],),), needs=("json", "no_such_library")),
    ]
    assert not session.run(todo, tmp_path)
    assert [path.exists() for path in made] == [False, True]
    found = {row["stage"]: (row["status"], row["size"]) for row in rows(tmp_path)}
    assert found == {
        "fits later": ("done", 1),
        "never fits": ("out of memory", 1),
        "fails": ("failed with exit status 1", 0),
    }
    session.run(todo, tmp_path)
    assert made[1].read_text() == "x"  # done once
    assert [row["stage"] for row in rows(tmp_path)[3:]] == ["never fits", "fails"]


def test_stage_at_the_time_limit_is_interrupted_and_not_recorded(tmp_path):
    begun, stopped = tmp_path / "begun", tmp_path / "stopped"
    code = f"""
import pathlib, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore SIGINT in background processes
try:
    pathlib.Path({str(begun)!r}).touch()
    time.sleep(60)
except KeyboardInterrupt:
    pathlib.Path({str(stopped)!r}).touch()
"""
    with pytest.raises(session.TimeUpError):
        session.run([Stage("long", 1, ((python(code),),))], tmp_path, time.monotonic() + 1.5)
    assert begun.exists()
    assert stopped.exists()
    assert not (tmp_path / "stages.jsonl").exists()


def test_methods_of_all_stages_are_valid(tmp_path):
    for stage in [*stages(tmp_path, "model.gguf", "spec_bench"), *rehearsal(tmp_path)]:
        for command in (command for size in stage.sizes for command in size if "bench" in command):
            given = [command[place + 1] for place, part in enumerate(command) if part == "--method"]
            assert RunOptions(data=("spec_bench",), methods=tuple(given)).methods


def test_stages_cover_all_measurements_and_are_all_rehearsed(tmp_path):
    names = [stage.name.split()[0] for stage in stages(tmp_path, "model.gguf", "spec_bench")]
    assert {*names} == {"tests", "steps", "memory", "start", "experts", "texts", "vLLM"}
    assert {*names} == {stage.name.split()[0] for stage in rehearsal(tmp_path)}
    (vllm,) = [stage for stage in stages(tmp_path, "model.gguf", "spec_bench") if stage.name == "vLLM"]
    ((command,),) = vllm.sizes
    assert [value for option, value in pairwise(command) if option == "--load"] == ["1", "8", "32", "64"]


def test_kv_cache_size_is_computed_from_the_shape():
    """Two layers of two heads of 16 in float32: 512 bytes a token, of at most 16 tokens in a window."""
    for shape, tokens in (("tiny", 40), ("tiny window", 16)):
        assert calls._kv_bytes(made(shape, 64, torch.device("cpu"), torch.float32), 40) == 512 * tokens
    rows = [
        {"shape": "tiny", "context": 40, "what": "memory", "kind": kind, "nodes": 1, "bytes": size, "kv_bytes": 100}
        for kind, size in (("generate", 1000), ("eager", 1020), ("captured", 1030))
    ]
    written = "".join(report._whole_calls(rows))
    assert "1.20 pass" in written
    assert "1.30 FAIL" in written


@pytest.mark.nightly
def test_every_stage_runs_tiny_on_the_cpu(tmp_path):
    assert session.run(rehearsal(tmp_path), tmp_path)
