"""A long run in miniature: texts decoded from logits that are known already, and what is printed of them."""

import json
import sys
from pathlib import Path

import pytest
import torch
from support import runs, tiny

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import long_run
from token_recycling import make_drafter
from token_recycling.bench.run.replay import replay
from token_recycling.model.tree_model import TreeModel


@pytest.mark.parametrize("drafter", ["suffix", "prompt_lookup", "plain"])
def test_steps_are_those_of_a_replay(drafter):
    """Of drafters that learn from the text alone."""
    model = tiny.llama(seed=1)
    prompt, following = torch.tensor([1, 2, 3, 4, 1, 2]), torch.tensor([3, 4, 1, 5, 1, 2, 3, 4, 1, 2, 3])
    text = torch.cat([prompt, following])
    begun = runs.begun(make_drafter(drafter), prompt, TreeModel(model))
    logits = model(text[None]).logits[0, len(prompt) - 1 :]
    assert (
        long_run.follow(begun, text, len(prompt), logits)
        == replay(model, make_drafter(drafter), prompt, following).steps
    )


def test_the_tokens_of_the_text_teach():
    """The counting model says the next number after each: the second time a text is known."""
    model, drafter = tiny.counting_llama(64), make_drafter("recycling:tree=8,suffix=false,past=0")
    text = torch.arange(2, 40)
    logits = model(text[None]).logits[0, 1:]
    cold, hot = (long_run.follow(runs.begun(drafter, text[:2], TreeModel(model)), text, 2, logits) for _ in range(2))
    assert hot < cold / 2


def test_every_drafter_has_a_line_after_each_quarter(tiny_model_dir, tmp_path, capsys):
    for place in range(6):
        (tmp_path / f"{place}.txt").write_text("abcd" * (5 + place))
    drafters = ["plain", "prompt_lookup"]
    long_run.main(data=[str(tmp_path)], drafter=drafters, model=tiny_model_dir, max_new_tokens=16, tokens=60)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["drafter"] for line in lines] == drafters * 4
    assert lines[-1]["tokens"] == 60
    assert lines[-2]["mat"] == [1.0] * 4
    assert all(mat > 1 for mat in lines[-1]["mat"])
