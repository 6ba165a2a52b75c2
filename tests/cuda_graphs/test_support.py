"""Where fast steps hold, and the reason where they do not. Without CUDA they are made alike, but not captured."""

from types import SimpleNamespace

import pytest
import torch
from support import tiny
from support.runs import decoded
from transformers import LogitsProcessor

import token_recycling as tr
from token_recycling.cuda_graphs import NoFastPathError, captured_where_possible, runner_of
from token_recycling.cuda_graphs import step as step_module
from token_recycling.model import tree_model
from token_recycling.model.pass_times import pass_times
from token_recycling.model.tree_model import TreeModel

pytestmark = pytest.mark.measured

GREEDY = {"do_sample": False}


class Unknown(LogitsProcessor):
    """A processor of the caller's own."""

    def __call__(self, input_ids, scores):
        return scores


def test_calls_that_it_does_not_hold_for_say_why(model, tmp_path):
    tr.accelerate(model, fast=True)
    ids = tiny.prompt(0, 5)
    with pytest.raises(tr.NoFastPathError, match="Unknown"):
        model.generate(ids, max_new_tokens=5, logits_processor=[Unknown()])
    with pytest.raises(tr.NoFastPathError, match="32 sequences, got 33"):
        model.generate(ids.repeat(33, 1), max_new_tokens=5, **GREEDY)
    tiny.llama(3).save_pretrained(tmp_path)
    tr.accelerate(model, f"draft_model:model={tmp_path},sampled=true,mode=sequence,depth=2", fast=True)
    with pytest.raises(tr.NoFastPathError, match="samples its drafts"):
        model.generate(ids, max_new_tokens=5, do_sample=True)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 1.4, "output_scores": True, "output_logits": True, "return_dict_in_generate": True},
        {"eos_token_id": [11, 17, 23, 41]},
    ],
    ids=["plain", "penalty", "scores", "ends"],
)
@pytest.mark.parametrize("sequences", [1, 3, 5])
def test_batches_penalties_and_scores_are_those_of_generate(model, sequences, arguments, recorded):
    """From steps that are recorded and replayed; prompts of a batch differ in length."""
    ids = torch.cat([tiny.prompt(seed, 9) for seed in range(sequences)])
    mask = torch.ones_like(ids)
    ids[1:2, :4] = mask[1:2, :4] = 0
    given = {"attention_mask": mask, "max_new_tokens": 30, "pad_token_id": 0, **GREEDY, **arguments}
    wanted, stats = model.generate(ids, **given), tr.Stats()
    for drafter in ("recycling:tree=12", "published"):
        ours = tr.generate(model, ids, drafter=drafter, fast=True, stats=stats, **given)
        assert stats.path.startswith("fast")
        if not isinstance(wanted, torch.Tensor):
            for name in ("scores", "logits"):
                for own, theirs in zip(ours[name], wanted[name], strict=True):
                    torch.testing.assert_close(own, theirs, atol=1e-4, rtol=1e-4)
            assert ours.past_key_values.get_seq_length() == wanted.past_key_values.get_seq_length()
            assert torch.equal(ours.sequences, wanted.sequences)
        else:
            assert torch.equal(ours, wanted)


def test_automatic_steps_are_ordinary_without_cuda(model, monkeypatch):
    monkeypatch.setattr("token_recycling.cuda_graphs._taken", None)
    tr.accelerate(model, "plain").generate(tiny.prompt(0, 5), max_new_tokens=3)
    assert model.acceleration.stats.path == "eager"


def test_automatic_steps_on_cuda_are_captured_or_say_once_why_not(model, monkeypatch, caplog):
    """On a card that is played: the model says that it is there."""
    target = TreeModel(model)
    runner = runner_of(target)
    monkeypatch.setattr("token_recycling.cuda_graphs.support.runner_or_reason", lambda _: runner)
    steppings = []
    sequences, selectors, drafter = [1], [SimpleNamespace(processors=(), sample=False)], tr.make_drafter("plain")
    played = SimpleNamespace(device=torch.device("cuda"), kept=target.kept)
    with captured_where_possible(played, sequences, selectors, drafter, target.new_cache()) as stepping:
        steppings.append(stepping.kind)
        with captured_where_possible(played, sequences, selectors, drafter, target.new_cache()) as within:
            steppings.append(within.kind)  # one call of a model at a time
    assert steppings == ["captured", ""]
    selectors[0].processors = (Unknown(),)
    for _ in range(2):
        with captured_where_possible(played, sequences, selectors, drafter, target.new_cache()) as stepping:
            assert stepping.kind == ""
    assert [record.message.count("Unknown") for record in caplog.records] == [1]


def test_wrong_use_is_refused(model):
    with pytest.raises(ValueError, match="always"):
        tr.accelerate(model, fast="always")  # type: ignore[arg-type]
    assert tr.check(model, self_test=True).as_dict()["no_fast_path"] is None

    class Drawing(tr.Drafter):
        def draft(self, context):
            flat = torch.full((64,), 1 / 64)
            return tr.Draft(tr.Tree((-1, 0), (0, 0)), torch.cat([context.root, flat.multinomial(1)]), {1: flat})

    assert len(decoded(model, tiny.prompt(0, 4), Drawing(), max_new_tokens=9)[0]) == 9
    with pytest.raises(ValueError, match="declare it in its traits"):
        decoded(model, tiny.prompt(0, 4), Drawing(), max_new_tokens=9, do_sample=True)


def test_costs_are_those_of_the_steps_that_run(model):
    tr.accelerate(model, "recycling", fast=True)
    wanted = tiny.llama().generate(tiny.prompt(0, 20), max_new_tokens=30, **GREEDY)
    assert torch.equal(model.generate(tiny.prompt(0, 20), max_new_tokens=30, **GREEDY), wanted)
    target = TreeModel(model)
    assert pass_times(target, "captured").curve(1, 100).steps > 0
    assert pass_times(target).curve(1, 100).steps == 0


def _all_seen(layers, trees, start, band, dtype):
    return torch.zeros(1, 1, trees.tokens.shape[1], band, dtype=dtype)


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [(tree_model, "tree_masks", _all_seen), (step_module, "_move", lambda *given: None)],
    ids=["mask", "slots"],
)
def test_a_fault_is_found_before_a_text_is_written(model, place, name, fault, monkeypatch):
    """The first steps on a machine are compared with the ordinary way."""
    monkeypatch.setattr(place, name, fault)
    with pytest.raises(NoFastPathError, match="logits"):
        tr.generate(model, tiny.prompt(0, 6), fast=True, max_new_tokens=4)
