"""The repository's scenario files: valid, with existing data and grammars that constrain outputs."""

import json

import pytest
from support import benching
from support.pages_of_docs import ROOT

from scripts.job_tables import job_plot, job_table, jobs_of, tables
from token_recycling.bench.data import SOURCES, RunOptions, load, runs_of
from token_recycling.bench.measure import plan
from token_recycling.bench.methods import parse
from token_recycling.bench.summary import summarize

SCENARIOS = sorted((ROOT / "benchmarks" / "scenarios").glob("*.yaml"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario_is_valid_and_its_data_exist(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for options in runs_of(path, {}).values():
        local = [one for one in options.data if one not in SOURCES]
        assert not local or load(local, options.limit)
        for spec in options.methods:
            assert "datastore=" in spec or parse(spec).spec == spec


def test_outputs_follow_the_grammar_of_their_question(tmp_path):
    asked = {"prompt": "Is it?", "regex": "yes|no"}, {"prompt": "Which?", "json_schema": {"enum": ["a", "b"]}}
    (tmp_path / "forms.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
    where = benching.setup(max_new_tokens=12)
    where.model.generation_config.eos_token_id = where.tokenizer.eos_token_id
    questions = load([str(tmp_path / "forms.jsonl")])
    said = []

    def hook(event):
        if event.phase == "measuring" and event.outcomes is not None:
            assert not isinstance(event.outcomes, Exception), event.outcomes
            said.append(where.decoded(event.outcomes[0].tokens[0]))

    specs = ["recycling:tree=4", "forced:recycling:tree=4"]
    rows = benching.run(where, benching.plan(specs, questions, False), tmp_path / "out", hook)
    assert [row["identical"] for row in rows] == [None, True, None] * 2
    assert max(row["steps"] for row in rows if row["method"] != "generate") <= 2, "drafts follow the grammar"
    assert set(said[:3]) <= {"yes", "no"}
    assert set(said[3:]) <= {'"a"', '"b"'}


def test_jobs_are_measured_cold_and_warm_after_a_warm_up(tmp_path):
    """Later turns of a conversation reuse cached keys and values; a prediction of the output is accepted."""
    where = benching.setup(max_new_tokens=12)
    (text,) = benching.decoded("generate", where.model, where.ids("b")[None], tokens=12).tokens
    lines = [
        *({"category": "edit", "prompt": prompt, "prediction": where.decoded(text)} for prompt in "ab"),
        *({"category": "talk", "turns": [letter * 40, "b"]} for letter in "ab"),
    ]
    (tmp_path / "jobs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    specs = ["generate", "cold:recycling:tree=8", "recycling:tree=8"]
    options = RunOptions((str(tmp_path / "jobs.jsonl"),), methods=tuple(specs), warm_up=1, replay=False)
    questions = load(options.data)
    made = plan(options, questions)
    phases = []
    found = benching.run(where, made, tmp_path / "out", phases.append)
    assert {one.method.spec for one in phases if one.phase == "learning"} == {"recycling:tree=8"}
    assert [row["prompt"] for row in found] == ["jobs/2"] * 3 + ["jobs/4"] * 3
    assert all(row["identical"] is not False and row["failure"] is None for row in found)
    edit, talk = (benching.by_method(found[place : place + 3]) for place in (0, 3))
    assert talk["generate"][0]["turns"] == 2
    assert edit["cold:recycling:tree=8"][0]["steps"] <= 6
    summary = summarize([{**row, "run": run} for row in found for run in ("a", "b")])
    table = job_table(jobs_of(summary)[0]).frame
    assert table["job"].str.contains("first token").tolist() == [False, False, True, False, False]
    assert list(table) == ["job", "prompts", "recycling (tree=8), cold", "recycling (tree=8), warm"]
    assert tables(summary).count("| recycling (tree=8), warm") == 2
    assert job_plot(summary) is None, "there are no shares without plain decoding"


def test_warm_up_that_leaves_nothing_to_measure_is_refused():
    options = RunOptions(("texts",), methods=("generate",), warm_up=9)
    with pytest.raises(ValueError, match="9 of 2"):
        plan(options, benching.questions()[:2])
