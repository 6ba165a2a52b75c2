"""DFlash: blocks equal those computed without a cache, trees over the positions of a block, budgets, and assistants."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from support import assistants, tiny
from support.architectures import model_of
from support.eagle_heads import DIM, LAYER, WIDTH, after_attention, attended, normed
from support.recurrent_architectures import RECURRENT
from support.releases import skip_before
from support.runs import check_same, drafted_steps, drafts_of, fix_costs, freeze_overhead, paths_of
from transformers import cache_utils

import token_recycling as tr
from token_recycling.drafters.dflash import DFlash, _without_norm
from token_recycling.model.target import Target
from token_recycling.trees.templates import best_paths


@torch.no_grad()
def expected_probabilities(model, assistant, text):
    """(positions, vocabulary): probabilities of the block after a text, computed without a cache."""
    decoder = model.get_decoder()
    states = decoder(input_ids=torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    config = assistant.config
    block = torch.tensor([[text[-1], *[config.mask_token_id] * (config.block_size - 1)]])
    cache = cache_utils.DFlashCache(config=config)
    cache.set_previous_accepted_tokens(len(text) - 1)
    outputs = assistant(
        noise_embeds=model.get_input_embeddings()(block),
        context_hidden_states=torch.cat([states[number + 1] for number in config.target_layer_ids], dim=-1),
        position_ids=torch.arange(len(text) - 1 + config.block_size)[None],
        past_key_values=cache,
    )
    return model.lm_head(outputs.last_hidden_state[0, 1:]).softmax(-1)


def test_blocks_equal_those_computed_without_a_cache():
    """Beyond the assistant's window, with rejections and with steps without drafts. The tree has the best nodes by the
    product of the positions' probabilities, none of them beyond the end of the output.
    """
    model = tiny.llama(1)
    model.lm_head.weight.data *= 4
    assistant, prompt, nodes, k = assistants.dflash(model), tiny.prompt(2, 9), 7, 4
    steps = drafted_steps(model, DFlash(assistant, tree=nodes, k=k), prompt, max_new_tokens=40)
    assert len(steps[0][1].draft) == 1, "no state is known before the first forward pass"
    for text, step in steps[1:]:
        room = 40 - (len(text) - 9) - 1
        if room:
            probabilities, tokens = expected_probabilities(model, assistant, text)[:room].topk(k)
            paths = [path for (_, path), _ in zip(best_paths(probabilities.tolist()), range(nodes), strict=False)]
            wanted = {tuple(int(tokens[depth, rank]) for depth, rank in enumerate(path)) for path in paths}
            assert set(paths_of(step.draft)[1:]) == wanted
    assert {1, 2} <= {len(step.accepted) for _, step in steps}, "some drafts are accepted, and some rejected"


@pytest.mark.parametrize("tree", [12, "0 00 1 000 0000"])
def test_perfect_assistant_saves_most_steps(counting, tree):
    drafter = DFlash(assistants.trained_dflash(counting), tree=tree, k=99)
    check_same(counting, drafter, torch.tensor([[1, 2, 3]]), max_new_tokens=4)  # less than a block
    stats = check_same(counting, drafter, torch.tensor([[1, 2, 3]]), max_new_tokens=40)
    assert stats.mat > 2
    assert stats.drafter_statistics["draft_forwards"] >= stats.steps - 2


FAMILIES = {one.family: one for one in RECURRENT}


def test_block_is_embedded_without_the_embedding_norm():
    embedding, tokens = model_of(FAMILIES["inkling_text"]).get_input_embeddings(), torch.tensor([[3, 4]])
    normed = embedding(tokens)
    plain = _without_norm(embedding)(tokens)
    assert torch.equal(plain, torch.nn.functional.embedding(tokens, embedding.weight))
    assert not torch.equal(plain, normed)
    assert torch.equal(embedding(tokens), normed), "the target's own embedding is unchanged"


def test_auto_drafts_the_number_of_nodes_that_pays(counting, monkeypatch):
    freeze_overhead(monkeypatch)
    assistant = assistants.trained_dflash(counting)
    for seconds, least, most in (((1.0, 90.0), 1, 1), ((1.0, 1.001, 1.002, 1.003), 3, 4)):
        fix_costs(monkeypatch, range(1, len(seconds) + 1), seconds)
        steps = list(tr.stream(counting, torch.tensor([[1, 2, 3]]), DFlash(assistant), max_new_tokens=24))
        sizes = [len(step.draft) for step in steps[1:-1]]
        assert least <= max(sizes) <= most


# assistants


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda model, folder: assistants.dflash(model, hidden_size=16), "16"),
        (lambda model, folder: assistants.dflash(model, target_layer_ids=[0, 7]), "7"),
        (lambda model, folder: assistants.dflash(model, target_layer_ids=[0, model.config.num_hidden_layers]), "layer"),
        (lambda model, folder: assistants.dflash(model, mask_token_id=64), "64"),
        (lambda model, folder: tiny.llama(), r"'llama' .*block_size, mask_token_id, target_layer_ids"),
        (lambda model, folder: str(folder / "missing"), "/missing"),
        (lambda model, folder: str(folder), "DFlash assistant"),
    ],
)
def test_assistants_that_do_not_fit_the_target_are_refused(model, make, value, tmp_path):
    skip_before(5, 23)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=value):
        tr.generate(model, tiny.prompt(0, 5), drafter=DFlash(make(model, tmp_path)), max_new_tokens=4)


def test_assistant_is_loaded_from_its_folder(counting, tmp_path):
    assistant = assistants.trained_dflash(counting)
    assistant.save_pretrained(tmp_path)
    wanted, found = (
        drafts_of(counting, drafter, torch.tensor([[1, 2, 3]]), max_new_tokens=12)
        for drafter in (DFlash(assistant, tree=5), f"dflash:model={tmp_path},tree=5")
    )
    assert found == wanted


PUBLISHED = {
    **{**LAYER, "model_type": "qwen3", "architectures": ["DFlashDraftModel"], "num_hidden_layers": 2, "head_dim": DIM},
    **{"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 4, "rope_theta": 500.0, "vocab_size": 64},
    **{"layer_types": ["full_attention"] * 2, "num_target_layers": 2, "sliding_window": 3, "attention_bias": False},
    "dflash_config": {"mask_token_id": 0, "target_layer_ids": [0, 1]},
}
NESTED = PUBLISHED["dflash_config"]
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
SPECULATORS = {
    **{"speculators_model_type": "dflash", "architectures": ["DFlashDraftModel"], "block_size": 4, "mask_token_id": 0},
    **{"aux_hidden_state_layer_ids": [1, 2], "draft_vocab_size": 24, "sliding_window_non_causal": False},
    "transformer_layer_config": {**LAYER, **WINDOWS, "num_hidden_layers": 2, "head_dim": DIM, "rope_theta": 500.0},
}


def write_published(folder, change, **more):
    """Write an assistant in the authors' format, with a changed configuration and more tensors; return its tensors."""
    skip_before(5, 23)
    draws = torch.Generator().manual_seed(2)
    sizes = {"fc.weight": (WIDTH, 2 * WIDTH), "hidden_norm.weight": (WIDTH,), "norm.weight": (WIDTH,)}
    for number in range(2):
        for name, rows, columns in (("q", 32, 32), ("k", 16, 32), ("v", 16, 32), ("o", 32, 32)):
            sizes[f"layers.{number}.self_attn.{name}_proj.weight"] = rows, columns
        for name, rows, columns in (("gate", 48, 32), ("up", 48, 32), ("down", 32, 48)):
            sizes[f"layers.{number}.mlp.{name}_proj.weight"] = rows, columns
        sizes |= {f"layers.{number}.self_attn.{name}_norm.weight": (DIM,) for name in "qk"}
        sizes |= {f"layers.{number}.{name}_layernorm.weight": (WIDTH,) for name in ("input", "post_attention")}
    tensors = {name: torch.randn(size, generator=draws) * 0.3 + (len(size) == 1) for name, size in sizes.items()}
    (folder / "config.json").write_text(json.dumps({**PUBLISHED, **change}))
    save_file({**tensors, **more}, folder / "model.safetensors")
    return tensors


@torch.no_grad()
def published_probabilities(model, tensors, text, windows, causal):
    """(positions, vocabulary): as `expected_probabilities`, by the authors' formulas."""
    states = model.model(input_ids=torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    read = torch.cat([states[1], states[2]], dim=-1)[0] @ tensors["fc.weight"].T
    context = normed(read, tensors["hidden_norm.weight"])
    block = model.get_input_embeddings()(torch.tensor([text[-1], 0, 0, 0]))
    places = torch.arange(len(text) + 3)
    for prefix, window in zip(("layers.0.", "layers.1."), windows, strict=True):
        visible = (places - places[:, None]).abs() < window
        if causal and window < 99:
            visible = visible.tril()
        rows = torch.cat([context, normed(block, tensors[f"{prefix}input_layernorm.weight"])])
        block = block + attended(tensors, f"{prefix}self_attn.", rows, places, visible, 500.0)[-4:]
        block = after_attention(tensors, prefix, block)
    return model.lm_head(normed(block, tensors["norm.weight"])[1:]).softmax(-1)


@pytest.mark.parametrize(
    ("change", "windows", "causal"),
    [
        ({}, (99, 99), False),
        ({"dflash_config": {**NESTED, "use_swa": True, "swa_window_size": 5, "causal": False}}, (5, 5), False),
        (WINDOWS, (5, 99), True),
        (SPECULATORS, (5, 99), True),
        ({**SPECULATORS, "sliding_window_non_causal": True}, (5, 99), False),
    ],
    ids=["full", "windows", "causal windows", "speculators", "speculators, not causal"],
)
def test_assistant_in_a_published_format_computes_the_same_as_its_program(change, windows, causal, tmp_path):
    copies = {"lm_head.weight": torch.ones(24, WIDTH), "d2t": torch.arange(24)} if "block_size" in change else {}
    model, tensors = tiny.llama(), write_published(tmp_path, change, **copies)
    steps = drafted_steps(model, DFlash(str(tmp_path), tree="chain:3"), tiny.prompt(2, 9), max_new_tokens=16)
    for text, step in steps[1:-3]:
        wanted = published_probabilities(model, tensors, text, windows, causal)
        assert step.draft.tokens[1:].tolist() == wanted.argmax(-1).tolist()
        assert step.draft.probabilities[1:] == pytest.approx(wanted.max(-1).values.numpy(), rel=1e-3)


def test_unsupported_assistants_in_published_formats_are_refused(tmp_path):
    tensors = write_published(tmp_path, {})
    weights, model = tmp_path / "model.safetensors", tiny.llama()
    for changed, value in (
        ({**tensors, "mask_embedding": torch.ones(WIDTH)}, "unexpected tensors: mask_embedding"),
        (
            {name: tensor for name, tensor in tensors.items() if name != "fc.weight"},
            "missing tensors: encoder.fc.weight",
        ),
    ):
        save_file(changed, weights)
        with pytest.raises(ValueError, match=value):
            tr.generate(model, tiny.prompt(0, 5), drafter=DFlash(str(tmp_path)), max_new_tokens=4)
    for change, value in (
        ({"architectures": ["DominoDraftModel"]}, "DominoDraftModel"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"dflash_config": {**NESTED, "causal": True}}, "causal=True"),
        ({"dflash_config": {"target_layer_ids": [0]}}, "mask_token_id is missing"),
        ({**WINDOWS, "sliding_window": None}, "sliding_window is missing"),
        ({**SPECULATORS, "sample_from_anchor": True}, "sample_from_anchor=True"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED, **change}))
        with pytest.raises(ValueError, match=value):
            DFlash(str(tmp_path))
    with pytest.raises(ValueError, match="give its folder"):
        DFlash(SimpleNamespace(config=SimpleNamespace(**PUBLISHED)))


def test_copy_of_the_assistant_has_the_targets_dtype():
    model = tiny.llama().to(torch.bfloat16)
    assistant = assistants.dflash(model)
    drafter = DFlash(assistant.train(), tree=4)
    check_same(model, drafter, tiny.prompt(0, 6), max_new_tokens=12)
    placed = drafter.placed(Target(model))
    assert (placed.dtype, placed.training) == (torch.bfloat16, False)
    assert (assistant.dtype, assistant.training) == (torch.float32, True)
