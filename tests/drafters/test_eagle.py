"""EAGLE: drafts of a head equal those computed without a cache; trees, budgets, prompts and batches."""

import pytest
import torch
from support import tiny
from support.cases import thinned
from support.eagle_heads import (
    EAGLE_1,
    EAGLE_3,
    IDS,
    LAYER,
    SPECULATORS,
    counting_head,
    normed,
    outputs_of,
    own_states,
    tensors_of,
    written,
)
from support.runs import check_perfect, drafted_steps, drafts_of, paths_of, profitable_depths, recorded_drafts

import token_recycling as tr
from token_recycling.drafters.eagle import Eagle
from token_recycling.model.target import Target

WINDOW = {**LAYER, "layer_types": ["sliding_attention"], "sliding_window": 6}
EAGLE_31 = {
    **SPECULATORS,
    **{"norm_output": True, "eagle_aux_hidden_state_layer_ids": [1, 4], "transformer_layer_config": WINDOW},
}
CONFIGS = {"EAGLE-1": EAGLE_1, "EAGLE-3": EAGLE_3, "EAGLE-3.1": EAGLE_31}


def write_head(folder, config):
    tensors = tensors_of(config, seed=1)
    return written(folder, config, dict(tensors)), tensors


@torch.no_grad()
def wanted_logits(model, config, tensors, text, path, begin=0):
    """(vocabulary,): logits after a drafted path below a text, computed without a cache from position `begin` on."""
    states = model.model(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states
    numbers = config.get("eagle_aux_hidden_state_layer_ids") or (2, 3, 3)
    read = states[-1] if config is EAGLE_1 else torch.cat([states[number] for number in numbers], dim=-1)
    own = own_states(config, tensors, read[0, begin : len(text) - 1])
    tokens = text[begin + 1 :]
    for token in [*path, None]:
        embedded = model.get_input_embeddings()(torch.tensor(tokens))
        places = torch.arange(begin, begin + len(tokens))
        newest = outputs_of(config, tensors, embedded, own, places)[-1:]
        normal = normed(newest, tensors["norm.weight"]) if config is not EAGLE_1 else newest
        if token is not None:
            own = torch.cat([own, normal if config is EAGLE_31 else newest])
            tokens = [*tokens, token]
    if config is EAGLE_1:
        return model.lm_head(newest)[0]
    said = (normal @ tensors["lm_head.weight"].T)[0]
    return torch.full((64,), float("-inf")).index_copy(0, IDS, said)


@pytest.mark.parametrize("name", thinned(CONFIGS, every=2))
def test_every_node_equals_that_computed_without_a_cache(name, deep, tmp_path):
    """Pairs of token and state, positions, siblings that do not attend to each other, no rejected tokens
    in the cache.
    """
    config = CONFIGS[name]
    folder, tensors = write_head(tmp_path, config)
    drafter = Eagle(folder, tree="0 1 2 3 4 5 6 7 00 01 10 11 000 100")
    steps = drafted_steps(deep, drafter, tiny.prompt(2, 9), max_new_tokens=24)
    assert len(steps[0][1].draft) == 1, "no state is known before the first forward pass"
    assert any(len(step.accepted) > 1 for _, step in steps), "some drafts are accepted"
    for text, step in steps[1:]:
        for path, children in zip(paths_of(step.draft), step.draft.children, strict=True):
            best = wanted_logits(deep, config, tensors, text, path).topk(8).indices.tolist() if children else []
            for child in children:
                assert int(step.draft.tokens[child]) == best[step.draft.ranks[child]]


@pytest.mark.parametrize("name", thinned(CONFIGS, every=2))
def test_grown_tree_equals_that_of_eagle_2(name, deep, tmp_path):
    """Frontier, pool and final choice as in the authors' program, computed without a cache."""
    config = CONFIGS[name]
    folder, tensors = write_head(tmp_path, config)
    k, layers, nodes = 3, 3, 8
    drafter = Eagle(folder, tree=nodes, k=k, depth=layers)
    steps = drafted_steps(deep, drafter, tiny.prompt(2, 9), max_new_tokens=12)
    for text, step in steps[1:]:
        pool = {}
        frontier = {(): 0.0}
        for _ in range(min(layers, 12 - (len(text) - 9) - 1)):
            found = {}
            for path, score in frontier.items():
                logs = wanted_logits(deep, config, tensors, text, list(path)).log_softmax(-1).topk(k)
                children = zip(logs.indices.tolist(), logs.values.tolist(), strict=True)
                found |= {(*path, token): score + log for token, log in children}
            pool |= found
            frontier = dict(sorted(found.items(), key=lambda one: -one[1])[:k])
        best = sorted(pool, key=lambda path: -pool[path])[:nodes]
        assert set(paths_of(step.draft)[1:]) == set(best)


def test_perfect_head_is_always_accepted(counting, tmp_path):
    stats = check_perfect(counting, Eagle(counting_head(tmp_path, counting), tree="chain:3"), depth=3)
    assert stats.drafter_statistics["draft_forwards"] == 4 * 3 + 2, "none for tokens beyond the end"


# budgets


def test_drafting_stops_where_it_does_not_pay(counting, tmp_path, monkeypatch):
    """The counting llama's first candidate is confident enough. A head slower than the target is not run."""
    counting.lm_head.weight.data *= 5
    cheap, folder = (1.0, 1.01, 1.02, 1.03), counting_head(tmp_path, counting)
    for price, seconds, layers in ((0.01, cheap, {3}), (0.01, (1.0, 90.0), {0}), (3.0, cheap, {0})):
        assert profitable_depths(monkeypatch, counting, Eagle(folder), price, seconds) == layers


# cached prefixes, long prompts and batches


def assert_read_from(begin, drafts, model, tensors):
    """Assert that all drafts of one token are those of a head that reads each sequence from position `begin` on."""
    assert sum(len(draft) > 1 for _, draft, _ in drafts) > 2
    for text, draft, _ in drafts:
        if len(draft) > 1:
            logits = wanted_logits(model, EAGLE_3, tensors, text, [], begin)
            assert int(draft.tokens[1]) == int(logits.argmax())


@pytest.mark.parametrize("held", [3, 8])
def test_head_ignores_tokens_cached_before_the_call(held, deep, tmp_path):
    """Their states are unknown: the head reads from there on, at the true positions."""
    folder, tensors = write_head(tmp_path, EAGLE_3)
    prompt, cache, drafter = tiny.prompt(2, 9), Target(deep).new_cache().cache, Eagle(folder, tree="0")
    drafts = recorded_drafts(drafter)
    with torch.no_grad():
        deep(input_ids=prompt[:, :held], past_key_values=cache, use_cache=True)
    ours = tr.generate(deep, prompt, drafter=drafter, past_key_values=cache, max_new_tokens=6)
    assert torch.equal(ours, deep.generate(prompt, max_new_tokens=6))
    assert_read_from(held, drafts[0], deep, tensors)


@pytest.mark.parametrize("config", [EAGLE_1, EAGLE_3], ids=["EAGLE-1", "EAGLE-3"])
def test_drafts_are_the_same_when_the_prompt_is_read_in_pieces(config, deep, tmp_path, monkeypatch):
    folder, _ = write_head(tmp_path, config)

    whole = drafts_of(deep, Eagle(folder, tree=6, k=3), tiny.prompt(2, 40), max_new_tokens=8)
    monkeypatch.setattr("token_recycling.drafters.eagle.reader._PIECE", 7)
    assert drafts_of(deep, Eagle(folder, tree=6, k=3), tiny.prompt(2, 40), max_new_tokens=8) == whole


@pytest.mark.parametrize("held", [0, 4])
def test_drafts_in_a_batch_equal_those_of_single_sequences(held, deep, tmp_path):
    """Except that batched prompts are read before the first step, which has a draft. Also after a padded cache."""
    folder, tensors = write_head(tmp_path, EAGLE_3)
    texts, drafter = [tiny.prompt(2, 9), tiny.prompt(3, 7)], Eagle(folder, tree="0")
    noted = recorded_drafts(drafter)
    ids = torch.cat([texts[0], torch.nn.functional.pad(texts[1], (2, 0))])
    mask = torch.tensor([[1] * 9, [0] * 2 + [1] * 7])
    how = {"attention_mask": mask, "max_new_tokens": 8, "pad_token_id": 0}
    wanted = deep.generate(ids, **how)
    if held:
        cache = Target(deep).new_cache().cache
        with torch.no_grad():
            positions = (mask[:, :held].cumsum(1) - 1).clamp(min=0)
            read = {"input_ids": ids[:, :held], "attention_mask": mask[:, :held], "position_ids": positions}
            deep(**read, past_key_values=cache, use_cache=True)
        how["past_key_values"] = cache
    assert torch.equal(tr.generate(deep, ids, drafter=drafter, **how), wanted)
    for row, padding in enumerate((0, 2)):
        drafts = noted[row]
        assert drafts[0][0] == texts[row][0].tolist()
        assert len(drafts[0][1]) == 2
        assert_read_from(max(0, held - padding), drafts, deep, tensors)


# fusion


def test_fused_heads_receive_their_own_states(deep, tmp_path):
    """Heads of both versions and a drafter without states: each head drafts as on its own."""
    one, of_one = write_head(tmp_path / "1", EAGLE_1)
    three, of_three = write_head(tmp_path / "3", EAGLE_3)
    parts = [Eagle(three, tree="0 1"), "suffix", Eagle(one, tree="0 1")]
    steps = drafted_steps(deep, tr.make_drafter("fuse", parts=parts, nodes=30), tiny.prompt(2, 9), max_new_tokens=9)
    for text, step in steps[1:-1]:
        drafted = {int(step.draft.tokens[node]) for node in step.draft.children[0]}
        for config, tensors in ((EAGLE_1, of_one), (EAGLE_3, of_three)):
            assert drafted > set(wanted_logits(deep, config, tensors, text, []).topk(2).indices.tolist())
