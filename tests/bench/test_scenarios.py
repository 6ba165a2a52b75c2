"""The scenario files of the repository: each is understood, its data are there, and its grammars hold outputs."""

import json

import pytest
from support import benching
from support.pages_of_docs import ROOT

from token_recycling.bench.run.data import load
from token_recycling.bench.run.download import SOURCES
from token_recycling.bench.run.methods import parse
from token_recycling.bench.scenario import runs_of

SCENARIOS = sorted((ROOT / "benchmarks" / "scenarios").glob("*.yaml"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_scenario_is_understood_and_its_data_are_there(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for options in runs_of(path, {}).values():
        local = [one for one in options.data if one not in SOURCES]
        assert not local or load(local, options.limit)
        for spec in options.methods:
            assert "datastore=" in spec or parse(spec).spec == spec


def test_outputs_are_held_to_the_grammar_of_their_question(tmp_path):
    pytest.importorskip("xgrammar")
    (tmp_path / "forms.jsonl").write_text(
        json.dumps({"prompt": "Is it?", "regex": "yes|no"})
        + "\n"
        + json.dumps({"prompt": "Which?", "json_schema": {"enum": ["a", "b"]}})
        + "\n"
    )
    where = benching.setup(max_new_tokens=12)
    where.model.generation_config.eos_token_id = where.tokenizer.eos_token_id
    questions = load([str(tmp_path / "forms.jsonl")])
    said = []

    def hook(event):
        if event.phase == "measuring" and event.found is not None:
            assert not isinstance(event.found, Exception), event.found
            said.append(where.decoded(event.found[0].tokens[0]))

    rows = benching.run(where, benching.plan(["recycling:tree=4"], questions, False), tmp_path / "out", hook)
    assert [row["identical"] for row in rows] == [None, True] * 2
    assert set(said[:2]) <= {"yes", "no"}
    assert set(said[2:]) <= {'"a"', '"b"'}
