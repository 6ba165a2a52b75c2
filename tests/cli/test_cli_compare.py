"""`token-recycling compare`."""

import copy
import json
import re
import shutil
from itertools import chain
from types import SimpleNamespace

import pytest
from support import benching
from support.commandline import PROMPT, reference, run, run_json

from token_recycling.bench.methods import Transformers
from token_recycling.cli import comparison
from token_recycling.cli.comparison import bfloat16_speedup, may_try_bfloat16

FIXED = ("--drafter", "recycling:tree=8")
"""A fixed tree, whose size does not depend on the machine."""


@pytest.fixture
def prompt_folder(tmp_path):
    for name, text in (("b.py", "import os\n"), ("a.py", f"{PROMPT}\n"), (".hidden", "no"), ("c.py", "class A:\n")):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_compare_prints_answers_and_a_table(tiny_model_dir, prompt_folder):
    result = run("compare", tiny_model_dir, "--prompts", prompt_folder, "--max-new-tokens", 12, "--limit", 2)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[-1] == "identical: yes"
    assert re.findall(r"\d of \d: ([a-z.]+)", result.stdout) == ["a.py", "b.py"]
    rows = {line.split()[0]: line.split() for line in lines if line.split()}
    assert [rows[name][-1] for name in ("a.py", "b.py", "all")] == ["yes"] * 3
    assert rows["all"][1:3] == ["2", "24"]
    for name in ("bfloat16:", "warm-up:"):
        (line,) = [line for line in lines if line.startswith(name)]
        assert re.match(rf"{name} +\d+\.\d", line)


def test_speedup_of_bfloat16_is_over_float32():
    def prompt(seconds, answered=True):
        row = {"tokens": 12, "first_tokens": 1, "seconds": [seconds / 2], "total_seconds": [seconds]}
        return SimpleNamespace(rows={"accelerated": row}, answered=answered)

    halved = [prompt(1.0), prompt(9.0), prompt(2.0)]
    assert bfloat16_speedup(halved, [prompt(2.0), prompt(0.0, answered=False), prompt(4.0), prompt(99.0)]) == 2.0


def test_bfloat16_is_tried_where_a_copy_takes_little_memory(model, monkeypatch):
    weights = sum(weight.nbytes for weight in model.parameters())
    for memory, tries in ((8 * weights, True), (8 * weights - 1, False)):
        monkeypatch.setattr(comparison, "memory", lambda device, memory=memory: memory)
        assert may_try_bfloat16(model) == tries
        assert not may_try_bfloat16(copy.deepcopy(model).bfloat16())


def test_empty_answers_have_no_speed(loaded, tiny_model_dir, tmp_path):
    folder = tmp_path / "silent"
    shutil.copytree(tiny_model_dir, folder)
    first = reference(loaded, PROMPT, max_new_tokens=1, do_sample=False)[0]
    other = next(text for text in "abcdefg" if reference(loaded, text, max_new_tokens=1, do_sample=False) != [first])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": first}))
    found = run_json("compare", folder, PROMPT, other, "--max-new-tokens", 6)
    silent, speaking = found["prompts"]
    assert (silent["answered"], speaking["answered"]) == (False, True)
    assert [silent[key] for key in ("generate", "prompt_lookup", "accelerated")] == [None] * 3
    assert set(silent["speedup"].values()) == {None}
    assert found["summary"]["generate"] == speaking["generate"]
    assert found["summary"]["unanswered"] == 1
    text = run("compare", folder, PROMPT, "--max-new-tokens", 6).stdout
    assert "no answer: the model ends the output immediately" in text
    assert "speedup:" not in text


def test_compare_without_prompt_lookup(tiny_model_dir, monkeypatch):
    decode = Transformers.decode

    def refuse(self, *given):
        if self.spec != "generate":
            raise ValueError("assisted generation is not supported\nwith such models")
        return decode(self, *given)

    monkeypatch.setattr(Transformers, "decode", refuse)
    result = run("compare", tiny_model_dir, PROMPT, "--max-new-tokens", 10, "--json")
    assert "prompt lookup fails with this model: assisted generation is not supported\n" in result.stderr
    summary = json.loads(result.stdout)["summary"]
    assert summary["prompt_lookup"] is None
    assert summary["speedup"]["prompt_lookup"] is None
    assert summary["speedup"]["generate"] > 0


def test_compare_prints_json(loaded, tiny_model_dir, prompt_folder):
    found = run_json("compare", tiny_model_dir, "--prompts", prompt_folder, "--max-new-tokens", 12)
    assert [row["name"] for row in found["prompts"]] == ["a.py", "b.py", "c.py"]
    first = found["prompts"][0]
    assert list(chain.from_iterable(first["steps"])) == reference(loaded, PROMPT, max_new_tokens=12, do_sample=False)
    assert first["identical"]
    assert first["divergence"] is None
    assert first["stats"]["steps"] == len(first["steps"])
    summary = found["summary"]
    tokens = sum(row["accelerated"]["tokens"] for row in found["prompts"])
    assert summary["mat"] == pytest.approx(tokens / sum(row["stats"]["steps"] for row in found["prompts"]))
    seconds = [
        sum(row[way]["seconds"] for row in found["prompts"]) for way in ("generate", "prompt_lookup", "accelerated")
    ]
    assert summary["speedup"]["generate"] == pytest.approx(seconds[0] / seconds[2])
    assert summary["speedup"]["prompt_lookup"] == pytest.approx(seconds[1] / seconds[2])
    assert summary["prompt_lookup"]["tokens_per_second"] > 0
    stats = [row["stats"] for row in found["prompts"]]
    decoded = sum(one["tokens"] - one["first_tokens"] for one in stats) / sum(one["decode_seconds"] for one in stats)
    assert summary["accelerated"]["tokens_per_second"] == pytest.approx(decoded)
    assert summary["identical"] is True
    assert summary["prompts"] == 3


def test_compare_starts_cold_and_keeps_the_matrix(tiny_model_dir):
    once, again = run_json("compare", tiny_model_dir, PROMPT, PROMPT, "--max-new-tokens", 24, *FIXED)["prompts"]
    cold = run_json("generate", tiny_model_dir, PROMPT, "--max-new-tokens", 24, *FIXED)["stats"]["steps"]
    assert once["stats"]["steps"] == cold
    assert again["stats"]["steps"] < cold


def test_compare_reports_the_first_divergence(loaded, tiny_model_dir, monkeypatch):
    benching.inject_fault(monkeypatch)
    plain = reference(loaded, PROMPT, max_new_tokens=10, do_sample=False)
    position = next(place for place, token in enumerate(plain) if token != 65)
    found = run_json("compare", tiny_model_dir, PROMPT, "--max-new-tokens", 10, status=1)
    divergence = found["prompts"][0]["divergence"]
    assert (divergence["place"], divergence["expected"], divergence["got"]) == (position, plain[position], 65)
    assert divergence["margin"] > 0
    assert found["summary"]["identical"] is False
    text = run("compare", tiny_model_dir, PROMPT, "--max-new-tokens", 10)
    assert text.exit_code == 1
    assert "first divergence: token" in text.stdout
    assert text.stdout.splitlines()[-1] == "identical: no"
