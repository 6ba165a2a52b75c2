"""`token-recycling bench`: rows, resuming, scenarios and refused options."""

import json
import shutil
import sys
import types
from pathlib import Path

import pytest
from support.commandline import assert_refused, run, run_json
from transformers import GenerationConfig

from token_recycling.bench.measure import WorkloadRun


@pytest.fixture(autouse=True)
def report(monkeypatch):
    """Replace the report, which other tests cover; return the folders that it was requested for."""
    asked = []

    def write(folder):
        asked.append(folder)
        return "", [folder / "report.md"]

    stub = types.ModuleType("token_recycling.bench.report")
    stub.write = write  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    return asked


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    texts = {"a.py": "def add(a, b):\n    return a + b", "b.py": "import os\nimport sys", "c.py": "x = 1"}
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


def rows(folder):
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


SMALL = ("--max-new-tokens", 6, "--repeats", 1, "--method", "generate", "--method", "recycling:tree=2")


def test_prompts_use_the_chat_template_as_in_compare(tiny_model_dir, texts, tmp_path):
    folder = Path(shutil.copytree(tiny_model_dir, tmp_path / "chats"))
    (folder / "chat_template.jinja").write_text("{% for message in messages %}<{{ message['content'] }}>{% endfor %}")
    given = ("--data", texts, "--limit", 1, "--output", tmp_path / "out", *SMALL, "--replay")
    chats = run("bench", folder, *given)
    assert "prompts go through the tokenizer's chat template" in chats.stderr
    assert "1 of 1 questions have no known answer and are not replayed" in chats.stderr
    through = run_json("compare", folder, "--prompts", texts / "a.py", "--max-new-tokens", 6, "--drafter", "plain")
    found = rows(tmp_path / "out")
    assert {one["mode"] for one in found} == {"generate"}
    assert {one["prompt_tokens"] for one in found} == {through["prompts"][0]["stats"]["prompt_tokens"]}
    run("bench", folder, *given, "--raw", "--fresh")
    found = rows(tmp_path / "out")
    assert {one["mode"] for one in found} == {"generate", "replay"}
    assert found[0]["prompt_tokens"] == through["prompts"][0]["stats"]["prompt_tokens"] - 2


def test_bench_writes_rows_and_a_report(tiny_model_dir, texts, tmp_path, report, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = shutil.copytree(tiny_model_dir, tmp_path / "small")
    GenerationConfig(eos_token_id=256, repetition_penalty=1.3).save_pretrained(model)
    result = run("bench", model, "--data", texts, "--limit", 2, *SMALL, "--json")
    assert result.exit_code == 0, result.stderr
    assert "ignored settings of the model's own generation configuration: repetition_penalty=1.3\n" in result.stderr
    folder, counts = Path("results") / "small", {"rows": 8, "failures": 0, "different_outputs": 0}
    assert report == [folder]
    assert json.loads(result.stdout) == {"folder": str(folder), "written": [str(folder / "report.md")], **counts}
    found = rows(folder)
    assert [(one["mode"], one["method"], one["prompt"]) for one in found] == [
        (mode, method, prompt)
        for mode, baseline in (("generate", "generate"), ("replay", "plain"))
        for prompt in ("texts/a.py", "texts/b.py")
        for method in (baseline, "recycling:tree=2")
    ]
    assert found[1]["identical"] is True
    assert found[0]["environment"]["dtype"] == "float32"


def test_bench_resumes_after_an_interruption(tiny_model_dir, texts, tmp_path, monkeypatch):
    asked = ("bench", tiny_model_dir, "--data", texts, "--output", tmp_path, *SMALL)
    measured = WorkloadRun.rows_of

    def interrupted(self, place):
        if self.workload.mode == "replay" and place == 1:
            raise KeyboardInterrupt
        return measured(self, place)

    monkeypatch.setattr(WorkloadRun, "rows_of", interrupted)
    result = run(*asked)
    assert result.exit_code == 130
    assert "stopped with 4 of 6 prompts" in result.stderr
    assert "this takes about 1 min" in result.stderr
    before = rows(tmp_path)
    assert len(before) == 8
    monkeypatch.setattr(WorkloadRun, "rows_of", measured)
    result = run(*asked)
    assert result.exit_code == 0
    assert "4 of 6 prompts are already measured" in result.stderr
    assert rows(tmp_path)[:8] == before
    assert len(rows(tmp_path)) == 12
    other_method = run(*asked[:-2], "--method", "plain")
    assert_refused(other_method, "--fresh", "workloads")
    assert run(*asked[:-2], "--method", "plain", "--fresh").exit_code == 0
    assert {one["method"] for one in rows(tmp_path)} == {"generate", "plain"}


def test_bench_measures_batches_and_cold_starts(tiny_model_dir, texts, tmp_path):
    method = ("--method", "recycling:tree=4")
    asked = ("bench", tiny_model_dir, "--data", texts, "--max-new-tokens", 4, "--repeats", 1, *method)
    result = run(*asked, "--batch", 1, "--batch", 2, "--output", tmp_path / "batch")
    assert result.exit_code == 0
    assert [one["batch"] for one in rows(tmp_path / "batch")] == [1, 1, 1, 1, 1, 1, 2, 2, 1, 1]
    (texts / "d.py").write_text((texts / "a.py").read_text())
    steps = {}
    for start in ("hot", "cold"):
        given = [*asked[:-1], "cold:recycling:tree=4"] if start == "cold" else asked
        assert run(*given, "--no-replay", "--output", tmp_path / start).exit_code == 0
        steps[start] = [one["steps"] for one in rows(tmp_path / start) if one["method"] != "generate"]
    assert steps["cold"][3] == steps["cold"][0] >= steps["hot"][3]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ((), "spec_bench"),
        (("--data", "nothing.jsonl"), "nothing.jsonl"),
        (("--data", "{texts}", "--method", "nothing"), "'nothing'"),
        (("--data", "{texts}", "--method", "assisted:model={texts}"), "config.json"),
        (("--data", "{texts}", "--method", "plain", "--method", "plain"), "plain"),
        (("--data", "{texts}", "--batch", "2", "--replay"), "--replay"),
        (("--data", "{texts}", "--repeats", "0"), "--repeats"),
        (("--data", "{texts}", "--chat"), "--raw"),
        (("--scenario", "{texts}/a.py"), "a.py"),
    ],
)
def test_invalid_bench_options_are_refused_in_one_line(tiny_model_dir, texts, tmp_path, options, word):
    given = [option.format(texts=texts) for option in options]
    assert_refused(run("bench", tiny_model_dir, *given, "--output", tmp_path / "out"), word)
    assert not (tmp_path / "out").exists()


WRONG = {
    "limit: many": "many",
    "- a": "list",
    "data: [x": "YAML",
    "data: [x]\nruns: [a]": "runs",
    "data: [x]\nmethods: ['suffix:nope=1']": "nope",
    "data: [x]\nrepeats: 0": "0",
}


@pytest.mark.parametrize("text", WRONG)
def test_invalid_scenario_is_refused(tiny_model_dir, tmp_path, text):
    (tmp_path / "own.yaml").write_text(text)
    assert_refused(run("bench", tiny_model_dir, "--scenario", tmp_path / "own.yaml"), WRONG[text])


def test_runs_of_a_scenario_have_separate_folders(tiny_model_dir, texts, tmp_path, report):
    (tmp_path / "own.yaml").write_text(
        f"data: [{texts}]\nmethods: [generate, 'recycling:tree=2']\nrepeats: 1\nmax_new_tokens: 9\nlimit: 1\n"
        "runs:\n  long: {replay: false}\n  replayed: {generate: false}\n  sampled: {temperature: 0.7, limit: 2}\n"
    )
    asked = ("bench", tiny_model_dir, "--scenario", tmp_path / "own.yaml", "--output", tmp_path / "out")
    result = run(*asked, "--max-new-tokens", 4)
    assert result.exit_code == 0, result.stderr
    assert report == [tmp_path / "out"]
    found = {name: rows(tmp_path / "out" / name) for name in ("long", "replayed", "sampled")}
    assert {name: {row["mode"] for row in own} for name, own in found.items()} == {
        "long": {"generate"},
        "replayed": {"replay"},
        "sampled": {"generate"},
    }
    assert {name: len(own) for name, own in found.items()} == {"long": 2, "replayed": 2, "sampled": 4}
    assert {row["temperature"] for row in found["sampled"]} == {0.7}
    assert all(row["max_new_tokens"] == 4 for own in found.values() for row in own)
    assert "6 of 6" not in result.stderr
    assert "4 of 4 prompts are already measured" in run(*asked, "--max-new-tokens", 4).stderr
