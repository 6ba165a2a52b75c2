"""The stages of a session on a card: resumed, halved when out of memory, ended in time."""

import json
import re
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.stages import Stage, rehearsal, stages
from token_recycling.bench.scenario import RunOptions


def python(code):
    return sys.executable, "-c", code


FULL = python("import sys; sys.exit('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB')")


def rows(folder):
    return [json.loads(line) for line in (folder / "stages.jsonl").read_text().splitlines()]


def test_a_stage_that_is_out_of_memory_is_tried_in_the_next_size(tmp_path):
    made = [tmp_path / name for name in ("large", "small")]
    touch = [python(f"open({str(path)!r}, 'a').write('x')") for path in made]
    todo = [
        Stage("fits later", 1, ((FULL, touch[0]), (touch[1],))),
        Stage("never fits", 1, ((FULL,), (FULL,))),
        Stage("fails", 1, ((python("raise ValueError(7)"),), (touch[0],))),
        Stage("absent", 1, ((touch[0],),), needs="no_such_library"),
    ]
    assert not gpu.run(todo, tmp_path)
    assert [path.exists() for path in made] == [False, True]
    found = {row["stage"]: (row["status"], row["size"]) for row in rows(tmp_path)}
    assert found == {
        "fits later": ("done", 1),
        "never fits": ("out of memory", 1),
        "fails": ("failed with exit status 1", 0),
    }
    gpu.run(todo, tmp_path)
    assert made[1].read_text() == "x"  # done once
    assert [row["stage"] for row in rows(tmp_path)[3:]] == ["never fits", "fails"]


def test_a_stage_that_takes_too_long_is_interrupted_and_not_done(tmp_path):
    begun, stopped = tmp_path / "begun", tmp_path / "stopped"
    code = f"""
import pathlib, time
try:
    pathlib.Path({str(begun)!r}).touch()
    time.sleep(60)
except KeyboardInterrupt:
    pathlib.Path({str(stopped)!r}).touch()
"""
    with pytest.raises(gpu.TimeUpError):
        gpu.run([Stage("long", 1, ((python(code),),))], tmp_path, time.monotonic() + 3)
    assert begun.exists()
    assert stopped.exists()
    assert not (tmp_path / "stages.jsonl").exists()


def test_sizes_halve_the_largest_batch_and_then_the_model(tmp_path):
    plan = {stage.name: stage for stage in stages(tmp_path, "model.gguf", "spec_bench")}
    batches = [re.findall(r"--batch (\d+)", " ".join(size[-1])) for size in plan["texts 8B bfloat16"].sizes]
    assert batches[:3] == [["1", "8", "32"], ["1", "8", "16"], ["1", "8"]]
    models = [size[-1][4].rpartition("/")[2] for size in plan["texts 8B bfloat16"].sizes]
    assert models == ["8B"] * (len(models) // 2) + ["3B"] * (len(models) // 2)


def test_methods_are_those_of_the_benchmark(tmp_path):
    for stage in [*stages(tmp_path, "model.gguf", "spec_bench"), *rehearsal(tmp_path)]:
        for command in (command for size in stage.sizes for command in size if "bench" in command):
            given = [command[place + 1] for place, part in enumerate(command) if part == "--method"]
            assert RunOptions(data=("spec_bench",), methods=tuple(given)).methods


@pytest.mark.nightly
def test_every_stage_runs_tiny_on_the_cpu(tmp_path):
    assert gpu.run(rehearsal(tmp_path), tmp_path)
