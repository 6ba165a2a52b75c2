"""SpecDec++: the length of drafts computed by hand, saved heads, and refused heads."""

import json
import math

import pytest
import torch
from support import tiny
from support.tiny import related
from transformers import LlamaForCausalLM

import token_recycling as tr
from token_recycling.drafters._shared.saved import TrainedPartError
from token_recycling.drafters.specdec_pp import AcceptanceHead, load_head, save_head
from token_recycling.model.hidden import output_width


def head_with(model, probabilities, otherwise=0.999):
    """A head for a counting model, whose state after a token is 4 at its index: these probabilities by token."""
    head = AcceptanceHead(output_width(model), depth=0)
    with torch.no_grad():
        for token in range(head.width):
            chance = probabilities.get(token, otherwise)
            head.output.weight[0, token] = math.log(chance / (1 - chance)) / 4
    return head


def first_step(model, start, **options):
    """Return the first step after token `start`, with a counting model that drafts for itself."""
    drafter, stats = tr.make_drafter("specdec_pp", model=model, **options), tr.Stats()
    step = next(iter(tr.stream(model, torch.tensor([start]), drafter, max_new_tokens=13, stats=stats)))
    return step, stats


def test_drafting_stops_when_the_rejection_probability_exceeds_the_threshold(counting):
    """3 is followed by 4, 5, 6, 7: all accepted with 0.9, 0.72, 0.648, 0.324. The last token is kept."""
    head = head_with(counting, {4: 0.9, 5: 0.8, 6: 0.9, 7: 0.5})
    for threshold, length in ((0.09, 2), (0.27, 2), (0.29, 3), (0.36, 4), (0.67, 4)):
        step, stats = first_step(counting, 3, head=head, threshold=threshold)
        assert step.draft.tokens.tolist() == list(range(3, 4 + length))
        assert stats.drafter_statistics["draft_forwards"] == length + 1  # one for the root and one for every token
        assert stats.drafter_statistics["stopped_by_head"] == 1
        assert step.tokens == list(range(4, 5 + length))


def test_bounds_of_the_draft_length(counting):
    head = head_with(counting, {4: 0.1})
    for least in (1, 2, 5):
        assert len(first_step(counting, 3, head=head, min_length=least)[0].draft) == 1 + least
    for most in (1, 3, 7):
        step, stats = first_step(counting, 3, head=head_with(counting, {}), min_length=1, max_length=most)
        assert len(step.draft) == 1 + most
        assert stats.drafter_statistics["draft_forwards"] == most  # the last token is not judged
        assert stats.drafter_statistics["stopped_by_head"] == 0
    assert len(first_step(counting, 3, head=head, max_length=20, threshold=1.0)[0].draft) == 13  # the end of the output


# files


def save_new_head(folder, model):
    head = AcceptanceHead(output_width(model), 2)
    head.reset()
    save_head(folder, head, model, {"threshold": 0.5})
    return head


def test_saved_head_is_found_next_to_the_draft_model(model, tmp_path):
    related(model).save_pretrained(tmp_path)
    draft = LlamaForCausalLM.from_pretrained(tmp_path)
    wanted, states = save_new_head(tmp_path / "specdec_pp", draft), torch.randn(5, 32)
    torch.testing.assert_close(load_head(tmp_path / "specdec_pp", draft)(states), wanted(states))
    for options in ({}, {"head": str(tmp_path / "specdec_pp")}):
        drafter, stats = tr.make_drafter(f"specdec_pp:model={tmp_path}", **options), tr.Stats()
        tr.generate(model, tiny.prompt(0, 5), drafter=drafter, stats=stats, max_new_tokens=4)
        assert stats.drafter_statistics["draft_forwards"]
    half, stats = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16), tr.Stats()
    tr.generate(
        half, tiny.prompt(0, 5), drafter=tr.make_drafter("specdec_pp", model=half), stats=stats, max_new_tokens=9
    )
    assert stats.mat > 2, "a head in 32 bits reads states in 16"


def test_head_that_does_not_fit_is_refused(model, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"specdec_pp.json .*specdec_pp.safetensors.*train specdec-pp"):
        load_head(tmp_path, model)
    save_new_head(tmp_path, model)
    path = tmp_path / "specdec_pp.json"
    facts, tuned = json.loads(path.read_text()), tiny.llama()
    torch._foreach_mul_([weight.data for weight in tuned.parameters()], 1.05)
    for draft, change, said in (
        (tiny.llama(5), {}, "another model"),
        (tuned, {}, "another model"),
        (tiny.llama(0, hidden_size=16), {}, "got 16"),
        (model, {"depth": 3}, "3 blocks"),
        (model, {"depth": -1}, "and -1"),
        (model, {"width": 8}, "got 8 and 2"),
    ):
        path.write_text(json.dumps({**facts, **change}))
        with pytest.raises(TrainedPartError, match=said):
            load_head(tmp_path, draft)
    for head, said in ((AcceptanceHead(8, 1), "hidden size, 32, got 8"), (None, "specdec_pp:head=FOLDER")):
        drafter = tr.make_drafter("specdec_pp", model=model, head=head)
        with pytest.raises(ValueError, match=said):
            tr.generate(model, tiny.prompt(0, 4), drafter=drafter, max_new_tokens=4)
