"""MTP: predictions of the layers equal those computed without a cache; trees, budgets, and loading of layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import assistants, tiny
from support.architectures import GROUP, MIXED, MLA, MOE, VOCABULARY, Case, model_of
from support.cases import thinned
from support.recurrent_architectures import recurrent
from support.runs import check_perfect, check_same, drafted_steps, drafts_of, paths_of, profitable_depths
from transformers import AutoModelForCausalLM

import token_recycling as tr
from token_recycling.drafters import mtp
from token_recycling.drafters.mtp import Mtp
from token_recycling.model.compat import MtpCache
from token_recycling.model.target import Target

INKLING = recurrent("inkling_text").config
EXPERTS: dict[str, Any] = {**MOE, **GROUP}
FAMILIES = [
    Case("deepseek_v3", config={**EXPERTS, **MLA, "num_mtp_layers": 2}),
    Case("glm4_moe", config={**EXPERTS, "num_mtp_layers": 3}),
    Case("mellum", "window of 8", config={**EXPERTS, **MIXED, "num_mtp_layers": 1}),
    Case(
        "inkling_text",
        "window of 8",
        config={**INKLING, "unpadded_vocab_size": 80, "num_mtp_layers": 2, "mtp_local_layer_ids": []},
    ),
]


def layers_of(case, model):
    return assistants.mtp(model, case.config["num_mtp_layers"])


@torch.no_grad()
def expected_probabilities(model, layers, text, beyond):
    """(positions, vocabulary): one token of each layer by transformers' own chain, then `beyond` more of the last
    layer, all computed without a cache.
    """
    ids = torch.tensor([text])
    states = model.get_decoder()(input_ids=ids[:, :-1]).last_hidden_state
    places = torch.arange(1, len(text))[None]
    tokens, logits, _ = layers(ids[:, 1:], states, None, places, MtpCache(config=layers.config))
    if beyond:  # only with one layer
        assert len(layers.layers) == 1
        ids, own = ids[:, 1:], states
        for _ in range(beyond):
            outputs = layers.forward_layer(0, own, places, MtpCache(config=layers.config), input_ids=ids)
            own = torch.cat([own, outputs[:, -1:]], dim=1)
            ids, places = torch.cat([ids, tokens[:, -1:]], dim=1), torch.cat([places, places[:, -1:] + 1], dim=1)
            outputs = layers.forward_layer(0, own, places, MtpCache(config=layers.config), input_ids=ids)
            logits = torch.cat([logits, layers.shared_head(outputs[:, -1:])], dim=1)
            tokens = logits[:, -1:].argmax(-1)
    return logits[0].softmax(-1)


def best_paths(probabilities, k, nodes):
    """Return the most probable nodes of a chain with siblings, with their probabilities."""
    likely, tokens = probabilities.topk(k)
    found = {}
    for place in range(len(probabilities)):
        above, product = tuple(tokens[:place, 0].tolist()), float(likely[:place, 0].prod())
        found |= {(*above, int(tokens[place, rank])): product * float(likely[place, rank]) for rank in range(k)}
    return dict(sorted(found.items(), key=lambda item: -item[1])[:nodes])


@pytest.mark.parametrize(
    ("case", "piece"), thinned([(FAMILIES[0], 4), *((case, 512) for case in FAMILIES)], 2), ids=str
)
def test_drafts_equal_those_computed_without_a_cache(case, piece, monkeypatch):
    """Beyond attention windows, after rejections, after accepted siblings of the chain, and with prompts read in
    pieces.
    """
    monkeypatch.setattr(mtp, "_PIECE", piece)
    model = model_of(case)
    layers, prompt, new = layers_of(case, model), tiny.prompt(2, 9, VOCABULARY), 30
    depth = len(layers.layers) if len(layers.layers) > 1 else 3
    k = 30 if Target(model).info.branches else 1
    steps = drafted_steps(model, Mtp(layers, tree=60, k=k, depth=depth), prompt, max_new_tokens=new)
    assert len(steps[0][1].draft) == 1, "no state is known before the first forward pass"
    for text, step in steps[1:]:
        places = min(depth, new - (len(text) - 9) - 1)
        if places:
            beyond = depth - 1 if len(layers.layers) == 1 else 0
            probabilities = expected_probabilities(model, layers, text, beyond)[:places]
            drafted = dict(zip(paths_of(step.draft)[1:], step.draft.values[1:].tolist(), strict=True))
            assert drafted == pytest.approx(best_paths(probabilities, k, 60), rel=1e-3)
    lengths = {len(step.accepted) - 1 for _, step in steps}
    assert 0 in lengths, "there are rejections"
    assert k == 1 or max(lengths) > 0, "some drafts are accepted"


@pytest.mark.parametrize("case", FAMILIES[1::2], ids=str)
def test_prompt_may_be_shorter_than_the_number_of_layers(case):
    model = model_of(case)
    drafter = Mtp(layers_of(case, model), tree=6)
    for length in (1, 2, 3):
        check_same(model, drafter, tiny.prompt(3, length, VOCABULARY), max_new_tokens=9, do_sample=False)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_perfect_layers_are_always_accepted(counting, layers):
    """Also beyond the number of layers. Every pass of a layer counts as a cost of the draft."""
    drafter = Mtp(assistants.counting_mtp(counting, layers), tree=4, k=1, depth=4)
    stats = check_perfect(counting, drafter, depth=4)
    assert stats.drafter_statistics["draft_forwards"] == 3 * 4 + 3, "none for tokens beyond the end"


# options


def test_auto_drafts_the_depth_and_nodes_that_pay(counting, monkeypatch):
    """Layers slower than the target are not run."""
    layers, cheap = assistants.counting_mtp(counting, 1), (1.0, 1.001, 1.002, 1.003, 1.004)
    for price, seconds, depths in ((0.01, cheap, {4}), (0.01, (1.0, 90.0), {0}), (2.0, cheap, {0})):
        assert profitable_depths(monkeypatch, counting, Mtp(layers), price, seconds) == depths


# layers


def test_layers_are_loaded_from_the_targets_files(tmp_path):
    """In their authors' format."""
    case = FAMILIES[2]
    made = model_of(case)
    made.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    width, block = made.config.hidden_size, "model.layers.1."
    own = {f"mtp.layers.0.{name[len(block) :]}": weights[name] for name in weights if name.startswith(block)}
    own |= {f"mtp.{name}.weight": torch.rand(width) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    own["mtp.fc.weight"] = torch.randn(width, 2 * width)
    save_file(
        weights | {name: weight.contiguous().clone() for name, weight in own.items()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    layers = assistants.mtp(model, 1)
    with torch.no_grad():
        layer = layers.layers[0]
        layer.mtp_block.load_state_dict(model.model.layers[1].state_dict())
        layer.eh_proj.weight.copy_(own["mtp.fc.weight"])
        layer.enorm.weight.copy_(own["mtp.pre_fc_norm_embedding.weight"])
        layer.hnorm.weight.copy_(own["mtp.pre_fc_norm_hidden.weight"])
        layer.post_norm.weight.copy_(own["mtp.norm.weight"])
    wanted, found = (
        drafts_of(model, drafter, tiny.prompt(3, 7, VOCABULARY), max_new_tokens=10)
        for drafter in (Mtp(layers, tree=5), "mtp:tree=5")
    )
    assert max(len(tokens) for _, tokens in wanted) == 6
    assert found == wanted


def test_target_without_fitting_layers_is_refused():
    hybrid = model_of(recurrent("bailing_hybrid"))
    hybrid.config.mtp_layer_types, hybrid.config.mtp_mlp_layer_types = ["linear_attention"], ["sparse"]
    for model, drafter, said in (
        (tiny.llama(), Mtp(), "reads no MTP layers of LlamaForCausalLM .num_mtp_layers"),
        (model_of(FAMILIES[0]), Mtp(), "the 2 MTP layers of DeepseekV3"),
        (tiny.llama(), Mtp(assistants.mtp(tiny.llama(hidden_size=16))), "32, got 16"),
        (hybrid, Mtp(assistants.mtp(hybrid, 1)), "linear_attention"),
    ):
        with pytest.raises(ValueError, match=said):
            tr.generate(model, tiny.prompt(0, 5), drafter=drafter, max_new_tokens=4)


def test_given_layers_are_copied_and_use_the_targets_head_and_dtype(counting):
    layers = assistants.counting_mtp(counting)
    head, stats = layers.shared_head, tr.Stats()
    half = tiny.counting_llama().to(torch.bfloat16)
    tr.generate(half, torch.tensor([[1, 2]]), drafter=Mtp(layers, tree=4, k=1), max_new_tokens=21, stats=stats)
    assert stats.mat > 4
    assert layers.shared_head is head
    assert head.weight.dtype == torch.float32
