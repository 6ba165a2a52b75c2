"""On a card: the fast path, the eager path and `generate` give the same output, in every dtype, greedy and sampled."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.drafters import example
from support.on_device import check_path, check_same, medium, moved
from support.runs import decoded
from transformers import AutoModelForCausalLM, AutoTokenizer

import token_recycling as tr
from token_recycling.drafters._registry import drafter_names

pytestmark = pytest.mark.cuda

ROOT = Path(__file__).parents[2]
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9}
MAY_NOT_DRAFT = {"plain", "draft_model", "layer_skip"}
"""Drafters that draft nothing, or only where it pays; here a model drafts for itself."""
DRAFTERS = ("plain", "published", "recycling", "recycling:tree=paper", "suffix")


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_output_across_bands(device, fast, dtype, drafter):
    """Outputs are so long that attention runs over more slots at the end than at first."""
    model, made = medium(device, dtype), tr.make_drafter(drafter)
    for length in (1, 230):
        given = {"input_ids": tiny.prompt(length, length, 1024).to(device)}
        wanted = model.generate(**given, max_new_tokens=64, **GREEDY)
        for _ in range(2):  # the second time with learned state and existing graphs
            text, stats = decoded(model, given["input_ids"], made, fast, max_new_tokens=64)
            check_same(model, given, torch.cat([given["input_ids"], wanted.new_tensor([text])], dim=1), wanted)
            if fast:
                check_path(stats, device)
            else:
                assert stats.path == "eager"


@pytest.mark.parametrize("length", [1, 40])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_seeded_eager_sampling_equals_generate(device, drafter, length):
    model, ids = tiny.llama().to(device), tiny.prompt(length, length).to(device)
    made = tr.make_drafter(drafter)
    for seed in range(3):
        arguments = {"max_new_tokens": 24, **SAMPLED}
        wanted, left = tiny.seeded(model.generate, ids, seed=seed, **arguments)
        ours, left_by_us = tiny.seeded(tr.generate, model, ids, seed=seed, drafter=made, fast=False, **arguments)
        assert torch.equal(ours, wanted)
        assert torch.equal(left_by_us, left)


def test_seeded_fast_sampling_is_independent_of_the_drafter(device):
    model, ids, texts = tiny.llama().to(device), tiny.prompt(0, 6).to(device), set()
    for drafter in DRAFTERS:
        made = tr.make_drafter(drafter)
        for _ in range(2):
            stats = tr.Stats()
            arguments = {"max_new_tokens": 24, "drafter": made, "fast": True, "stats": stats, **SAMPLED}
            text, _ = tiny.seeded(tr.generate, model, ids, seed=4, **arguments)
            check_path(stats, device)
            texts.add(tuple(text[0].tolist()))
    assert len(texts) == 1


@pytest.mark.parametrize("name", drafter_names())
def test_every_drafter(device, name, tmp_path):
    """Single sequences take the fast path if the drafter supports it; batches are decoded with the default."""
    model, drafted = tiny.llama().to(device), 0
    made = example(name, model, tmp_path)
    fast = made.traits.states is None
    for seed in range(2):
        given = {"input_ids": tiny.prompt(seed, 1 + 11 * seed).to(device)}
        wanted = model.generate(**given, max_new_tokens=40, **GREEDY)
        for _ in range(2):
            stats = tr.Stats()
            how = {"drafter": made, "fast": fast, "stats": stats, "max_new_tokens": 40, **GREEDY}
            check_same(model, given, tr.generate(model, **given, **how), wanted)
            drafted += stats.drafted
            if fast:
                check_path(stats, device)
    assert drafted or name in MAY_NOT_DRAFT
    batch = {"input_ids": torch.cat([tiny.prompt(seed, 9) for seed in range(3)])}
    batch = moved({**batch, "attention_mask": torch.ones_like(batch["input_ids"])}, device)
    wanted = model.generate(**batch, max_new_tokens=20, **GREEDY)
    check_same(model, batch, tr.generate(model, **batch, drafter=made, max_new_tokens=20, **GREEDY), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "drafter",
    ["published", "recycling:tree=16", "medusa:heads=models/medusa,tree=16", "eagle:head=models/eagle3,tree=16"],
)
def test_shipped_model_completes_code(device, dtype, drafter, monkeypatch):
    monkeypatch.chdir(ROOT)
    model = AutoModelForCausalLM.from_pretrained("models/target", dtype=dtype).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained("models/target")
    made = tr.make_drafter(drafter)
    for path in sorted(Path("models/prompts").glob("*.py"))[:2]:
        given = {"input_ids": tokenizer(path.read_text(), return_tensors="pt").input_ids.to(device)}
        wanted, stats = model.generate(**given, max_new_tokens=80, **GREEDY), tr.Stats()
        ours = tr.generate(model, **given, drafter=made, max_new_tokens=80, stats=stats, **GREEDY)
        check_same(model, given, ours, wanted)
        assert stats.mat > 1.2
