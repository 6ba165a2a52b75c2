"""On a card: switched adapters, changed weights, moved models, and weights placed by a device map."""

from typing import Any

import peft
import pytest
import torch
from support import tiny
from support.batches import batch
from support.on_device import check_path, check_same, moved
from transformers import LlamaForCausalLM

import token_recycling as tr

pytestmark = pytest.mark.cuda

GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}


class Compared:
    """Compare a model's accelerated output with that of `generate` at every call."""

    def __init__(self, model, device):
        self.model, self.device = model, device
        self.drafter = tr.make_drafter("recycling:tree=paper")

    def __call__(self):
        given = {"input_ids": tiny.prompt(0, 6).to(self.device)}
        wanted, stats = self.model.generate(**given, **GREEDY), tr.Stats()
        how = {"drafter": self.drafter, "fast": True, "stats": stats, **GREEDY}
        check_same(self.model, given, tr.generate(self.model, **given, **how), wanted)
        check_path(stats, self.device)
        return wanted[0].tolist()


@pytest.mark.parametrize("variant", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_output_follows_adapter_changes(model, device, variant):
    compared = Compared(model.to(device), device)
    texts = [compared()]
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down_proj"], init_lora_weights=False, **variant)
    wrapper = peft.get_peft_model(model, config, adapter_name="a").eval()
    wrapper.add_adapter("b", config)
    wrapper.eval().to(device)
    for name in "abab":
        wrapper.set_adapter(name)
        texts.append(compared())
    with wrapper.disable_adapter():
        texts.append(compared())
    assert texts[0] == texts[5] != texts[1] == texts[3] != texts[2] == texts[4]
    wrapper.set_adapter("a")
    wrapper.merge_adapter(["a"])
    compared()
    wrapper.unmerge_adapter()
    wrapper.unload()
    assert compared() == texts[0]


def test_changed_weights_take_effect(model, device):
    compared = Compared(model.to(device), device)
    texts = [compared()]
    with torch.no_grad():
        model.lm_head.weight.data = model.lm_head.weight.flip(0).clone()
    texts.append(compared())
    model.load_state_dict(tiny.llama(seed=5).state_dict())
    texts.append(compared())
    assert len(set(map(tuple, texts))) == 3


def test_model_moves_between_devices_and_dtypes(model, device):
    text = Compared(model.to(device), device)()
    assert Compared(model.to("cpu"), torch.device("cpu")).model.device.type == "cpu"
    assert tr.generate(model, tiny.prompt(0, 6), **GREEDY)[0].tolist() == text
    Compared(model.to(device, torch.bfloat16), device)()
    Compared(model.to(torch.float16), device)()


PLACES = {
    "all on one device": lambda device: {"": device},
    "a layer on the host": lambda device: {**dict.fromkeys(tiny.PARTS, device), "model.layers.1": "cpu"},
    "a layer on disk": lambda device: {**dict.fromkeys(tiny.PARTS, device), "model.layers.0": "disk"},
}


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES.keys())
def test_weights_placed_by_a_device_map(device, places, tmp_path):
    tiny.llama().save_pretrained(tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(
        tmp_path / "model",
        device_map=places(0 if device.type == "cuda" else "cpu"),
        offload_folder=str(tmp_path / "off"),
        dtype=torch.float32,
    )
    model.generation_config.pad_token_id = 0
    for given in ({"input_ids": tiny.prompt(0, 8)}, batch([5, 9, 3], 1)):
        placed = moved(given, device)
        wanted = model.generate(**placed, **GREEDY)
        for drafter in ("recycling", "published", "draft_model"):
            made = tr.make_drafter(drafter, **({"model": model} if drafter == "draft_model" else {}))
            check_same(model, placed, tr.generate(model, **placed, drafter=made, **GREEDY), wanted)


def test_prompts_on_the_host(model, device):
    ids = tiny.prompt(0, 8)
    wanted = model.to(device).generate(ids.to(device), **GREEDY)
    ours = tr.generate(model, ids, **GREEDY)
    assert ours.device == ids.device
    check_same(model, {"input_ids": ids.to(device)}, ours.to(device), wanted)
