"""Curves of what drafters learn, in miniature: answers are written once, and a line printed at each mark."""

import json
import sys
from pathlib import Path

import torch
from support import tiny

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import learning
from token_recycling import make_drafter
from token_recycling.bench.run.data import Question
from token_recycling.model.tree_model import TreeModel


def test_held_out_questions_are_the_first_of_each_category_after_those_left_out():
    questions = [Question(f"{kind}{place}", kind, ("?",), "turns") for place in range(6) for kind in "ab"]
    held, others = learning.divided(questions, 1, 2)
    assert [question.name for question in held] == ["a1", "b1", "a2", "b2"]
    assert sorted(question.name for question in others) == ["a3", "a4", "a5", "b3", "b4", "b5"]


def test_lines_at_every_mark_and_answers_that_are_kept(tiny_model_dir, tmp_path, capsys):
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"abc{place}", "category": "one"}) + "\n" for place in range(8)))
    drafters = ["recycling:tree=4", "recycling:tree=4,states=true"]
    how = {"data": [str(data)], "drafter": drafters, "texts": tmp_path / "texts", "model": tiny_model_dir}
    how |= {"held_out": 2, "max_new_tokens": 20, "marks": [0, 40]}
    learning.main(**how)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["drafter"] for line in lines] == drafters * 2
    assert lines[0]["read"] == 0
    assert lines[-1]["read"] >= 40
    assert all(line["mat"]["all"] >= 1 for line in lines)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "texts").rglob("*") if path.is_file()}
    learning.main(**how)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "texts").rglob("*") if path.is_file()} == kept
    again = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert again[0] == lines[0]


def test_further_questions_are_read_after_the_others(tiny_model_dir, tmp_path, capsys):
    """And answers are written in the type that is asked for."""
    files = [tmp_path / "questions.jsonl", tmp_path / "further.jsonl"]
    for number, file in enumerate(files):
        rows = ({"prompt": f"{number}abc{place}", "category": "one"} for place in range(4))
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    how = {"data": [str(files[0])], "drafter": ["recycling:tree=4"], "model": tiny_model_dir, "held_out": 2}
    how |= {"max_new_tokens": 20, "marks": [1000], "written_in": "bfloat16"}
    for further, fewest, most in ((None, 1, 40), ([str(files[1])], 41, 120)):
        learning.main(**how, texts=tmp_path / "texts", further=further)
        (line,) = map(json.loads, capsys.readouterr().out.splitlines())
        assert fewest <= line["read"] <= most


@torch.no_grad()
def test_states_that_were_kept_say_what_the_model_says(tmp_path):
    model = tiny.llama(seed=1)
    target, answer = TreeModel(model), learning.Answer("one", [1, 2, 3], [4, 5, 6, 7])
    first, again = (learning.read(target, model, answer, tmp_path) for _ in range(2))
    wanted = model(first.text[None]).logits[0, 2:]
    torch.testing.assert_close(first.logits, wanted, atol=1e-2, rtol=1e-2)
    assert torch.equal(first.states, again.states)
    steps = learning.decode(target, make_drafter("recycling:tree=4,states=true"), first)
    assert 1 <= steps <= 4
