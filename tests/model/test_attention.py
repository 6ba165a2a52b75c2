"""The user's attention implementation is configured, saved, copied and restored, whichever one draft trees use."""

import copy
import json
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support import tiny
from support.architectures import attention_settings
from support.side_by_side import SideBySide
from torch.nn.attention import SDPBackend, sdpa_kernel

import token_recycling as tr

NEW = {"max_new_tokens": 10, "do_sample": False}
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}


def grouped_llama(attention):
    model = tiny.llama(**GROUPED)
    model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize(
    ("kernels", "left"),
    [(SDPBackend.FLASH_ATTENTION, True), ([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], False)],
)
@pytest.mark.falls_back
def test_flash_attention_alone_has_no_masks_on_cuda(kernels, left, monkeypatch):
    """Each call is on a CPU, whose kernels all support masks."""
    both = SideBySide(lambda: grouped_llama("sdpa"))
    if left:
        monkeypatch.setattr(both.accelerated.acceleration.target, "device", torch.device("cuda"))
    with sdpa_kernel(kernels):
        both.assert_same(lambda model: model.generate(tiny.prompt(0, 9), **NEW), "sdpa_kernel" if left else None)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_setting_is_reported_saved_copied_and_restored(attention, tmp_path):
    model, ids = grouped_llama(attention), tiny.prompt(0, 9)
    wanted, own = model.generate(ids, **NEW), attention_settings(model)
    model.save_pretrained(tmp_path / "before")
    tr.accelerate(model, "recycling")
    assert torch.equal(model.generate(ids, **NEW), wanted)
    model.save_pretrained(tmp_path / "after")
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("before", "after"))
    assert attention_settings(model) == own == [attention]
    assert before == after
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert attention_settings(other) == own
        assert torch.equal(other.generate(ids, **NEW), wanted)
    assert attention_settings(tr.decelerate(model)) == own
    assert torch.equal(model.generate(ids, **NEW), wanted)


def test_layers_with_different_numbers_of_key_heads():
    """As in pruned models; all layers share one mask."""
    model, ids = grouped_llama("sdpa"), tiny.prompt(0, 9)
    attention = model.model.layers[1].self_attn
    for name in ("k_proj", "v_proj"):
        own = getattr(attention, name)
        shared = torch.nn.Linear(own.in_features, own.out_features // 2, bias=False)
        shared.weight.data.copy_(own.weight[: own.out_features // 2])
        setattr(attention, name, shared)
    attention.num_key_value_groups = 4
    wanted = model.generate(ids, **NEW)
    assert torch.equal(tr.accelerate(model, "recycling:tree=paper").generate(ids, **NEW), wanted)
    assert model.acceleration.fallback is None


def test_changed_attention_takes_effect_at_the_next_call():
    model, ids = grouped_llama("sdpa"), tiny.prompt(0, 9)
    tr.accelerate(model, "recycling").generate(ids, **NEW)
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        wanted = tr.decelerate(copy.deepcopy(model)).generate(ids, **NEW)
        assert torch.equal(model.generate(ids, **NEW), wanted)
        assert model.acceleration.fallback is None
        assert attention_settings(model) == [attention]


def test_attention_weights_are_returned_as_without_acceleration():
    """Only by eager attention: with another implementation the configuration rejects `output_attentions`."""
    model, ids = grouped_llama("eager"), tiny.prompt(0, 9)
    wanted = model(ids, output_attentions=True).attentions
    tr.accelerate(model, "recycling").generate(ids, **NEW)
    assert all(map(torch.equal, model(ids, output_attentions=True).attentions, wanted))
    model.config.output_attentions = True
    assert all(map(torch.equal, model(ids).attentions, wanted))


def test_other_models_are_unaffected_during_accelerated_calls():
    ours, other, ids = grouped_llama("sdpa"), tiny.llama(seed=5, **GROUPED), tiny.prompt(0, 9)
    wanted, wanted_of_ours = other(ids).logits, ours.generate(ids, **NEW)
    tr.accelerate(ours, "recycling")
    with ThreadPoolExecutor(2) as pool:
        outputs = [pool.submit(ours.generate, ids, **NEW) for _ in range(3)]
        logits = [other(ids).logits for _ in range(6)]
    assert all(torch.equal(one.result(), wanted_of_ours) for one in outputs)
    assert all(torch.equal(one, wanted) for one in logits)
