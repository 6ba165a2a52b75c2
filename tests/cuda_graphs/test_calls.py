"""Captured passes in calls: the same text and the same learning. Without CUDA they are made alike, but not captured."""

import re

import pytest
import torch
from support import architectures, tiny
from support.drafters import NAMES, example
from support.oracle import Oracle
from support.runs import decoded, plain
from support.two_tokens import SAMPLINGS, SIZE, arguments_for, check_distribution, exact
from transformers import DynamicCache, StoppingCriteria

import token_recycling as tr
from token_recycling.cuda_graphs import passes_of
from token_recycling.cuda_graphs.passes import CapturedPasses
from token_recycling.cuda_graphs.support import passes_or_reason
from token_recycling.model.tree_model import TreeModel

GREEDY = {"do_sample": False}


@pytest.mark.parametrize("name", NAMES)
def test_every_drafter_gives_the_text_and_the_mat_of_eager_passes(name, model, tmp_path):
    ours, theirs = (example(name, model, folder) for folder in (tmp_path / "a", tmp_path / "b") if not folder.mkdir())
    for seed in range(3):
        ids = tiny.prompt(seed, 1 + 6 * seed)
        text, stats = decoded(model, ids, ours, max_new_tokens=40)
        eager, plain_stats = decoded(model, ids, theirs, fast=False, max_new_tokens=40)
        assert text == eager
        assert stats.path.startswith("fast")
        assert plain_stats.path == "eager"
        if name not in {"recycling", "draft_model", "layer_skip"}:  # whose trees depend on what a step costs
            assert stats.lengths == plain_stats.lengths


@pytest.mark.parametrize(
    "spec", ["published:tree=static:12,update=last", "published:tree=static:12,update=first", "recycling:tree=20"]
)
def test_what_is_learned_is_what_eager_passes_teach(model, spec):
    """To the last row, also where the text ends within a step or is left before its end."""
    ours, theirs = tr.make_drafter(spec), tr.make_drafter(spec)
    for seed in range(6):
        ids = tiny.prompt(seed, 7)
        ends = {"eos_token_id": [11, 17, 23, 41], "max_new_tokens": 60}
        assert decoded(model, ids, ours, **ends)[0] == decoded(model, ids, theirs, fast=False, **ends)[0]
        assert (ours.matrix.candidates == theirs.matrix.candidates).all()
    for drafter, fast in ((ours, True), (theirs, False)):
        steps = tr.stream(model, tiny.prompt(9, 7), drafter, fast=fast, eos_token_id=[], max_new_tokens=60)
        for _ in range(3):
            next(steps)
        del steps
    assert (ours.matrix.candidates == theirs.matrix.candidates).all()


def test_buckets_and_bands_are_crossed():
    model = tiny.llama(vocab_size=architectures.VOCABULARY, max_position_embeddings=2048, num_hidden_layers=1)
    shapes, passes = [], passes_of(TreeModel(model))
    made = passes._pass
    passes._pass = lambda target, shape, trees: (shapes.append(shape), made(target, shape, trees))[1]
    ids = tiny.prompt(0, 900, architectures.VOCABULARY)
    wanted = model.generate(ids, max_new_tokens=260, **GREEDY)
    text, _ = decoded(model, ids, Oracle([wanted[0]]), max_new_tokens=260)
    assert text == wanted[0, 900:].tolist()
    assert {shape.nodes for shape in shapes} >= {8, 16, 96}
    assert {shape.band for shape in shapes} >= {1024, 2048}


def test_room_grows_within_a_text():
    model = tiny.llama(max_position_embeddings=2048, num_hidden_layers=1)
    passes, ids = passes_of(TreeModel(model)), tiny.prompt(0, 800)
    wanted, begin = plain(model, ids, 400), passes.begin
    passes.begin = lambda target, cache, sequences, held, longest: begin(target, cache, sequences, held, 8)
    for drafter in ("published:tree=static:8", "recycling:tree=8"):
        passes.slots = passes._room(TreeModel(model), 1, 0)
        assert decoded(model, ids, drafter, max_new_tokens=400)[0] == wanted
        assert passes.capacity == 2048


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("drafter", ["recycling:tree=80", "plain"])
def test_the_end_of_the_context_is_reached(family, drafter):
    """Models with learned positions have none beyond it, for nodes that fill up a bucket neither."""
    model = architectures.model_of(architectures.named(family))
    longest = TreeModel(model).max_length
    for left in (1, 3, 30):
        ids = tiny.prompt(left, longest - left, architectures.VOCABULARY)
        assert decoded(model, ids, drafter, max_new_tokens=left + 1)[0] == plain(model, ids, left + 1)


@pytest.mark.parametrize("case", architectures.chosen(architectures.SUPPORTED))
def test_every_family_gives_the_text_of_generate_or_says_why_not(case, recorded):
    """From steps that are recorded and replayed, as CUDA graphs are."""
    model = architectures.model_of(case)
    steps = passes_or_reason(TreeModel(model))
    exceptional = {"bloom", "mpt", "llama4_text", "gpt_neo", "deepseek_v32", "falcon", "jetmoe", "xglm"}
    if case.family in exceptional or any(word in case.tested for word in ("ALiBi", "longrope", "dynamic")):
        assert isinstance(steps, str)
        with pytest.raises(tr.NoFastPathError, match=re.escape(f"fast=True: {steps}")):
            tr.accelerate(model, fast=True)
        return
    assert isinstance(steps, CapturedPasses), steps
    for length in (5, 29):
        ids = tiny.prompt(length, length, architectures.VOCABULARY)
        wanted = model.generate(ids, max_new_tokens=24, **GREEDY)
        text, stats = decoded(model, ids, Oracle([wanted[0]]), max_new_tokens=24)
        assert text == wanted[0, length:].tolist()
        assert stats.mat > 1.5


@pytest.mark.parametrize(
    "sampling", [SAMPLINGS[0], *(pytest.param(how, marks=pytest.mark.nightly) for how in SAMPLINGS[1:])]
)
@pytest.mark.parametrize("drafter", ["published:tree=0 1 00 01 10,k=4"])
def test_sampled_texts_follow_the_distribution_of_generate(sampling, drafter):
    model, prompt = tiny.llama(7, vocab_size=SIZE, initializer_range=0.2), torch.tensor([[1, 3, 2]])
    arguments = arguments_for(sampling)
    wanted = exact(model, prompt, arguments)
    tr.accelerate(model, drafter, fast=True)
    torch.manual_seed(3)
    check_distribution(wanted, lambda: model.generate(prompt, **arguments)[:, 3:], 500)
    assert model.acceleration.stats.path.startswith("fast")


def test_a_seed_gives_a_text_whatever_is_drafted(model):
    """With drafters that draft otherwise, or have learned from the same text before."""
    arguments = {"max_new_tokens": 20, "do_sample": True, "temperature": 0.6}
    texts = set()
    for spec in ("plain", "published", "recycling:tree=12"):
        drafter = tr.make_drafter(spec)
        for _ in range(2):
            stats = tr.Stats()
            made = tiny.seeded(
                tr.generate, model, tiny.prompt(0, 6), seed=4, drafter=drafter, fast=True, stats=stats, **arguments
            )[0]
            assert stats.path.startswith("fast")
            texts.add(tuple(made[0].tolist()))
    assert stats.accepted
    assert len(texts) == 1
    tr.accelerate(model, "plain", fast=True)
    other = tiny.seeded(model.generate, tiny.prompt(0, 6), seed=5, **arguments)[0]
    assert tuple(other[0].tolist()) not in texts


def test_a_penalty_is_of_the_tokens_of_this_sequence_alone(model):
    """Not of those that the call before has left on the device."""
    prompts, how = [tiny.prompt(seed, 6) for seed in range(4)], {"max_new_tokens": 24, "repetition_penalty": 1.5}
    wanted = [model.generate(ids, **GREEDY, **how) for ids in prompts]
    tr.accelerate(model, "published", fast=True)
    for ids, text in zip(prompts, wanted, strict=True):
        assert torch.equal(model.generate(ids, **GREEDY, **how), text)
        assert model.acceleration.stats.path.startswith("fast")


@pytest.mark.parametrize("drafter", ["plain", "published"])
def test_rows_of_a_batch_are_sampled_by_seeds_of_their_own(model, drafter):
    ids, stats = tiny.prompt(0, 6).expand(6, -1), tr.Stats()
    how = {"max_new_tokens": 12, "do_sample": True, "temperature": 2.0, "fast": True, "pad_token_id": 0}
    rows = tr.generate(model, ids, attention_mask=torch.ones_like(ids), drafter=drafter, stats=stats, **how)
    assert stats.path.startswith("fast")
    assert len({tuple(row) for row in rows.tolist()}) == 6


def test_endings_are_those_of_generate(model):
    """End-of-sequence tokens and a criterion of one's own; afterwards the cache holds all but the last token."""

    class Stops(StoppingCriteria):
        """Ends a text at the first multiple of 7."""

        def __call__(self, input_ids, scores, **kwargs):
            return input_ids[:, -1] % 7 == 0

    for drafter in ("published:tree=static:12", "recycling:tree=12"):
        tr.accelerate(model, drafter, fast=True)
        for seed in range(5):
            ids = tiny.prompt(seed, 8)
            for ending in ({"eos_token_id": [11, 17, 23]}, {"stopping_criteria": [Stops()]}):
                arguments = {
                    "max_new_tokens": 50,
                    "pad_token_id": 0,
                    "return_dict_in_generate": True,
                    **GREEDY,
                    **ending,
                }
                ours = model.generate(ids, **arguments)
                assert model.acceleration.stats.path.startswith("fast")
                tr.decelerate(model)
                wanted = model.generate(ids, **arguments)
                tr.accelerate(model, drafter, fast=True)
                assert torch.equal(ours.sequences, wanted.sequences)
                held = ours.past_key_values
                assert held.get_seq_length() == wanted.sequences.shape[1] - 1
                for own, theirs in zip(held.layers, wanted.past_key_values.layers, strict=True):
                    assert torch.allclose(own.keys, theirs.keys, atol=1e-5)
                    assert torch.allclose(own.values, theirs.values, atol=1e-5)


def test_a_cache_made_without_a_configuration_is_gone_on_with():
    """It has no layers for those that share the states of others."""
    model, ids = (
        architectures.model_of(architectures.named("gemma3n_text")),
        tiny.prompt(0, 9, architectures.VOCABULARY),
    )
    wanted, held = model.generate(ids, max_new_tokens=24, **GREEDY), DynamicCache()
    tr.accelerate(model, "suffix", fast=True)
    first = model.generate(ids, past_key_values=held, max_new_tokens=12, **GREEDY)
    assert torch.equal(model.generate(first, past_key_values=held, max_new_tokens=12, **GREEDY), wanted)
