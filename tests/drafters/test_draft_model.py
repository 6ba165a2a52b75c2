"""A second model drafts: the text stays the target's, the draft model's cache stays right, and pairs must fit."""

import copy

import pytest
import torch
from support import runs, tiny
from support.tiny import related
from transformers import (
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
)

import token_recycling as tr
from token_recycling.model.tree_model import TreeModel
from token_recycling.trees.templates import root_only

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
TREE = {"mode": "tree", "nodes": 20, "theta_prob": 0.1}


def test_drawn_drafts_follow_the_texts_temperature(model):
    """At a temperature near 0 a model drafts for itself what is accepted; drawn at temperature 1 it would not be."""
    stats = tr.Stats()
    drafter = tr.make_drafter("draft_model", model=model, mode="sequence", depth=4, nodes=4, sampled=True)
    sampling = {"do_sample": True, "temperature": 0.02, "max_new_tokens": 20}
    ours = tr.generate(model, tiny.prompt(0, 5), drafter=drafter, stats=stats, **sampling)
    assert torch.equal(ours, model.generate(tiny.prompt(0, 5), max_new_tokens=20))
    assert stats.mat == 5


def test_a_model_that_drafts_for_itself_is_always_right(model):
    stats = tr.Stats()
    drafter = tr.make_drafter("draft_model", model=model, mode="sequence", depth=4, nodes=9)
    tr.generate(model, tiny.prompt(2, 6), drafter=drafter, stats=stats, max_new_tokens=20)
    assert (stats.mat, stats.acceptance_rate) == (5.0, 1.0)
    assert stats.drafter_statistics == {"draft_forwards": 16, "drafted_by_model": 16}


@pytest.mark.parametrize("mode", ["tree", "graph"])
@torch.no_grad()
def test_every_node_is_what_a_model_says_that_reads_everything_anew(mode):
    """After every step, also where a merge was crossed: so the cache holds the text, and nothing that was rejected."""
    model = tiny.llama(4, vocab_size=8)
    draft, stats = related(model, 0.01), tr.Stats()
    options = {"k": 4, "theta_prob": 0.0, "theta_sib": 0.0, "nodes": 60, "depth": 5, "tau": 1}
    drafter = tr.make_drafter("draft_model", model=draft, mode=mode, **options)
    for seed in range(4):
        ids = tiny.prompt(seed, 6, 8)
        text = ids[0].tolist()
        for step in tr.stream(model, ids, drafter, max_new_tokens=30, stats=stats):
            tree, tokens = step.draft.tree, step.draft.tokens.tolist()
            for node in (node for node in range(len(tree)) if tree.children[node] and tree.depths[node] < 2):
                path = [tokens[above] for above in tree.lineages[node][1:]]
                most_probable = draft(torch.tensor([text + path])).logits[0, -1].topk(4).indices.tolist()
                drafted = [tokens[child] for child in tree.children[node]]
                assert drafted == most_probable[: len(drafted)]
            text += step.tokens
    assert stats.mat > 2
    assert bool(stats.drafter_statistics["steps_with_merge_accepted"]) == (mode == "graph")


def test_a_merged_path_that_is_accepted_is_counted_and_read_again():
    """The target counts 0 1 2 3 ...; the draft model is sure of the way there, but prefers a detour at its beginning.

    It drafts 0 -> 2 (likelier) and 0 -> 1, then 2 -> 3 and 1 -> 2. The second 2 is merged with the first, so that the
    target accepts 1, 2, a copied 3, and so on.
    """
    target, draft = tiny.counting_llama(), tiny.counting_llama()
    with torch.no_grad():
        draft.lm_head.weight[2, 0], draft.lm_head.weight[1, 0] = 3.3, 3.0
    options = {"mode": "graph", "depth": 4, "k": 2, "theta_prob": 0.1, "nodes": 12, "tau": 1}
    drafter, stats = tr.make_drafter("draft_model", model=draft, **options), tr.Stats()
    started = runs.texts_of(drafter)
    step = next(tr.stream(target, torch.tensor([0]), drafter, max_new_tokens=12, stats=stats))
    assert step.tokens[:3] == [1, 2, 3]
    assert len(step.tokens) > 3
    assert stats.drafter_statistics["steps_with_merge_accepted"] == 1
    # Of the emitted tokens only 1 was read on its own path; the root is read with the prompt.
    assert started[0].reader.held == 2


def test_a_text_beyond_the_draft_models_positions_goes_on_without_drafts(model):
    drafter = tr.make_drafter("draft_model", model=tiny.llama(0, max_position_embeddings=20), mode="sequence", nodes=4)
    ids = tiny.prompt(0, 12)
    text, sizes = ids[0].tolist(), {}
    for step in tr.stream(model, ids, drafter, max_new_tokens=24):
        sizes[len(text)] = len(step.draft.tree)
        text += step.tokens
    assert text == model.generate(ids, max_new_tokens=24)[0].tolist()
    assert sizes[12] == 5
    assert {size for length, size in sizes.items() if length > 20} == {1}
    runs.check_same(model, drafter, tiny.prompt(1, 40), max_new_tokens=5)


def test_steps_of_other_drafts_are_caught_up_with(model):
    """A drafter that drafts only now and then, as a part of another one, reads what it missed."""
    inner, calls = tr.make_drafter("draft_model", model=related(model), **TREE), iter(range(100))

    class Sometimes(tr.Drafter):
        def start(self, prompt, target, costs):
            self.inner = inner.start(prompt, target, costs)
            return self

        def draft(self, context):
            return self.inner.draft(context) if next(calls) % 3 else tr.Draft(root_only(), context.root)

        def observe(self, step):
            self.inner.observe(step)

    assert runs.check_same(model, Sometimes(), tiny.prompt(0, 9), max_new_tokens=40).mat > 1.5


def saved(model, tokenizer, folder):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def target_folder(tokenizer, tmp_path):
    return saved(tiny.llama(vocab_size=len(tokenizer)), tokenizer, tmp_path / "target")


def use(target, drafter):
    runs.check_same(target, drafter, tiny.prompt(0, 5), max_new_tokens=8)


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize(("ours", "theirs"), [(0, 20), (20, 0)])
def test_padded_vocabularies_fit(tokenizer, tmp_path, ours, theirs, sampled):
    """Logits beyond the tokenizer's tokens, in the target or in the draft model, with one tokenizer beside both."""
    size = len(tokenizer)
    target = saved(tiny.llama(vocab_size=size + ours), tokenizer, tmp_path / "target")
    draft = saved(tiny.llama(vocab_size=size + theirs), tokenizer, tmp_path / "draft")
    drafter = tr.make_drafter("draft_model", model=draft, sampled=sampled, nodes=12)
    model = LlamaForCausalLM.from_pretrained(target)
    use(model, drafter)
    tr.generate(model, tiny.prompt(0, 5), drafter=drafter, max_new_tokens=8, do_sample=True)


def test_another_tokenizer_is_refused(target_folder, tmp_path, tokenizer):
    other = copy.deepcopy(tokenizer)
    state = other.backend_tokenizer.to_str().replace('"Ġ":', '"!!":').replace('"!":', '"Ġ":').replace('"!!":', '"!":')
    other = PreTrainedTokenizerFast(tokenizer_object=type(other.backend_tokenizer).from_str(state), eos_token="<end>")
    draft = saved(tiny.llama(vocab_size=len(other)), other, tmp_path / "other")
    target = LlamaForCausalLM.from_pretrained(target_folder)
    message = r"2 of 299 tokens; token 1 is '!' and 'Ġ'; choose"
    with pytest.raises(ValueError, match=message):
        use(target, tr.make_drafter("draft_model", model=draft))


def test_models_that_cannot_draft_are_refused(model, tmp_path):
    changing = tiny.llama(rope_parameters=DYNAMIC, max_position_embeddings=32)
    mamba = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4))
    for target, draft, value in (
        (model, tiny.llama(vocab_size=70), "got 70"),
        (model, mamba, "Mamba"),
        (changing, changing, "Llama"),
        (model, str(tmp_path), str(tmp_path)),
        (model, str(tmp_path / "none"), "none'"),
    ):
        with pytest.raises(ValueError, match=value):
            use(target, tr.make_drafter("draft_model", model=draft))


def test_near_a_border_drawn_drafts_are_left_out_before_they_are_drawn():
    """Whether a tree fits must not depend on what was drawn. From 32 tokens on this model takes no trees."""
    model = tiny.llama(rope_parameters=DYNAMIC, max_position_embeddings=32)
    drafter = tr.make_drafter("draft_model", model=tiny.llama(), sampled=True, mode="sequence", depth=4, nodes=4)
    length, sizes = 20, {}
    for step in tr.stream(model, tiny.prompt(0, 20), drafter, max_new_tokens=12, do_sample=True):
        sizes[length] = len(step.draft.tree)
        length += len(step.tokens)
    assert all(size == (5 if length - 1 + 5 <= 32 else 1) for length, size in sizes.items() if length < 28)
    assert sizes[20] == 5
    assert {size for length, size in sizes.items() if length > 28} <= {1}


def test_forks_share_the_draft_model_which_is_loaded_once(model, tmp_path):
    tiny.llama(seed=1).save_pretrained(tmp_path / "draft")
    alone = tr.make_drafter("draft_model", model=str(tmp_path / "draft"))
    fused = tr.make_drafter("fuse", parts=[tr.make_drafter("draft_model", model=str(tmp_path / "draft")), "suffix"])
    for first, of in ((alone, lambda drafter: drafter), (fused, lambda drafter: drafter.drafters[0])):
        drafters = [first, first.fork(), first.fork().fork()]
        loaded = {id(of(drafter).drafting_model(TreeModel(model)).model) for drafter in drafters}
        assert len(loaded) == 1
