"""Where fast steps hold, and the reason where they do not. Without CUDA they are made alike, but not captured."""

import pytest
import torch
from support import architectures, tiny
from support.drafters import example
from support.runs import decoded

import token_recycling as tr
from token_recycling.cuda_graphs import NoFastPathError
from token_recycling.cuda_graphs import step as step_module
from token_recycling.cuda_graphs.slots import FixedCache
from token_recycling.model.pass_times import pass_times
from token_recycling.model.tree_model import TreeModel

GREEDY = {"do_sample": False}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"repetition_penalty": 1.3, "do_sample": True}, "got RepetitionPenaltyLogitsProcessor"),
        ({"repetition_penalty": 1.3, "do_sample": False}, "got RepetitionPenaltyLogitsProcessor"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
    ],
    ids=str,
)
def test_calls_that_it_does_not_hold_for_say_why(model, arguments, reason):
    tr.accelerate(model, fast=True)
    with pytest.raises(tr.NoFastPathError, match=reason):
        model.generate(tiny.prompt(0, 5), max_new_tokens=5, **arguments)


def test_batches_hidden_states_and_drawn_drafts_are_refused(model, tmp_path):
    batch = torch.cat([tiny.prompt(0, 6), tiny.prompt(1, 6)])
    tr.accelerate(model, fast=True)
    with pytest.raises(tr.NoFastPathError, match="expected one text, got 2"):
        model.generate(batch, max_new_tokens=5, **GREEDY)
    model.generate(batch[:1], max_new_tokens=5, **GREEDY)
    assert model.acceleration.stats.path.startswith("fast")
    (tmp_path / "heads").mkdir()
    medusa = example("medusa", model, tmp_path / "heads")
    with pytest.raises(tr.NoFastPathError, match="hidden states"):
        decoded(model, batch[:1], medusa, max_new_tokens=5)
    tiny.llama(3).save_pretrained(tmp_path)
    tr.accelerate(model, f"draft_model:model={tmp_path},sampled=true,mode=sequence,depth=2", fast=True)
    with pytest.raises(tr.NoFastPathError, match="got one that is drawn"):
        model.generate(batch[:1], max_new_tokens=5, do_sample=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_captured_steps_are_made_only_where_they_are_asked_for(device, monkeypatch):
    """On a card too, which is played here: whoever looked for one would find it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    monkeypatch.setattr("token_recycling.cuda_graphs.captured", None)
    model = tiny.llama()
    made = {
        "accelerate": lambda: tr.accelerate(model, "plain").generate(tiny.prompt(0, 5), max_new_tokens=3),
        "generate": lambda: tr.generate(tiny.llama(), tiny.prompt(0, 5), max_new_tokens=3, drafter="plain"),
        "stream": lambda: list(tr.stream(tiny.llama(), tiny.prompt(0, 5), "plain", max_new_tokens=3)),
    }
    for call in made.values():
        call()
    assert model.acceleration.stats.path == "ordinary"


def test_fast_is_true_or_false(model):
    with pytest.raises(ValueError, match="expected fast to be True or False, got 'auto'"):
        tr.accelerate(model, fast="auto")  # type: ignore[arg-type]


def test_a_drafter_that_draws_without_saying_so_is_refused(model):
    class Drawing(tr.Drafter):
        def draft(self, context):
            flat = torch.full((64,), 1 / 64)
            return tr.Draft(tr.Tree((-1, 0), (0, 0)), torch.cat([context.root, flat.multinomial(1)]), {1: flat})

    assert len(decoded(model, tiny.prompt(0, 4), Drawing(), max_new_tokens=9)[0]) == 9
    with pytest.raises(ValueError, match="declare it in its traits"):
        decoded(model, tiny.prompt(0, 4), Drawing(), max_new_tokens=9, do_sample=True)


def test_check_says_whether_there_is_a_fast_path(model):
    assert tr.check(model).no_fast_path is None
    assert tr.check(model, self_test=True).as_dict()["no_fast_path"] is None
    xglm = architectures.model_of(next(case for case in architectures.SUPPORTED if case.family == "xglm"))
    assert "does not wait for the device" in str(tr.check(xglm, self_test=True).no_fast_path)


def test_costs_are_those_of_the_steps_that_run(model):
    tr.accelerate(model, "recycling", fast=True)
    wanted = tiny.llama().generate(tiny.prompt(0, 20), max_new_tokens=30, **GREEDY)
    assert torch.equal(model.generate(tiny.prompt(0, 20), max_new_tokens=30, **GREEDY), wanted)
    target = TreeModel(model)
    assert pass_times(target, "captured").curve(1, 100).steps > 0
    assert pass_times(target).curve(1, 100).steps == 0


def _all_seen(layers, shape, length, band, dtype):
    return torch.zeros(1, 1, len(shape.parents), band, dtype=dtype)


def _nothing_moved(self, path, count):
    self.shared.length.add_(count)


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [(step_module, "tree_masks", _all_seen), (FixedCache, "commit", _nothing_moved)],
    ids=["mask", "slots"],
)
def test_a_fault_is_found_before_a_text_is_written(model, place, name, fault, monkeypatch):
    """The first steps on a machine are compared with the ordinary way."""
    monkeypatch.setattr(place, name, fault)
    with pytest.raises(NoFastPathError, match="expected the logits of the ordinary way"):
        tr.generate(model, tiny.prompt(0, 6), fast=True, max_new_tokens=4)
