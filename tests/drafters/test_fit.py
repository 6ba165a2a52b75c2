"""A drafter that does not fit the model is refused by `accelerate`; isolated requests share loaded
models and layers.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from support import assistants, tiny
from support.drafters import example

import token_recycling as tr
from token_recycling.drafters import layer_skip, specdec_pp
from token_recycling.drafters._shared.neural import PerTarget
from token_recycling.drafters.assistant import Assistant
from token_recycling.drafters.draft_model import DraftModel
from token_recycling.drafters.layer_skip import LayerSkip
from token_recycling.drafters.specdec_pp import AcceptanceHead, SpecDecPP, save_head
from token_recycling.model.hidden import output_width
from token_recycling.model.target import Target

IDS = tiny.prompt(0, 6)


def model_of_another_vocabulary():
    return tiny.llama(1, vocab_size=80)


def narrow_assistant():
    """Its model has fewer logits than its tokenizer has tokens."""
    words = assistants.word_tokenizer(80)
    return Assistant(tiny.llama(1, vocab_size=60), tokenizer=words, assistant_tokenizer=words)


def drafter_used_with(model, name):
    """Return a drafter that has learned from a model."""
    drafter = tr.make_drafter(name)
    tr.generate(model, IDS, drafter=drafter, max_new_tokens=4, do_sample=False)
    return drafter


REFUSED = {
    "draft model": lambda: DraftModel(model_of_another_vocabulary()),
    "specdec_pp": lambda: SpecDecPP(model_of_another_vocabulary(), AcceptanceHead(32, depth=1)),
    "head of another width": lambda: SpecDecPP(tiny.related(tiny.llama()), AcceptanceHead(16, depth=1)),
    "assistant": narrow_assistant,
    "recycling": lambda: drafter_used_with(model_of_another_vocabulary(), "recycling"),
    "published": lambda: drafter_used_with(model_of_another_vocabulary(), "published"),
    "unwarmed": lambda: tr.make_drafter("recycling:warmed=true"),
    "layers": lambda: LayerSkip(layers=[9]),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_drafter_of_another_target_is_refused_by_accelerate(model, name, fused):
    drafter = REFUSED[name]()
    if fused:
        drafter = tr.make_drafter("fuse", parts=[drafter, tr.make_drafter("suffix")])
    with pytest.raises(ValueError, match=r".+"):
        tr.accelerate(model, drafter)
    assert not hasattr(model, "acceleration")


@pytest.mark.parametrize("name", ["eagle", "medusa", "mtp", "dflash", "rest"])
def test_files_for_another_target_are_refused_by_accelerate(name, tmp_path):
    other = tiny.llama(1, vocab_size=80, hidden_size=48, num_attention_heads=6, num_key_value_heads=3)
    drafter = example(name, other, tmp_path)
    model = tiny.llama()
    with pytest.raises(ValueError, match=r".+"):
        tr.accelerate(model, drafter)
    assert not hasattr(model, "acceleration")


def test_layers_are_chosen_once_for_all_isolated_requests(monkeypatch):
    model, searched = tiny.llama(num_hidden_layers=4), []
    model.generation_config.bos_token_id = 5
    best_layers = layer_skip.best_layers

    def noted(model, sequence, depth):
        searched.append(sequence.tolist())
        return best_layers(model, sequence, depth)

    monkeypatch.setattr(layer_skip, "best_layers", noted)
    base = LayerSkip()
    for seed in range(4):
        tr.generate(model, tiny.prompt(seed, 9), drafter=base.fork(), max_new_tokens=4, do_sample=False)
    assert len(searched) == 1
    generated = model.generate(torch.tensor([[5]]), max_new_tokens=len(searched[0]) - 1)
    assert searched[0] == generated[0].tolist(), "the choice for other requests does not depend on a prompt"
    tr.generate(model, IDS, drafter=base, max_new_tokens=4, do_sample=False)
    assert len(searched) == 2
    assert base.fork() is base


def test_forks_share_the_head_of_specdec_pp(model, monkeypatch, tmp_path):
    draft, loads = tiny.related(model), []
    head = AcceptanceHead(output_width(draft), 1)
    head.reset()
    save_head(tmp_path, head, draft, {"threshold": 0.5})
    load_head = specdec_pp.load_head
    monkeypatch.setattr(specdec_pp, "load_head", lambda *one: (loads.append(one), load_head(*one))[1])
    base = SpecDecPP(draft, str(tmp_path))
    for seed in range(3):
        tr.generate(model, tiny.prompt(seed, 6), drafter=base.fork(), max_new_tokens=4, do_sample=False)
    assert len(loads) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.bfloat16(),
        lambda model: model.resize_token_embeddings(70),
        lambda model: setattr(model.config, "num_hidden_layers", 1),
    ],
)
def test_per_target_values_are_made_once_per_state_of_a_target(change):
    targets, made = [Target(tiny.llama()), Target(tiny.llama(seed=1))], []
    cache = PerTarget[list]()

    def of(target):
        return cache.of(target, lambda: (made.append(target), [target])[1])

    assert [of(target) for target in (*targets, *targets)] == [[target] for target in (*targets, *targets)]
    assert made == targets
    change(targets[0].model)
    changed = Target(targets[0].model)
    assert of(changed) == of(changed) == [changed]
    assert of(targets[1]) == [targets[1]]
    assert made == [*targets, changed], "the other target's value stays"


@pytest.mark.parametrize("name", ["medusa", "layer_skip"])
def test_a_kept_drafter_does_not_keep_its_model_alive(name, tmp_path):
    model = tiny.llama()
    drafter = example(name, model, tmp_path)
    tr.generate(model, IDS, drafter=drafter, max_new_tokens=4, do_sample=False)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert drafter.describe()


def test_copies_of_a_per_target_cache_are_empty():
    target, cache = Target(tiny.llama()), PerTarget[int]()
    assert cache.of(target, lambda: 1) == 1
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert other.of(target, lambda: 2) == 2
    assert cache.of(target, lambda: 3) == 1
