"""Where captured passes are supported, and the reason where not. Without CUDA the passes run without being captured."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from support import tiny
from support.architectures import model_of, named
from support.cases import thinned
from support.recurrent_architectures import recurrent
from transformers import DynamicCache, LogitsProcessor

import token_recycling as tr
from token_recycling.model.backend import Backend, NoFastPathError
from token_recycling.model.graphs.passes import CapturedPasses
from token_recycling.model.graphs.support import passes_or_reason
from token_recycling.model.kv_cache import TreeCache
from token_recycling.model.pass_times import pass_times
from token_recycling.model.target import Target

pytestmark = pytest.mark.measured

GREEDY = {"do_sample": False}


class Unknown(LogitsProcessor):
    """A custom processor."""

    def __call__(self, input_ids, scores):
        return scores


MODELS = {
    "was not tested": lambda: tiny.unknown(tiny.llama()),
    "has ALiBi": lambda: model_of(named("bloom")),
    "recurrent layers": lambda: model_of(recurrent("bamba")),
    "computes differently by length": lambda: model_of(named("llama", "dynamic rotary scaling from 32")),
}
"""Models whose passes cannot be captured, by the reason."""


@pytest.mark.parametrize("reason", MODELS)
def test_unsupported_models_give_the_reason(reason):
    model = MODELS[reason]()
    assert reason in str(tr.check(model).no_fast_path)
    with pytest.raises(tr.NoFastPathError, match=reason):
        tr.generate(model, tiny.prompt(0, 5), fast=True, max_new_tokens=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_captured_passes_with_wrong_logits_are_refused(dtype, monkeypatch):
    """The logits are averaged with those of the next node."""
    forward = CapturedPasses.forward

    def mixed(*arguments):
        result = forward(*arguments)
        return result._replace(logits=result.logits.lerp(result.logits.roll(1, 1), 0.5))

    how = {"input_ids": tiny.prompt(0, 5), "fast": True, "max_new_tokens": 2}
    tr.generate(tiny.llama().to(dtype), **how)
    monkeypatch.setattr(CapturedPasses, "forward", mixed)
    with pytest.raises(tr.NoFastPathError, match="logits of captured and eager passes differ"):
        tr.generate(tiny.llama().to(dtype), **how)


@pytest.fixture
def offloaded_caches(monkeypatch):
    """Allow offloaded caches without a card, also with a CUDA build of torch."""
    monkeypatch.setattr(torch, "Stream", SimpleNamespace)


@pytest.mark.usefixtures("offloaded_caches")
def test_unsupported_calls_give_the_reason(model):
    ids = tiny.prompt(0, 5)
    tr.accelerate(model, fast=True, reproducible=True)
    with pytest.raises(tr.NoFastPathError, match="reproducible"):
        model.generate(ids, max_new_tokens=5)
    tr.accelerate(model, fast=True)
    with pytest.raises(tr.NoFastPathError, match="offloaded"):
        model.generate(ids, max_new_tokens=5, cache_implementation="offloaded")


@pytest.mark.parametrize(("sequences", "sampled"), thinned([(1, False), (1, True), (33, False), (33, True)]))
def test_custom_processors_and_sampled_drafts_are_supported(model, sequences, sampled, tmp_path, recorded):
    """In batches of any size."""
    tiny.llama(3).save_pretrained(tmp_path)
    drafter = f"draft_model:model={tmp_path},sampled={sampled},mode=sequence,depth=2"
    ids, stats = torch.cat([tiny.prompt(seed, 6) for seed in range(sequences)]), tr.Stats()
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "no_repeat_ngram_size": 2, "pad_token_id": 0}
    if sequences == 1:
        how["logits_processor"] = [Unknown()]
    wanted = model.generate(ids, do_sample=False, **how)
    ours = tr.generate(model, ids, drafter=drafter, fast=True, stats=stats, do_sample=sampled, **how)
    assert stats.path.startswith("fast")
    assert sampled or torch.equal(ours, wanted)


ARGUMENTS = [
    {},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 1.4, "output_scores": True, "output_logits": True, "return_dict_in_generate": True},
    {"eos_token_id": [11, 17, 23, 41]},
]


@pytest.mark.parametrize(("sequences", "arguments"), thinned(product([1, 3, 5], ARGUMENTS)))
def test_batches_penalties_and_scores_equal_generate(model, sequences, arguments, recorded):
    """With recorded and replayed steps; prompts of a batch differ in length."""
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


def test_changed_model_still_uses_captured_passes(model, recorded):
    tr.accelerate(model, "recycling:tree=8", fast=True)
    for change in (model.eval, model.double, model.float):
        change()
        model.generate(tiny.prompt(0, 5), max_new_tokens=4, **GREEDY)
        assert model.acceleration.stats.path.startswith("fast")


def test_auto_is_eager_without_cuda(model, monkeypatch):
    monkeypatch.setattr("token_recycling.model.graphs.support.passes_or_reason", None)
    tr.accelerate(model, "plain").generate(tiny.prompt(0, 5), max_new_tokens=3)
    assert model.acceleration.stats.path == "eager"


@pytest.mark.usefixtures("offloaded_caches")
def test_auto_on_cuda_captures_or_warns_once(model, monkeypatch, caplog):
    """On a simulated card: the target reports the device `cuda`."""
    target = Target(model)
    passes = passes_or_reason(target)
    monkeypatch.setattr("token_recycling.model.graphs.support.passes_or_reason", lambda _: passes)
    on_cuda = SimpleNamespace(device=torch.device("cuda"), facts=target.facts)
    backend = Backend("auto")
    assert backend.acquire(on_cuda, target.new_cache()) is passes
    assert backend.acquire(on_cuda, target.new_cache()) is None, "one call of a model at a time"
    passes.release()
    offloaded = TreeCache(DynamicCache(offloading=True))
    for _ in range(2):
        assert backend.acquire(on_cuda, offloaded) is None
    assert sum("offloaded" in record.message for record in caplog.records) == 1


def test_invalid_fast_option_is_refused(model):
    with pytest.raises(ValueError, match="always"):
        tr.accelerate(model, fast="always")  # type: ignore[arg-type]
    assert tr.check(model, self_test=True).as_dict()["no_fast_path"] is None


def test_pass_times_of_captured_and_eager_passes_are_separate(model):
    tr.accelerate(model, "recycling", fast=True)
    wanted = tiny.llama().generate(tiny.prompt(0, 20), max_new_tokens=30, **GREEDY)
    assert torch.equal(model.generate(tiny.prompt(0, 20), max_new_tokens=30, **GREEDY), wanted)
    target = Target(model)
    assert pass_times(target, "captured").curve(1, 100).steps > 0
    assert pass_times(target).curve(1, 100).steps == 0


def test_wrong_masks_are_found_before_a_token_is_emitted(model, monkeypatch):
    """The first captured passes on a machine are compared with eager ones. Here every node sees every slot."""

    def no_masks(layers, trees, band, dtype):
        return torch.zeros(1, 1, trees.tokens.shape[1], band, dtype=dtype)

    monkeypatch.setattr("token_recycling.model.frames.tree_masks", no_masks)
    with pytest.raises(NoFastPathError, match="logits"):
        tr.generate(model, tiny.prompt(0, 6), fast=True, max_new_tokens=4)
