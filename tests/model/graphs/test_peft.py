"""Replayed steps of a model whose peft adapters are switched, disabled, scaled and merged between calls."""

from contextlib import nullcontext

import peft
import pytest
import torch
from packaging.version import Version
from support import tiny
from support.cases import thinned
from support.runs import decoded, plain
from transformers.integrations.peft import MIN_PEFT_VERSION

pytestmark = pytest.mark.usefixtures("recorded")


@pytest.mark.parametrize("variant", thinned([{}, {"use_dora": True}], 2))
def test_output_follows_adapter_changes(model, variant):
    ids = tiny.prompt(0, 6)
    texts = []

    def compared(within=None):
        with within or nullcontext():
            wanted = plain(model, ids)
            text, stats = decoded(model, ids, "prompt_lookup", max_new_tokens=20)
        assert stats.path.startswith("fast")
        assert text == wanted
        texts.append(text)

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down_proj"], init_lora_weights=False, **variant)
    compared()
    wrapper = peft.get_peft_model(model, config, adapter_name="a").eval()
    compared()
    compared(wrapper.disable_adapter())
    assert texts[2] == texts[0] != texts[1]
    wrapper.add_adapter("b", config)
    wrapper.eval()
    for name in "bab":
        wrapper.set_adapter(name)
        compared()
    assert texts[3] == texts[5] != texts[4] == texts[1]
    for module in model.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(-8.0)
    compared()
    assert texts[6] != texts[5]
    wrapper.merge_adapter(["a"])
    compared()
    wrapper.unmerge_adapter()
    wrapper.delete_adapter("b")
    wrapper.set_adapter("a")
    compared()
    assert texts[8] == texts[1]
    wrapper.merge_and_unload()
    compared()
    assert not any(type(module).__module__.startswith("peft") for module in model.modules())


@pytest.mark.skipif(Version(peft.__version__) < Version(MIN_PEFT_VERSION), reason="transformers needs a later peft")
def test_output_follows_adapters_added_by_transformers(model):
    """`add_adapter` of transformers needs peft, but no wrapper."""
    ids = tiny.prompt(0, 6)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["o_proj"], init_lora_weights=False), "a")
    model.eval()
    texts = []
    for change in (model.disable_adapters, model.enable_adapters, model.disable_adapters, model.enable_adapters):
        change()
        texts.append(decoded(model, ids, "prompt_lookup", max_new_tokens=20)[0])
        assert texts[-1] == plain(model, ids)
    assert texts[0] == texts[2] != texts[1] == texts[3]
