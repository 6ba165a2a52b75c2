"""Steps that are replayed, without Python, give the text: nothing that changes from step to step is left in them."""

import pytest
import torch
from support import tiny

import token_recycling as tr
from token_recycling.cuda_graphs import passes_of
from token_recycling.model.tree_model import TreeModel

pytestmark = pytest.mark.usefixtures("recorded")


@pytest.mark.parametrize("drafter", ["published:tree=static:12", "recycling:tree=12", "recycling:tree=paper", "plain"])
def test_replayed_steps_give_the_text(drafter):
    model, made = tiny.llama(), tr.make_drafter(drafter)
    ordinary = tr.make_drafter(drafter)
    for seed, length in enumerate((1, 9, 225)):
        ids, stats, wanted_stats = tiny.prompt(seed, length), tr.Stats(), tr.Stats()
        steps = tr.stream(model, ids, made, fast=True, stats=stats, max_new_tokens=60)
        text = [token for step in steps for token in step.tokens]
        steps = tr.stream(model, ids, ordinary, fast=False, stats=wanted_stats, max_new_tokens=60)
        assert text == [token for step in steps for token in step.tokens]
        assert text == model.generate(ids, max_new_tokens=60, do_sample=False)[0, length:].tolist()
        assert stats.lengths == wanted_stats.lengths
    graphs = passes_of(TreeModel(model))._graphs
    assert graphs.replays > 3 * len(graphs.kept) > 3


def test_replayed_draws_are_drawn_anew():
    model = tr.accelerate(tiny.llama(), "plain", fast=True)
    torch.manual_seed(0)
    texts = {tuple(model.generate(tiny.prompt(0, 4), max_new_tokens=6, do_sample=True)[0].tolist()) for _ in range(8)}
    assert len(texts) == 8


@pytest.mark.parametrize("order", [(True, False, True), (False, True, False)], ids=["within first", "outside first"])
@pytest.mark.parametrize("drafter", ["published:tree=static:8", "prompt_lookup"])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_texts_within_inference_mode_and_outside(model, order, drafter, do_sample):
    """What is kept from text to text can be written in both, wherever it was made."""
    texts = []
    arguments = {"max_new_tokens": 24, "do_sample": do_sample}
    wanted = model.generate(tiny.prompt(0, 6), max_new_tokens=24, do_sample=False)
    for within in order:
        with torch.inference_mode(within):
            if not texts:
                tr.accelerate(model, drafter, fast=True)
            texts.append(tiny.seeded(model.generate, tiny.prompt(0, 6), **arguments)[0].tolist())
            assert model.acceleration.stats.path.startswith("fast")
    assert texts[0] == texts[1] == texts[2]
    assert do_sample or texts[0] == wanted.tolist()
