"""The oracle of SpecDec++ in the benchmark, by a worked example."""

from pathlib import Path

import pytest
import torch
from support import tiny
from support.benching import decoded

from token_recycling.bench.run.methods import Oracle, parse

THREE = torch.tensor([[3]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A draft model of the counting one that says 0 after 5 and after 9."""
    model, where = tiny.counting_llama(), tmp_path_factory.mktemp("draft")
    with torch.no_grad():
        model.lm_head.weight[0, 5] = model.lm_head.weight[0, 9] = 9.0
    model.save_pretrained(where)
    return str(where)


def test_the_oracle_drafts_up_to_the_first_disagreement(counting, folder):
    """The text is 4 5 | 6 7 8 9 | 10 ... 15 0 1 | end. After 5 and 9 the target's own token ends a step: 3, 4 and 8."""
    found = decoded(f"oracle:model={folder}", counting, THREE, tokens=15)
    assert found.tokens == [[*range(4, 16), 0, 1, 2]]
    assert found.lengths == [3, 4, 8]
    assert found.stats is not None
    assert (found.stats.drafted, found.stats.discarded) == (2 + 3 + 7, 0)
    assert found.stats.discard_rate == 0
    assert found.stats.verification_rate == pytest.approx(3 / 15)  # two disagreements, and the end of the text
    assert found.stats.drafter_statistics["draft_forwards"] == found.stats.drafted
    assert (
        found.stats.drafter == f"oracle: {Path(folder).name}, as many tokens as will be accepted, deterministic drafts"
    )


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_no_fixed_length_does_better(counting, folder, depth):
    fixed = decoded(f"draft_model:mode=sequence,model={folder},depth={depth}", counting, THREE, tokens=15).stats
    oracle = decoded(f"oracle:model={folder}", counting, THREE, tokens=15).stats
    assert fixed is not None
    assert oracle is not None
    assert oracle.discard_rate <= fixed.discard_rate
    assert oracle.verification_rate <= fixed.verification_rate


def test_the_oracle_replays_a_text(counting, folder):
    """The text jumps after 7, where the draft model would count on."""
    text = torch.tensor([4, 5, 6, 7, 12, 13, 14])
    found = Oracle("", folder).runner(counting).replay(torch.tensor([3]), text)
    assert (found.tokens, found.lengths) == ([text.tolist()], [3, 2, 2])
    assert found.stats is not None
    assert found.stats.discarded == 0


def test_a_model_that_never_agrees_drafts_nothing(model, tmp_path):
    other = tiny.llama()
    with torch.no_grad():
        other.lm_head.weight.neg_()
    other.save_pretrained(tmp_path)
    assert decoded(f"oracle:model={tmp_path}", model, THREE, tokens=8).lengths == [1] * 8


def test_the_future_of_drawn_texts_is_not_known(counting, folder):
    with pytest.raises(ValueError, match="needs greedy decoding, got sampling"):
        decoded(f"oracle:model={folder}", counting, THREE, tokens=8, do_sample=True)
    with pytest.raises(ValueError, match="oracle:model=FOLDER"):
        parse("oracle")
    with pytest.raises(ValueError, match="oracle has no option 'n'; its options: model"):
        parse("oracle:model=x,n=3")
