"""Draft models: the output stays the target's, the draft model's cache stays correct, and pairs must fit."""

import pytest
import torch
from support import runs, tiny
from support.tiny import related
from transformers import LlamaForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast

import token_recycling as tr
from token_recycling.model.target import Target

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def test_drafts_are_sampled_at_the_requests_temperature(model):
    """At a temperature near 0, a model that drafts for itself is always accepted; at temperature 1 it would not be."""
    stats = tr.Stats()
    drafter = tr.make_drafter("draft_model", model=model, mode="sequence", depth=4, nodes=4, sampled=True)
    sampling = {"do_sample": True, "temperature": 0.02, "max_new_tokens": 20}
    ours = tr.generate(model, tiny.prompt(0, 5), drafter=drafter, stats=stats, **sampling)
    assert torch.equal(ours, model.generate(tiny.prompt(0, 5), max_new_tokens=20))
    assert stats.mat == 5


def test_model_drafting_for_itself_is_always_accepted(model):
    stats = tr.Stats()
    drafter = tr.make_drafter("draft_model", model=model, mode="sequence", depth=4, nodes=9)
    tr.generate(model, tiny.prompt(2, 6), drafter=drafter, stats=stats, max_new_tokens=18)
    assert (stats.mat, stats.acceptance_rate) == (4.5, 1.0)
    assert stats.drafter_statistics == {"draft_forwards": 14, "drafted_by_model": 14}, "none beyond the end"
    several, ids = tr.Stats(), tiny.prompt(2, 6).expand(3, -1)
    tr.generate(model, ids, drafter=drafter, stats=several, max_new_tokens=18, pad_token_id=0)
    assert several.drafter_statistics == {"draft_forwards": 3 * 14, "drafted_by_model": 3 * 14}, "of all sequences"


@pytest.mark.parametrize("mode", ["tree", "graph"])
@torch.no_grad()
def test_every_node_equals_that_computed_without_a_cache(mode):
    """After every step, including accepted merges: the cache contains the sequence and no rejected tokens."""
    model = tiny.llama(4, vocab_size=8)
    draft, stats = related(model, 0.01), tr.Stats()
    options = {"k": 4, "theta_prob": 0.0, "theta_sib": 0.0, "nodes": 60, "depth": 5, "tau": 1}
    drafter = tr.make_drafter("draft_model", model=draft, mode=mode, **options)
    for seed in range(4):
        for text, step in runs.drafted_steps(model, drafter, tiny.prompt(seed, 6, 8), max_new_tokens=30, stats=stats):
            for path, children in zip(runs.paths_of(step.draft), step.draft.children, strict=True):
                if children and len(path) < 2:
                    most_probable = draft(torch.tensor([[*text, *path]])).logits[0, -1].topk(4).indices.tolist()
                    drafted = step.draft.tokens[list(children)].tolist()
                    assert drafted == most_probable[: len(drafted)]
    assert stats.mat > 2
    for name in ("steps_with_merge_accepted", "merged_nodes", "verified_copies"):
        assert bool(stats.drafter_statistics[name]) == (mode == "graph")


@pytest.mark.parametrize(("pruned", "expanded"), [("theta_prob", 1), ("theta_sib", 4)])
def test_improbable_nodes_and_improbable_siblings_are_not_expanded(model, pruned, expanded):
    """No token is certain, so only the root is expanded; or the best child of each layer."""
    thresholds = {"theta_prob": 0.0, "theta_sib": 0.0, pruned: 1.0}
    drafter = tr.make_drafter("draft_model", model=model, nodes=40, depth=4, **thresholds)
    step = next(tr.stream(model, tiny.prompt(0, 6), drafter, max_new_tokens=20))
    assert len({*step.draft.parents.tolist()} - {-1}) == step.draft.depth == expanded


def test_decoding_continues_without_drafts_beyond_the_draft_models_positions(model):
    drafter = tr.make_drafter("draft_model", model=tiny.llama(0, max_position_embeddings=20), mode="sequence", nodes=4)
    ids = tiny.prompt(0, 12)
    text, sizes = ids[0].tolist(), {}
    for step in tr.stream(model, ids, drafter, max_new_tokens=24):
        sizes[len(text)] = len(step.draft)
        text += step.tokens
    assert text == model.generate(ids, max_new_tokens=24)[0].tolist()
    assert sizes[12] == 5
    assert {size for length, size in sizes.items() if length > 20} == {1}
    runs.check_same(model, drafter, tiny.prompt(1, 40), max_new_tokens=5)


# pairs


def check_pair(target, drafter):
    runs.check_same(target, drafter, tiny.prompt(0, 5), max_new_tokens=8)


def save(model, tokenizer, folder):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("ours", "theirs"), [(0, 20), (20, 0)])
def test_padded_vocabularies_are_accepted(tokenizer, tmp_path, ours, theirs):
    """Target or draft model have logits beyond the tokens of their common tokenizer."""
    target, draft = (
        save(tiny.llama(vocab_size=len(tokenizer) + more), tokenizer, tmp_path / name)
        for name, more in (("target", ours), ("draft", theirs))
    )
    model = LlamaForCausalLM.from_pretrained(target)
    for sampled in (True, False):
        drafter = tr.make_drafter("draft_model", model=draft, sampled=sampled, nodes=12)
        check_pair(model, drafter)
        tr.generate(model, tiny.prompt(0, 5), drafter=drafter, max_new_tokens=8, do_sample=True)


def test_different_tokenizer_is_refused(tokenizer, tmp_path):
    state = tokenizer.backend_tokenizer.to_str()
    state = state.replace('"Ġ":', '"!!":').replace('"!":', '"Ġ":').replace('"!!":', '"!":')
    other = PreTrainedTokenizerFast(tokenizer_object=type(tokenizer.backend_tokenizer).from_str(state))
    target, draft = (
        save(tiny.llama(vocab_size=len(tokenizer)), words, tmp_path / name)
        for name, words in (("target", tokenizer), ("draft", other))
    )
    with pytest.raises(ValueError, match=r"2 of \d+ tokens; token 1 is '!' and 'Ġ'; choose"):
        check_pair(LlamaForCausalLM.from_pretrained(target), tr.make_drafter("draft_model", model=draft))


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
            check_pair(target, tr.make_drafter("draft_model", model=draft))


def test_sampled_drafts_near_a_length_threshold_are_omitted_before_sampling():
    """Whether a tree fits must not depend on the sampled tokens. Beyond 32 tokens this model takes no trees."""
    model = tiny.llama(rope_parameters=DYNAMIC, max_position_embeddings=32)
    drafter = tr.make_drafter("draft_model", model=tiny.llama(), sampled=True, mode="sequence", depth=4, nodes=4)
    length, sizes = 20, {}
    for step in tr.stream(model, tiny.prompt(0, 20), drafter, max_new_tokens=12, do_sample=True):
        sizes[length] = len(step.draft)
        length += len(step.tokens)
    assert all(size == (5 if length - 1 + 5 <= 32 else 1) for length, size in sizes.items() if length < 28)
    assert sizes[20] == 5
    assert {size for length, size in sizes.items() if length > 28} <= {1}


def test_forks_share_one_loaded_draft_model(model, tmp_path):
    tiny.llama(seed=1).save_pretrained(tmp_path / "draft")
    alone = tr.make_drafter("draft_model", model=str(tmp_path / "draft"))
    fused = tr.make_drafter("fuse", parts=[tr.make_drafter("draft_model", model=str(tmp_path / "draft")), "suffix"])
    for first, of in ((alone, lambda drafter: drafter), (fused, lambda drafter: drafter.drafters[0])):
        drafters = [first, first.fork(), first.fork().fork()]
        loaded = {id(of(drafter).placed(Target(model)).model) for drafter in drafters}
        assert len(loaded) == 1
