"""The example scripts run as documented, on the shipped model, and print what their docstrings describe."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]


def run(name, *arguments):
    """Return the standard output of an example; fail with its standard error."""
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, capture_output=True, env=environment, encoding="utf-8", timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_accelerate_generate_prints_an_identical_output_and_its_steps():
    output = run("accelerate_generate.py", "--max-new-tokens", "48")
    assert "identical to plain generate: yes" in output
    tokens, steps = map(int, re.search(r"(\d+) tokens in (\d+) steps", output).groups())
    assert steps < tokens <= 48


def test_agent_calls_tools_by_their_schema():
    lines = run("agent.py", "--turns", "3").splitlines()
    calls = [json.loads(line.partition(" -> ")[0]) for line in lines]
    assert len(calls) == 3
    assert {call["tool"] for call in calls} <= {"stock", "order"}
    steps = [int(re.search(r"in (\d+) steps", line)[1]) for line in lines]
    assert steps[-1] < steps[0], "later calls are drafted from earlier ones"


def test_documents_become_objects_of_the_schema():
    *lines, last = run("documents_to_json.py").splitlines()
    objects = [json.loads(line[: line.index("}") + 1]) for line in lines]
    assert len(objects) == 4
    assert all(list(one) == ["name", "age", "occupation", "city"] for one in objects)
    tokens, steps = map(int, re.search(r"(\d+) tokens in (\d+) steps", last).groups())
    assert steps < tokens


def test_edit_code_is_identical_with_a_prediction():
    output = run("edit_code.py", "--max-new-tokens", "40")
    assert output.splitlines()[-1] == "identical: yes"
    without, given = map(int, re.search(r"prediction (\d+), with prediction (\d+)", output).groups())
    assert given <= without


def test_stream_steps_shows_every_token_and_one_tree():
    output = run("stream_steps.py", str(ROOT / "models" / "target"), "--max-new-tokens", "60")
    steps, tree = output.split("\nThe tree of the step")
    lengths = [int(line.split()[1]) for line in steps.splitlines()]
    assert 1 < max(lengths) <= sum(lengths) <= 60
    marked = [line for line in tree.splitlines() if re.match(r"\* +['\"]", line)]
    assert len(marked) == max(lengths), "one token for each accepted node, including the root"


def test_keep_the_matrix_resumes_from_the_last_run(tmp_path):
    asked = ("keep_the_matrix.py", "--matrix", str(tmp_path / "kept.safetensors"), "--max-new-tokens", "24")
    first, second = run(*asked), run(*asked)
    assert " 0 rows filled" in first.splitlines()[0]
    kept = re.search(r"after .* ([\d,]+) rows filled", first).group(1)
    assert f" {kept} rows filled" in second.splitlines()[0]
    assert (first + second).count("identical: yes") == 6
    cold, hot = zip(*re.findall(r"cold ([\d.]+), hot ([\d.]+)", second), strict=True)
    assert sum(map(float, hot)) > sum(map(float, cold)), "a hot start accepts more than a cold one"
