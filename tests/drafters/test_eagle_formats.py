"""Files of EAGLE heads: every format is read and computed as in its program; unknown keys and tensors are refused.
`support.eagle_heads` is the independent implementation of heads.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import tiny
from support.eagle_heads import (
    DRAFT,
    EAGLE_1,
    EAGLE_3,
    IDS,
    LAYER,
    SPECULATORS,
    VOCABULARY,
    WIDTH,
    normed,
    outputs_of,
    own_states,
    tensors_of,
    without,
    written,
)
from transformers import DynamicCache

import token_recycling as tr
from token_recycling.drafters._shared.saved import TrainedPartError
from token_recycling.drafters.eagle import Eagle
from token_recycling.drafters.eagle.formats import load_head, save_head
from token_recycling.model.target import Target

QWEN_3 = {**LAYER, "model_type": "qwen3", "head_dim": 8, "layer_types": ["full_attention"], "use_sliding_window": False}
IDLE = {
    "sliding_window": 512,
    "use_sliding_window": False,
    "max_window_layers": 36,
    "bos_token_id": 1,
    "modal_type": "VLM",
}
STATES = "eagle_aux_hidden_state_layer_ids"
MODEL_OPT = {STATES: [1, 11, 21], "use_aux_hidden_state": True, "use_last_layernorm": True, "next_layer_regular": True}
PUBLISHED = {
    **SPECULATORS,
    **{"architectures": ["Eagle3DraftModel"], "auto_map": {"": "config.Eagle3SpeculatorConfig"}, "dtype": "bfloat16"},
    **{"has_no_defaults_at_init": False, "tie_word_embeddings": False, "target_hidden_size": None},
}
WINDOW = {**LAYER, "layer_types": ["sliding_attention"], "sliding_window": 3, "use_sliding_window": True}
KNOWN: dict[str, dict[str, Any]] = {
    "EAGLE-1": EAGLE_1,
    "EAGLE-1 with biases in the attention": {**EAGLE_1, "qkv_bias": True},
    "EAGLE-1 of Mixtral": {**EAGLE_1, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"]},
    "EAGLE-1 without num_key_value_heads": without(EAGLE_1, "num_key_value_heads"),
    "EAGLE-3": {**EAGLE_3, "architectures": ["LlamaForCausalLM"]},
    "EAGLE-3 with the whole vocabulary": {**EAGLE_3, "draft_vocab_size": VOCABULARY},
    "EAGLE-3 without draft_vocab_size": without(EAGLE_3, "draft_vocab_size"),
    "EAGLE-3 with biases": {**EAGLE_3, "attention_bias": True, "bias": True},
    "SpecForge": {**EAGLE_3, **IDLE, "target_hidden_size": 16, "head_dim": 8, "norm_output": False},
    "SpecForge, EAGLE-3.1": {**EAGLE_3, "fc_norm": True, "norm_output": True},
    "AngelSlim": {**EAGLE_3, **IDLE, "architectures": ["Eagle3LlamaForCausalLM"], "target_model_type": "qwen3_vl"},
    "ModelOpt": {**EAGLE_3, "eagle_config": MODEL_OPT},
    "ModelOpt without the last norm": {**EAGLE_3, "eagle_config": {**MODEL_OPT, "use_last_layernorm": False}},
    "vLLM": {**EAGLE_3, STATES: [1, 2, 3, 5], "norm_before_fc": True, "num_aux_hidden_states": 4},
    "speculators": SPECULATORS,
    "speculators, as published": PUBLISHED,
    "speculators, norm_output": {**SPECULATORS, "norm_output": True},
    "speculators, target of another width": {**SPECULATORS, "target_hidden_size": 16},
    "speculators, norm_before_fc": {**SPECULATORS, "norm_before_fc": True},
    "speculators, fc_norm": {**SPECULATORS, "fc_norm": True},
    "speculators, qwen3": {**SPECULATORS, "transformer_layer_config": QWEN_3},
    "speculators, two layers": {**SPECULATORS, "transformer_layer_config": {**LAYER, "num_hidden_layers": 2}},
    "speculators, a window": {**PUBLISHED, "transformer_layer_config": WINDOW},
    "speculators, four states": {**SPECULATORS, STATES: [1, 2, 3, 5]},
}


def head_of(folder, config, pickled=False):
    """Return a head read from files of a format, and its tensors."""
    tensors = tensors_of({**config, "draft_vocab_size": VOCABULARY} if config is KNOWN[_SILENT] else config)
    return load_head(written(folder, config, dict(tensors), pickled)), tensors


_SILENT = "EAGLE-3 without draft_vocab_size"


def compute_outputs(saved, embedded, states, places):
    """Return outputs (n, WIDTH) of rows that attend to the rows before them."""
    visible = torch.ones(len(places), len(places), dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        return saved.head(embedded[None], states[None], places[None], visible, DynamicCache(), places)[0]


@pytest.mark.parametrize("config", KNOWN.values(), ids=KNOWN.keys())
def test_head_computes_the_same_as_its_program(config, tmp_path):
    saved, tensors = head_of(tmp_path, config)
    shape = saved.head.shape
    embedded, read, places = torch.randn(7, WIDTH), torch.randn(7, shape.read_width), torch.arange(3, 10)
    states = saved.head.fused(read)
    assert torch.allclose(states, own_states(config, tensors, read), atol=1e-5)
    ours = compute_outputs(saved, embedded, states, places)
    wanted = outputs_of(config, tensors, embedded, states, places)
    assert torch.allclose(ours, wanted, atol=1e-4)
    if shape.version == 1:
        assert torch.equal(saved.head.fed(ours), ours), "its outputs are fed back unchanged"
        assert torch.equal(saved.head.logits(ours, torch.nn.Identity()), ours), "the given output layer is applied"
        return
    normal = normed(wanted, tensors["norm.weight"]) if "norm.weight" in tensors else wanted
    assert torch.allclose(saved.head.fed(ours), normal if config.get("norm_output") else wanted, atol=1e-4)
    logits = saved.head.logits(ours, torch.nn.Identity())
    assert torch.allclose(logits, normal @ tensors["lm_head.weight"].T, atol=1e-4)


def test_states_that_a_head_reads(tmp_path):
    """By default the inputs of layers 2, n / 2 and n - 3; for EAGLE-1 the output of the final norm."""
    assert head_of(tmp_path / "1", EAGLE_1)[0].head.shape.states_of(32) == (32,)
    saved = head_of(tmp_path / "3", EAGLE_3)[0]
    assert saved.head.shape.states_of(32) == (2, 16, 29)
    assert saved.head.ids.tolist() == IDS.tolist()
    assert head_of(tmp_path / "all", KNOWN["EAGLE-3 with the whole vocabulary"])[0].head.ids is None
    none = {**SPECULATORS, "eagle_aux_hidden_state_layer_ids": None}
    assert head_of(tmp_path / "s", none)[0].head.shape.states_of(28) == (2, 14, 25)
    for number, name in enumerate(("speculators, four states", "vLLM")):
        assert head_of(tmp_path / str(number), KNOWN[name])[0].head.shape.states_of(32) == (1, 2, 3, 5)
    assert head_of(tmp_path / "outputs", KNOWN["ModelOpt"])[0].head.shape.states_of(24) == (2, 12, 22)


def test_weights_in_several_files_and_with_the_prefix_of_a_model(tmp_path):
    config = {**EAGLE_3, "draft_vocab_size": VOCABULARY}
    tensors = tensors_of(config)
    marks = {"d2t": torch.zeros(VOCABULARY, dtype=torch.long), "t2d": torch.zeros(VOCABULARY, dtype=torch.bool)}
    whole = {f"model.{name}": tensor for name, tensor in {**tensors, **marks, "rotary_emb.inv_freq": IDS}.items()}
    written(tmp_path, config, whole)
    names, files = [*whole], ["a.safetensors", "b.safetensors"]
    for number, file in enumerate(files):
        save_file({name: whole[name] for name in names[number::2]}, tmp_path / file)
    places = {name: files[number % 2] for number, name in enumerate(names)}
    (tmp_path / "model.safetensors").rename(tmp_path / "whole.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    saved = load_head(tmp_path)
    assert saved.head.ids is None
    assert all(torch.equal(saved.head.state_dict()[name], tensor) for name, tensor in tensors.items())


def test_head_without_an_output_layer_uses_the_targets(tmp_path):
    config = {**EAGLE_3, "draft_vocab_size": VOCABULARY}
    saved = load_head(written(tmp_path, config, without(tensors_of(config), "lm_head.weight")))
    states = torch.randn(3, WIDTH)
    assert torch.equal(saved.head.logits(states, torch.nn.Identity()), saved.head.norm(states))


def test_keys_without_a_known_meaning_are_ignored_with_a_warning(tmp_path, caplog):
    """Such as those of a target; not if they are empty."""
    written(tmp_path, {**EAGLE_3, "use_qk_norm": True, "new_thing": None, "im_end_token_id": 5}, tensors_of(EAGLE_3))
    load_head(tmp_path)
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == ["use_qk_norm=True"]


@pytest.mark.parametrize(
    ("change", "theta", "factor"),
    [
        ({}, 10000.0, 1),
        ({"rope_theta": None, "rope_scaling": None}, 10000.0, 1),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}, 1000.0, 1),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 10000.0, 4),
        ({"rope_theta": 500.0, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}, 500.0, 1),
        ({"rope_scaling": {"type": "default", "rope_type": "default", "mrope_interleaved": True}}, 10000.0, 1),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}, "rope_theta": 90.0}, 90.0, 2),
    ],
)
def test_rotary_parameters_are_those_of_the_file(change, theta, factor, tmp_path):
    """The base is 10,000 if the file has none, whatever the target's."""
    config = {**EAGLE_3, **change}
    saved, tensors = head_of(tmp_path, config)
    embedded, states, places = torch.randn(5, WIDTH), torch.randn(5, WIDTH), torch.arange(50, 55)
    wanted = outputs_of(config, tensors, embedded, states, places / factor, theta=theta)
    assert torch.allclose(compute_outputs(saved, embedded, states, places), wanted, atol=1e-4)


def test_embedding_of_the_file_is_used_if_it_differs(tmp_path):
    """EAGLE-1's is a copy of the target's; EAGLE-3's may be trained, or have the head's own width."""
    model = tiny.llama(num_hidden_layers=6)
    theirs = model.get_input_embeddings().weight.detach()
    for config, held, own in (
        (EAGLE_1, theirs + 1, False),
        (EAGLE_3, None, False),
        (EAGLE_3, theirs.clone(), False),
        (EAGLE_3, theirs + 1, True),
    ):
        tensors = tensors_of(config)
        folder = written(
            tmp_path / "head", config, tensors if held is None else {**tensors, "embed_tokens.weight": held}
        )
        placed = Eagle(folder).placed(Target(model))
        assert (placed.embedding is not model.get_input_embeddings()) is own
        assert torch.equal(placed.embed(torch.tensor([5]))[0, 0], theirs[5] + own)


# invalid files


UNSUPPORTED = [
    (EAGLE_1, {"num_hidden_layers": 2}, "got 2"),
    (EAGLE_1, {"num_attention_heads": 5}, "not a multiple of the number of attention heads"),
    (EAGLE_1, {"hidden_act": "bent"}, "'bent'"),
    (EAGLE_1, {"architectures": ["MedusaForCausalLM"]}, "MedusaForCausalLM"),
    (without(EAGLE_1, "intermediate_size"), {}, "intermediate_size"),
    (EAGLE_1, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config={'quant_method': 'fp8'}"),
    (EAGLE_3, {"architectures": ["PEagleDraftModel"]}, "PEagleDraftModel"),
    (EAGLE_3, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False"),
    (EAGLE_3, {"rope_scaling": {"type": "new"}}, "'new'"),
    (SPECULATORS, {"speculators_model_type": "eagle"}, "'eagle'; EAGLE-1 heads are read in the authors' format"),
    (SPECULATORS, {"speculators_model_type": "peagle"}, "peagle is unsupported"),
    (SPECULATORS, {"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm"),
    (SPECULATORS, {"transformer_layer_config": {**LAYER, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    (SPECULATORS, {"transformer_layer_config": {**LAYER, "model_type": "mistral"}}, "'mistral'"),
    (SPECULATORS, {"transformer_layer_config": without(QWEN_3, "head_dim")}, "head_dim"),
    (SPECULATORS, {"transformer_layer_config": {**QWEN_3, "layer_types": ["linear_attention"]}}, "layer_types="),
    (SPECULATORS, {"transformer_layer_config": without(WINDOW, "sliding_window")}, "sliding_window is missing"),
    (SPECULATORS, {"transformer_layer_config": {**WINDOW, "num_hidden_layers": 2}}, "layer_types must name 2"),
    (without(SPECULATORS, "transformer_layer_config"), {}, "transformer_layer_config"),
]


@pytest.mark.parametrize(
    ("config", "change", "words"), UNSUPPORTED, ids=lambda one: one if isinstance(one, str) else ""
)
def test_unsupported_values_are_named(config, change, words, tmp_path):
    is_first = "speculators_model_type" not in config and "draft_vocab_size" not in config
    written(tmp_path, {**config, **change}, tensors_of(EAGLE_1 if is_first else EAGLE_3))
    with pytest.raises(TrainedPartError) as error:
        load_head(tmp_path)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("config", "name", "value", "words"),
    [
        (EAGLE_1, "layers.0.input_layernorm.weight", torch.ones(WIDTH), "layers.0.input_layernorm.weight"),
        (EAGLE_1, "fc.bias", None, "fc.bias"),
        (EAGLE_1, "d2t", torch.zeros(DRAFT, dtype=torch.long), "d2t"),
        (EAGLE_3, "fc.weight", torch.ones(WIDTH, 2 * WIDTH), r"fc.weight .*\(32, 96\), got \(32, 64\)"),
        (EAGLE_3, "input_norm.weight", torch.ones(3 * WIDTH), "input_norm.weight"),
        (EAGLE_3, "d2t", None, r"d2t .*\(24,\)"),
        (EAGLE_3, "d2t", torch.full((DRAFT,), 60), "24 .*64"),
        (EAGLE_3, "t2d", torch.ones(VOCABULARY, dtype=torch.bool), "t2d .*24"),
        (EAGLE_3, "embed_tokens.weight", torch.ones(VOCABULARY - 1, WIDTH), r"embed_tokens.weight .*\(64, 32\), got"),
        (SPECULATORS, "verifier_lm_head.weight", torch.ones(2, 2), "verifier_lm_head.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_named(config, name, value, words, tmp_path):
    tensors = tensors_of(config)
    tensors.pop(name, None)
    written(tmp_path, config, tensors if value is None else {**tensors, name: value})
    with pytest.raises(TrainedPartError, match=words):
        load_head(tmp_path)


def test_invalid_head_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        load_head(tmp_path)
    folder, weights = written(tmp_path / "head", EAGLE_1, tensors_of(EAGLE_1), pickled=True), "pytorch_model.bin"
    assert torch.equal(load_head(folder).head.state_dict()["fc.weight"], tensors_of(EAGLE_1)["fc.weight"]), "pickled"
    for pickled, value in (([1], "got list"), ({"fc.weight": print}, weights)):
        torch.save(pickled, folder / weights)
        with pytest.raises(TrainedPartError, match=value):
            load_head(folder)
    for name, content in (("model.safetensors", "nothing"), ("config.json", "{")):
        (folder / name).write_text(content)
        with pytest.raises(TrainedPartError, match=name):
            load_head(folder)


@pytest.mark.parametrize(
    ("config", "sizes", "words"),
    [
        (EAGLE_1, {"hidden_size": 64}, "64, .*got 32"),
        (EAGLE_3, {"vocab_size": 80}, "80, .*got 64"),
        (KNOWN["speculators, target of another width"], {"hidden_size": 16}, "embed_tokens"),
        (KNOWN["speculators, four states"], {"num_hidden_layers": 5}, "last layer, number 4, before the final norm"),
        (EAGLE_3, {"num_hidden_layers": 2}, r"LlamaForCausalLM has hidden states 0 to 2, got \[2, 1, -1\]"),
    ],
)
def test_head_for_another_model_is_refused(config, sizes, words, tmp_path):
    head_of(tmp_path, config)
    with pytest.raises(ValueError, match=words):
        tr.generate(tiny.llama(**sizes), tiny.prompt(0, 4), drafter=Eagle(tmp_path), max_new_tokens=4)


def test_saved_head_is_read_back_and_bound_to_its_model(tmp_path):
    model = tiny.llama(num_hidden_layers=6)
    for config in (EAGLE_1, EAGLE_3):
        saved, _ = head_of(tmp_path / "from", config)
        save_head(tmp_path / "to", saved.head, model, acceptance=[[0.5]])
        read = load_head(tmp_path / "to")
        assert read.facts["acceptance"] == [[0.5]]
        assert read.head.shape.states_of(6) == saved.head.shape.states_of(6)
        assert (read.head.ids is None) is (saved.head.ids is None)
        for name, weight in saved.head.state_dict().items():
            assert torch.equal(read.head.state_dict()[name], weight), name
        Eagle(tmp_path / "to").check(Target(model))
        with pytest.raises(TrainedPartError, match="another model"):
            Eagle(tmp_path / "to").check(Target(tiny.llama(seed=1, num_hidden_layers=6)))
