"""`token-recycling compare`, and how steps are told apart in a text."""

from itertools import chain

import pytest
import torch
from support import benching
from support.commandline import PROMPT, reference, run, run_json

from token_recycling._util.text_stream import IncrementalText, decoded, pieces
from token_recycling.cli.console import TINTS, by_step

FIXED = ("--drafter", "recycling:tree=8")
"""A tree whose size does not depend on the machine."""


@pytest.fixture
def prompt_folder(tmp_path):
    for name, text in (("b.py", "import os\n"), ("a.py", f"{PROMPT}\n"), (".hidden", "no"), ("c.py", "class A:\n")):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_compare_prints_both_and_a_summary(tiny_model_dir, prompt_folder):
    result = run("compare", tiny_model_dir, "--prompts", prompt_folder, "--max-new-tokens", 30, "--limit", 2)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[-1] == "identical: yes"
    assert any(line.startswith("1 of 2: a.py") for line in lines)
    assert any(line.startswith("2 of 2: b.py") for line in lines)
    assert "c.py" not in result.stdout
    for word in ("speedup:", "MAT:", "plain:", "recycled:"):
        assert any(line.startswith(word) for line in lines)


def test_compare_as_json(loaded, tiny_model_dir, prompt_folder):
    found = run_json("compare", tiny_model_dir, "--prompts", prompt_folder, "--max-new-tokens", 30)
    assert [row["name"] for row in found["prompts"]] == ["a.py", "b.py", "c.py"]
    first = found["prompts"][0]
    assert list(chain.from_iterable(first["steps"])) == reference(loaded, PROMPT, max_new_tokens=30, do_sample=False)
    assert first["identical"]
    assert first["divergence"] is None
    assert first["stats"]["steps"] == len(first["steps"])
    summary = found["summary"]
    tokens = sum(row["recycled"]["tokens"] for row in found["prompts"])
    assert summary["mat"] == pytest.approx(tokens / sum(row["stats"]["steps"] for row in found["prompts"]))
    seconds = [sum(row[side]["seconds"] for row in found["prompts"]) for side in ("plain", "recycled")]
    assert summary["speedup"] == pytest.approx(seconds[0] / seconds[1])
    assert summary["identical"] is True
    assert summary["prompts"] == 3


def test_compare_starts_cold_and_stays_hot(tiny_model_dir):
    once, again = run_json("compare", tiny_model_dir, PROMPT, PROMPT, "--max-new-tokens", 40, *FIXED)["prompts"]
    cold = run_json("generate", tiny_model_dir, PROMPT, "--max-new-tokens", 40, *FIXED)["stats"]["steps"]
    assert once["stats"]["steps"] == cold
    assert again["stats"]["steps"] < cold


def test_compare_tells_where_texts_part(loaded, tiny_model_dir, monkeypatch):
    benching.plant_a_fault(monkeypatch)
    plain = reference(loaded, PROMPT, max_new_tokens=10, do_sample=False)
    position = next(place for place, token in enumerate(plain) if token != 65)
    found = run_json("compare", tiny_model_dir, PROMPT, "--max-new-tokens", 10, status=1)
    divergence = found["prompts"][0]["divergence"]
    ids = torch.tensor([loaded.tokenizer(PROMPT)["input_ids"] + plain[:position]])
    best = loaded.model(ids).logits[0, -1].detach().topk(2).values
    assert (divergence["position"], divergence["plain"], divergence["recycled"]) == (position, plain[position], 65)
    assert divergence["margin"] == pytest.approx(float(best[0] - best[1]), abs=1e-4)
    assert found["summary"]["identical"] is False
    text = run("compare", tiny_model_dir, PROMPT, "--max-new-tokens", 10)
    assert text.exit_code == 1
    assert "differs: token" in text.stdout
    assert text.stdout.splitlines()[-1] == "identical: no"


def test_steps_can_be_told_apart_with_and_without_colours():
    assert by_step(["a", "b", "c"], colours=False).plain == "a▏b▏c"
    tinted = by_step(["a", "b", "c"], colours=True)
    assert tinted.plain == "abc"
    assert [str(span.style) for span in tinted.spans] == [TINTS[0], TINTS[1], TINTS[0]]


@pytest.mark.parametrize("text", ["naïve 日本語 🙂!", "plain", "", "ends inside \N{SNOWMAN}"])
def test_pieces_hold_back_parts_of_characters(loaded, text):
    tokens = loaded.tokenizer(text)["input_ids"]
    if text.endswith("\N{SNOWMAN}"):
        tokens = tokens[:-1]
    found = pieces(loaded.tokenizer, [[token] for token in tokens])
    assert len(found) == len(tokens)
    assert "".join(found) == decoded(loaded.tokenizer, tokens)
    shown = IncrementalText(loaded.tokenizer)
    assert all("\N{REPLACEMENT CHARACTER}" not in shown.push([token]) for token in tokens)
