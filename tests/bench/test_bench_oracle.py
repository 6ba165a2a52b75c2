"""The oracle of SpecDec++ in the benchmark, by a worked example, and the study of when to stop drafting."""

import re
from pathlib import Path

import pytest
import torch
from support import benching, tiny
from support.benching import decoded

from token_recycling.bench.report import page
from token_recycling.bench.run import studies
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
    with pytest.raises(ValueError, match="expected greedy decoding, got sampling"):
        decoded(f"oracle:model={folder}", counting, THREE, tokens=8, do_sample=True)
    with pytest.raises(ValueError, match="expected oracle:model=FOLDER"):
        parse("oracle")
    with pytest.raises(ValueError, match="expected an option of oracle: model; got 'n'"):
        parse("oracle:model=x,n=3")


def test_the_study_of_when_to_stop():
    methods = ["specdec_pp:threshold=0.3,model=x,max_length=9"]
    made = benching.plan(methods, benching.questions(2), studies=["specdec-pp"])
    for workload in made.workloads:
        specs = {one.point: one.method.spec for one in workload.entries}
        assert {specs[f"length {length}"] for length in studies.FIXED_LENGTHS} == {"draft_model:mode=sequence,model=x"}
        assert {specs[f"h = {value:g}"] for value in studies.THRESHOLDS} == {"specdec_pp:model=x,max_length=9"}
        assert specs["oracle"] == "oracle:model=x"
        assert specs[None] == ("generate" if workload.mode == "generate" else "plain")
    with pytest.raises(ValueError, match=r"specdec_pp:model=FOLDER for the study specdec-pp, .* got suffix"):
        benching.plan(["suffix"], benching.questions(1), studies=["specdec-pp"])


def test_the_study_is_measured_and_drawn(tmp_path, monkeypatch):
    """A draft model with a head beside it: the report has its rates and the plot."""
    from token_recycling.drafters.specdec_pp.head import AcceptanceHead, save_head
    from token_recycling.model.inspection import output_width

    monkeypatch.setattr(studies, "THRESHOLDS", (0.3, 0.7))
    monkeypatch.setattr(studies, "FIXED_LENGTHS", (1, 3))
    where = benching.setup(max_new_tokens=10)
    where.model.save_pretrained(tmp_path / "draft")
    head = AcceptanceHead(output_width(where.model), 1)
    head.reset()
    save_head(tmp_path / "draft" / "specdec_pp", head, where.model, {})
    methods = [f"specdec_pp:model={tmp_path / 'draft'}"]
    made = benching.plan(methods, benching.questions(2), True, studies=["specdec-pp"])
    found = benching.run(where, made, tmp_path / "rows")
    assert [row["failure"] for row in found] == [None] * len(found)
    assert all(row["identical"] in (True, None) for row in found)
    generated = [row for row in found if row["mode"] == "generate" and row["drafted"]]
    lengths = {row["point"]: row["drafted"] / row["steps"] for row in generated}
    assert lengths["length 1"] < lengths["length 3"]
    page.write(tmp_path / "rows")
    text = (tmp_path / "rows" / "report.md").read_text()
    assert re.search(r"discard rate \| +verification rate \|", text)
    assert "When to stop drafting" in text
    assert (tmp_path / "rows" / "plots" / "study_specdec-pp_generate.svg").is_file()
