"""DFlash: blocks equal those computed without a cache, trees over the positions of a block, budgets, and assistants."""

import pytest
import torch
from support import assistants, tiny
from support.architectures import model_of
from support.recurrent_architectures import RECURRENT
from support.runs import check_same, drafted_steps, drafts_of, fix_costs, freeze_overhead, paths_of
from transformers import cache_utils

import token_recycling as tr
from token_recycling.drafters.dflash import DFlash, _without_norm
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
    product of the positions' probabilities.
    """
    model = tiny.llama(1)
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


def test_perfect_assistant_saves_most_steps(counting):
    drafter = DFlash(assistants.trained_dflash(counting), tree=12)
    stats = check_same(counting, drafter, torch.tensor([[1, 2, 3]]), max_new_tokens=41)
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
        (lambda model, folder: assistants.dflash(model, mask_token_id=64), "64"),
        (lambda model, folder: tiny.llama(), r"'llama' .*block_size, mask_token_id, target_layer_ids"),
        (lambda model, folder: str(folder / "missing"), "/missing"),
        (lambda model, folder: str(folder), "DFlash assistant"),
    ],
)
def test_assistants_that_do_not_fit_the_target_are_refused(model, make, value, tmp_path):
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


def test_copy_of_the_assistant_has_the_targets_dtype():
    model = tiny.llama().to(torch.bfloat16)
    assistant = assistants.dflash(model)
    check_same(model, DFlash(assistant, tree=4), tiny.prompt(0, 6), max_new_tokens=12)
    assert assistant.dtype == torch.float32
