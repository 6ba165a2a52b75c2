"""Replays of recorded conversations and edits: what is read, and that every token of an answer is accounted for."""

from __future__ import annotations

import ast
import json
import re

import numpy as np
import pytest
from support import tiny
from support.speaking import chatty, speaking_llama

from benchmarks.traces.__main__ import _figures, _report
from benchmarks.traces.edits import edits
from benchmarks.traces.replaying import Steps, pass_costs, with_model, without_model
from benchmarks.traces.turns import Turn, recorded
from token_recycling import make_drafter
from token_recycling.model.prefixes import PrefixCache
from token_recycling.model.self_test import ready


@pytest.fixture(scope="module")
def tokenizer():
    made = chatty(tiny.tokenizer())
    made.eos_token = "<end>"
    return made


class Fifths:
    """Each token is five characters, so that pieces of this package's source are as long as files may be."""

    def __call__(self, text):
        return {"input_ids": [text[place : place + 5] for place in range(0, len(text), 5)]}

    def apply_chat_template(self, messages, **_):
        return self(messages[-1]["content"])


def test_edits_change_what_they_say_and_nothing_else():
    made = list(edits(Fifths(), 3))
    assert [one.kind for one in made] == ["rename"] * 3 + ["parameter"] * 3 + ["docstring"] * 3
    assert len({"".join(one.prediction) for one in made}) == 9
    for one in made:
        file, edited, asked = ("".join(tokens) for tokens in (one.prediction, one.answer, one.prompt))
        assert 300 <= len(one.prediction) <= 600
        assert file in asked
        assert edited != file
        ast.parse(edited)
        if one.kind == "rename":
            old, new = re.findall(r"`(\w+)`", asked)[:2]
            assert old not in {node.id for node in ast.walk(ast.parse(edited)) if isinstance(node, ast.Name)}
            assert edited.count(new) >= 4
        if one.kind == "docstring":
            assert len(edited.splitlines()) == len(file.splitlines()) + 1
    assert [one.answer for one in edits(Fifths(), 3)] == [one.answer for one in made]


def test_recorded_conversations_are_read(tmp_path, tokenizer):
    call = {"function": {"name": "find", "arguments": '{"a": 1}'}}
    said = [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "find a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "it is 1"},
        {"role": "assistant", "content": "It is 1."},
    ]
    (tmp_path / "runs.json").write_text(json.dumps([{"task_id": 3, "trial": 0, "traj": said}] * 2))
    (tmp_path / "demos" / "one").mkdir(parents=True)
    (tmp_path / "demos" / "one" / "shown.traj").write_text(json.dumps({"history": said, "info": {}}))
    edit = {"task_id": "Edit/0", "instruction": "Rename a.", "input": "a = 1", "output": "b = 1"}
    (tmp_path / "edits.jsonl").write_text(json.dumps(edit) + "\n")
    turns = list(recorded(tmp_path / "runs.json", tokenizer))
    assert [one.kind for one in turns] == ["tool call", "prose"] * 2
    assert tokenizer.decode(turns[0].answer) == (
        '<tool_call>\n{"name": "find", "arguments": {"a": 1}}\n</tool_call>' + tokenizer.eos_token
    )
    assert "it is 1" in tokenizer.decode(turns[1].prompt)
    assert "it is 1" not in tokenizer.decode(turns[0].prompt)
    assert [one[1:] for one in recorded(tmp_path / "demos", tokenizer)] == [one[1:] for one in turns[:2]]
    assert len(list(recorded(tmp_path / "runs.json", tokenizer, 1))) == 2
    (one,) = recorded(tmp_path / "edits.jsonl", tokenizer)
    assert tokenizer.decode(one.prediction) == "a = 1"
    assert "Rename a." in tokenizer.decode(one.prompt)
    for name, what in (("other.json", "got something else"), ("nowhere", "got nothing there")):
        (tmp_path / "other.json").write_text("[]")
        with pytest.raises(ValueError, match=what):
            list(recorded(tmp_path / name, tokenizer))


def test_every_method_says_the_whole_answer():
    target = ready(speaking_llama())
    file = list(range(40, 90))
    turn = Turn("one", "edit", [5, *file, 6], [*file[:20], 7, *file[21:]], file)
    kept = PrefixCache(target, 10**8)
    made = {
        "ours": with_model(target, make_drafter("recycling:tree=16"), turn, kept.of("one"), False),
        "ours, with prediction": with_model(target, make_drafter("recycling:tree=16"), turn, kept.of("one"), True),
        "lookup": without_model(make_drafter("prompt_lookup"), target, turn),
    }
    for steps in made.values():
        assert sum(steps.emitted) == 50
        assert all(0 < said <= drafted + 1 for said, drafted in zip(steps.emitted, steps.drafted, strict=True))
    assert len(made["ours, with prediction"].emitted) < len(made["ours"].emitted) < 20
    costs = pass_costs(target, 50, 1)
    assert len(costs) == 64
    assert costs[0] == 1
    assert (np.diff(costs) >= 0).all()
    report = _report("edits", False, {name: [one] for name, one in made.items()}, costs)
    assert {(row["method"], row["kind"]) for row in report["rows"]} == {
        (name, kind) for name in made for kind in ("all", "edit")
    }


def test_figures_are_tokens_by_steps_and_by_time():
    steps = Steps(Turn("", "", [], []), [0, 2, 2], [1, 3, 2])
    assert _figures([steps], np.array([1.0, 1.5, 2.0])) == (2.0, 4 / 3, 6 / 5)
