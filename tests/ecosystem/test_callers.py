"""Libraries that call the model or its server, beyond the blocks of docs/ecosystem.md; and the examples with them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.serving import serving

import token_recycling as tr

ROOT = Path(__file__).parents[2]
PROMPT = "class Stack:\n    def __init__(self, limit):\n        "
LINES = r"(self\.[a-z]{2,6} = [0-9]+\n        ){3,9}"


def test_the_wrapper_of_peft_is_refused_with_the_model_to_give(fresh):
    peft = pytest.importorskip("peft")
    wrapper = peft.get_peft_model(fresh(), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(tr.UnsupportedModelError, match=r"pass the LlamaForCausalLM in its \.base_model\.model"):
        tr.accelerate(wrapper)


def test_a_model_that_is_accelerated_is_given_adapters(fresh, shipped):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=8, lora_alpha=64, target_modules=["q_proj"], init_lora_weights=False)
    model = tr.accelerate(fresh())
    wrapper = peft.get_peft_model(model, config)
    inputs = shipped[1](PROMPT, return_tensors="pt")
    found = wrapper.generate(**inputs, max_new_tokens=40, do_sample=False)
    assert model.acceleration.stats.mat > 1
    tr.decelerate(model)
    assert torch.equal(found, wrapper.generate(**inputs, max_new_tokens=40, do_sample=False))


def test_a_grammar_of_xgrammar_and_drawn_tokens(shipped):
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.contrib.hf import LogitsProcessor

    model, tokenizer = shipped
    known = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    grammar = xgrammar.GrammarCompiler(known).compile_regex(LINES)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    found = []
    for call in (model.generate, lambda **arguments: tr.generate(model, **arguments)):
        torch.manual_seed(0)
        processors = [LogitsProcessor(grammar)]
        found.append(call(**inputs, max_new_tokens=40, do_sample=True, logits_processor=processors))
    assert torch.equal(*found)


def test_outlines_on_xgrammar(shipped):
    outlines = pytest.importorskip("outlines")
    model, tokenizer = shipped
    lines = outlines.Generator(outlines.from_transformers(model, tokenizer), outlines.regex(LINES), backend="xgrammar")
    plain = lines(PROMPT, max_new_tokens=40, do_sample=False)
    with tr.accelerated(model) as acceleration:
        assert lines(PROMPT, max_new_tokens=40, do_sample=False) == plain
    assert acceleration.stats.mat > 1


def test_a_chat_of_langchain(shipped, monkeypatch):
    langchain = pytest.importorskip("langchain_openai")
    model, tokenizer = shipped
    monkeypatch.setattr(tokenizer, "chat_template", (ROOT / "examples" / "continue.jinja").read_text())
    said = {}
    for drafter in ("plain", "recycling"):
        with serving(model, tokenizer, drafter=drafter) as server:
            how = {"base_url": f"{server.url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 40}
            chat = langchain.ChatOpenAI(model="tiny", **how)
            said[drafter] = chat.invoke(PROMPT).content
            assert "".join(part.content for part in chat.stream(PROMPT)) == said[drafter]
    assert said["recycling"] == said["plain"]


def test_the_chat_of_gradio_is_streamed(fresh, shipped, monkeypatch):
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


def test_the_example_of_the_harness():
    pytest.importorskip("lm_eval")
    command = [sys.executable, str(ROOT / "examples" / "lm_eval_harness.py")]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    plain, accelerated = re.search(r"exact match ([\d.]+), accelerated ([\d.]+)", done.stdout).groups()
    assert 0 < float(plain) == float(accelerated)
    assert "identical answers: yes" in done.stdout
    assert re.search(r"plain [\d.]+ s, accelerated [\d.]+ s: [\d.]+ times as fast", done.stdout)
