"""Libraries that call the model or its server, beyond the blocks of docs/ecosystem.md; and examples with them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import token_recycling as tr

ROOT = Path(__file__).parents[2]
PROMPT = "class Stack:\n    def __init__(self, limit):\n        "


def test_peft_wrapper_is_refused_and_the_error_names_its_model(fresh):
    peft = pytest.importorskip("peft")
    wrapper = peft.get_peft_model(fresh(), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(tr.UnsupportedModelError, match=r"pass the LlamaForCausalLM in its \.base_model\.model"):
        tr.accelerate(wrapper)


def test_adapters_can_be_added_to_an_accelerated_model(fresh, shipped):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=8, lora_alpha=64, target_modules=["q_proj"], init_lora_weights=False)
    model = tr.accelerate(fresh())
    wrapper = peft.get_peft_model(model, config)
    inputs = shipped[1](PROMPT, return_tensors="pt")
    found = wrapper.generate(**inputs, max_new_tokens=40, do_sample=False)
    assert model.acceleration.stats.mat > 1
    tr.decelerate(model)
    assert torch.equal(found, wrapper.generate(**inputs, max_new_tokens=40, do_sample=False))


def test_gradio_chat_is_streamed(fresh, shipped, monkeypatch):
    client = pytest.importorskip("gradio_client")
    monkeypatch.syspath_prepend(ROOT / "examples")
    from chat_interface import interface

    chat = interface(tr.accelerate(fresh()), shipped[1], max_new_tokens=40, do_sample=False)
    _, url, _ = chat.launch(prevent_thread_lock=True, quiet=True)
    try:
        answer = client.Client(url, verbose=False).submit(PROMPT, api_name="/answer")
        whole = answer.result()
        parts = answer.outputs()
    finally:
        chat.close()
    assert len(parts) > 2
    assert all(whole.startswith(part) for part in parts)


def test_example_of_the_harness():
    pytest.importorskip("lm_eval")
    command = [sys.executable, str(ROOT / "examples" / "lm_eval_harness.py")]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    plain, accelerated = re.search(r"exact match ([\d.]+), accelerated ([\d.]+)", done.stdout).groups()
    assert 0 < float(plain) == float(accelerated)
    assert "identical answers: yes" in done.stdout
    assert re.search(r"plain [\d.]+ s, accelerated [\d.]+ s: [\d.]+ times as fast", done.stdout)
