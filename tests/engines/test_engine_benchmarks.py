"""The benchmark of each engine starts in the engine's own environment, without the libraries of reports."""

import importlib.util
import json
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from benchmarks.engines import ENGINES, NONE, WORKS

ROOT = Path(__file__).parents[2]
LIBRARIES = {"vllm": "vllm", "sglang": "sglang", "llama-cpp": "llama_cpp", "mlx": "mlx_lm"}
OPTIONAL = {"kernels", "datasets", "evaluate", "accelerate", "triton", "wandb"}
"""Packages that transformers and engines import if a module of that name exists."""


def run(code):
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


def test_no_script_shadows_a_package():
    """A script's folder comes first on the path, so its neighbors hide packages of the same names."""
    taken = {*sys.stdlib_module_names, *packages_distributions(), *OPTIONAL} - {"benchmarks", "scripts", "examples"}
    for folder in ("benchmarks", "benchmarks/gpu", "scripts", "examples"):
        assert not {file.stem for file in (ROOT / folder).glob("*.py")} & taken, folder


def test_questions_load_without_the_libraries_of_reports():
    absent = "import sys; sys.modules.update(dict.fromkeys(['pandas', 'tabulate', 'matplotlib', 'scipy']));"
    finished = run(f"{absent} from benchmarks.engines import works; print(*works(['models/prompts'], 2))")
    assert finished.stdout.split() == [*WORKS], finished.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ENGINES)
def test_engine_answers_two_questions_with_every_method(engine, tmp_path):
    if importlib.util.find_spec(LIBRARIES[engine]) is None:
        pytest.skip(f"{LIBRARIES[engine]} is not installed in this environment")
    rows = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "benchmarks.engines", engine, "--data", "models/prompts"]
    command += ["--limit", "2", "--load", "1", "--max-new-tokens", "8", "--rows", str(rows)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert finished.returncode == 0, finished.stderr[-3000:]
    measured = [json.loads(line) for line in rows.read_text().splitlines()]
    assert {(row["method"], row["work"]) for row in measured} == {
        (method, work) for method in ENGINES[engine].METHODS for work in WORKS
    }
    assert all(row["tokens"] and not row["differ"] for row in measured)
    assert f"| {NONE} |" in finished.stdout
