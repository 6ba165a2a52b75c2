"""The benchmark of answers of a given form: how near tokens are where texts part, and its report."""

import json

import pytest
import torch
from support import tiny

from benchmarks.structured.report import markdown
from benchmarks.structured.ties import Ties


def test_margins_are_those_of_the_two_tokens(tmp_path):
    model = tiny.llama()
    model.save_pretrained(tmp_path)
    prompt = torch.tensor([[3, 17, 42, 5]])
    said = model.generate(
        prompt, max_new_tokens=9, do_sample=False, output_logits=True, return_dict_in_generate=True, eos_token_id=None
    )
    ours = said.sequences.clone()
    ours[0, 7:] = (ours[0, 7:] + 1) % 64
    found = Ties(tmp_path, "float32").parting(said.sequences, ours, torch.cat(said.logits))
    theirs, other = int(said.sequences[0, 7]), int(ours[0, 7])
    assert (found["place"], found["tokens"]) == (3, [theirs, other])
    margin = float(said.logits[3][0, theirs] - said.logits[3][0, other])
    assert found["margin"] == pytest.approx(margin) == pytest.approx(found["exact"], abs=1e-4)
    assert margin > 0
    assert found["error"] < 1e-4


def test_margins_are_wrong_by_as_much_as_the_logits(tmp_path):
    model = tiny.llama()
    model.save_pretrained(tmp_path)
    text = torch.arange(6)[None]
    with torch.no_grad():
        logits = model(text).logits[0, 1:-1]
    likeliest = logits[0].argmax()
    logits[0, likeliest] += 2
    logits[1] = torch.where(torch.arange(64) == 3, 1.0, -torch.inf)  # no choice: no error either
    other = torch.tensor([[0, 1, 63, 3, 4, 5]])
    found = Ties(tmp_path, "float32").parting(text, other, logits)
    assert found["place"] == 0
    assert found["error"] == pytest.approx(2 / 3**0.5, abs=1e-4)


def test_the_report_says_where_texts_part(tmp_path):
    row = {"kind": "schemas", "case": "person", "seconds": 2.0, "tokens": 8, "steps": 8, "ended": True, "text": ""}
    parting = {"place": 4, "tokens": ["a|", "b"], "margin": 0.125, "exact": -0.01, "error": 0.1, "logits": [1, 1]}
    ours = {
        "way": "new",
        "same": False,
        "parting": parting,
        "steps": 2,
        "forward": 1.0,
        "drafting": 0.05,
        "masks": 0.01,
    }
    rows = [{**row, "way": "generate", "same": True}, {**row, "seconds": 1.0, **ours}]
    (tmp_path / "bfloat16.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said = markdown(tmp_path)
    assert "| person | 8 | no | 4.00 | 2.00 |" in said
    assert '| person | new | 5 | `"a\\|"` or `"b"` | 0.125 | -0.010 | 0.100 |' in said
