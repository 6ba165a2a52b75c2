"""EAGLE heads on disk: reads configurations, and checks tensors by name and shape.

Two formats are supported: the authors' own, for EAGLE-1 and -2 and for EAGLE-3, which SpecForge, AngelSlim, TorchSpec
and ModelOpt write with more keys; and that of speculators. A folder contains `config.json` and the weights, in one file
or in several with an index. Heads trained here are written in the authors' formats, with an `eagle.json` that names the
target.

Configurations contain dozens of keys of other models, which no program for heads reads: a key without a meaning here is
ignored, with a warning if it has a value. Tensors decide about biases and query norms. An unknown tensor is an error.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..._util.files import replacing
from .._shared.saved import TrainedPartError, describe_part, described_part, read_tensors
from .head import Eagle1Head, Eagle3Head, EagleHead, HeadShape

logger = logging.getLogger("token_recycling")

KIND = "eagle"
_CONFIG, _WEIGHTS, _PICKLED, _INDEX = "config.json", "model.safetensors", "pytorch_model.bin", ".index.json"
_EMBEDDING, _OUTPUT = "embed_tokens.weight", "lm_head.weight"
THETA = 10000.0
"""Base of the rotary positions if a configuration has none, as in the authors' code; never the target's."""

_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_OPTIONAL = ("head_dim", "hidden_act", "max_position_embeddings", "num_key_value_heads", "rms_norm_eps")
_LAYER = frozenset(
    (
        *_SIZES,
        *_OPTIONAL,
        *("attention_bias", "layer_types", "mlp_bias", "model_type", "num_hidden_layers"),
        *("rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "use_sliding_window"),
    )
)
_HEAD = frozenset(
    (
        *("architectures", "bias", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "fc_norm"),
        *("norm_before_fc", "norm_before_residual", "norm_output", "num_aux_hidden_states", "qkv_bias"),
        "target_hidden_size",
    )
)
_PLAIN = {
    "is_causal": True,
    "logit_scale": 1.0,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_drafting": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_mtp_layernorm": False,
}
"""Keys that change the output of a head and are supported with this value only."""
_IDLE = frozenset(
    (
        *("_name_or_path", "attention_dropout", "auto_map", "dtype", "embed_requires_grad", "initializer_range"),
        *("max_window_layers", "modal_type", "parallel_draft_heads_num_layers", "pretraining_tp", "return_dict"),
        *("speculators_config", "speculators_model_type", "speculators_version", "target_model_type"),
        *("tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache"),
    )
)
"""Keys that do not affect the output of a head; nor does one that ends in _token_id."""
_OTHERS = ("deepseek", "dflash", "dspark", "hydra", "medusa", "peagle")
"""Parts of the names of architectures that are no heads with layers of Llama or Qwen3."""


@dataclass
class SavedHead:
    """A head as read from disk."""

    head: EagleHead
    embedding: torch.Tensor | None
    """(vocabulary, width): the embedding in the file; None to use the target's."""
    facts: dict[str, Any]
    """Facts about its training; empty for a head from other sources."""


def load_head(folder: str | os.PathLike[str]) -> SavedHead:
    """Return the head in a folder; raises TrainedPartError for an invalid head, FileNotFoundError if there is none."""
    where = Path(folder).expanduser()
    weights = [name for name in (_WEIGHTS, _PICKLED) if any((where / f"{name}{end}").is_file() for end in ("", _INDEX))]
    if not (where / _CONFIG).is_file() or not weights:
        raise FileNotFoundError(
            f"{where} has no {_CONFIG} with {_WEIGHTS} or {_PICKLED}; use the folder of an "
            "EAGLE head, or train one with `token-recycling train eagle`"
        )
    config = _json(where / _CONFIG)
    tensors = _tensors(where, weights[0])
    try:
        shape = shape_of(config, tensors)
        embedding, ids = tensors.pop(_EMBEDDING, None), _ids(tensors, shape)
        head = Eagle1Head(shape) if shape.version == 1 else Eagle3Head(shape, ids)
        _match_biases(head, tensors)
        sizes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
        if shape.version == 1:  # the target's are used
            embedding, _ = None, tensors.pop(_OUTPUT, None)
        if embedding is not None:
            _check({_EMBEDDING: embedding}, {_EMBEDDING: (shape.layer.vocab_size, shape.width)})
        _check(tensors, sizes)
    except ValueError as error:
        raise TrainedPartError(f"{where}: {error}") from None
    head.load_state_dict(tensors)
    facts = described_part(where, KIND) if (where / f"{KIND}.json").is_file() else {}
    return SavedHead(head.requires_grad_(False), embedding, facts)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TrainedPartError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise TrainedPartError(f"{path}: must be a JSON object, got {type(content).__name__}")
    return content


def _tensors(where: Path, name: str) -> dict[str, torch.Tensor]:
    """Return the tensors of the file `name`, or of all files that its index names; without the prefix of a model."""
    files = [name]
    if not (where / name).is_file():
        files = sorted(set(_json(where / f"{name}{_INDEX}").get("weight_map", {}).values()))
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= read_tensors(where / file)
    plain = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in plain.items() if not name.endswith("rotary_emb.inv_freq")}


def shape_of(config: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> HeadShape:
    """Return the shape that a configuration and tensors specify; renames the tensors of the first layer of EAGLE-3.
    Raises ValueError for unsupported values.
    """
    kind = config.get("speculators_model_type")
    for name in [kind or "eagle3", *(config.get("architectures") or ())]:
        if any(other in name.lower() for other in _OTHERS):
            raise ValueError(
                f"{name} is unsupported; supported: heads of EAGLE-1, -2 and -3 with layers of Llama or Qwen3"
            )
    if kind not in (None, "eagle3"):
        raise ValueError(
            f"speculators_model_type must be eagle3, got {kind!r}; EAGLE-1 heads are read in the authors' format"
        )
    if kind is None and not _is_eagle3(config, tensors):
        return _of_eagle1(config, tensors)
    for name in [name for name in tensors if name.startswith("layers.0.")]:
        tensors[name.replace("layers.0.", "midlayer.", 1)] = tensors.pop(name)
    return _of_speculators(config, tensors) if kind else _of_eagle3(config, tensors)


def _is_eagle3(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> bool:
    return "draft_vocab_size" in config or any(
        name.split(".")[0] == "midlayer" or "hidden_norm" in name for name in tensors
    )


def _of_eagle1(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> HeadShape:
    _check_keys(config, _LAYER | _HEAD)
    layers = config.get("num_hidden_layers", 1)
    if layers != 1:
        raise ValueError(f"num_hidden_layers must be 1 in an EAGLE-1 head, got {layers}")
    layer, windows = _layer(config, "llama", 1)
    return HeadShape(1, layer, layer.hidden_size, windows=windows, fc_bias=config.get("bias", True))


def _of_eagle3(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> HeadShape:
    """The programs for this format have one layer, or those in the file, and count layers of the target whose outputs
    are read in `eagle_config`, and whose inputs elsewhere.
    """
    nested = config.get("eagle_config") or {}
    _check_keys(config, _LAYER | _HEAD | {"eagle_config"})
    _check_keys(nested, _HEAD | {"use_last_layernorm"})
    outputs = nested.get("eagle_aux_hidden_state_layer_ids") or ()
    layers = 1 + len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    merged = {**nested, **config, "eagle_aux_hidden_state_layer_ids": [number + 1 for number in outputs]}
    if config.get("eagle_aux_hidden_state_layer_ids"):
        merged["eagle_aux_hidden_state_layer_ids"] = config["eagle_aux_hidden_state_layer_ids"]
    has_query_norms = any(name.endswith(".q_norm.weight") for name in tensors)
    layer, windows = _layer(config, "qwen3" if has_query_norms else "llama", layers)
    return _eagle3_shape(merged, tensors, layer, windows)


def _of_speculators(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> HeadShape:
    inner = _wanted(config, "transformer_layer_config")
    _check_keys(config, _HEAD | {"transformer_layer_config"})
    _check_keys(inner, _LAYER | {"architectures"})
    layer, windows = _layer(inner, inner.get("model_type", "llama"), inner.get("num_hidden_layers") or 1)
    return _eagle3_shape(config, tensors, layer, windows)


def _eagle3_shape(
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    layer: LlamaConfig | Qwen3Config,
    windows: tuple[int, ...],
) -> HeadShape:
    flags = {name: bool(config.get(name)) for name in ("norm_before_residual", "norm_before_fc", "fc_norm")}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise ValueError("norm_before_fc and fc_norm cannot be combined: their order is not defined")
    output, states = tensors.get(_OUTPUT), config.get("eagle_aux_hidden_state_layer_ids")
    draft = config.get("draft_vocab_size") or (layer.vocab_size if output is None else len(output))
    return HeadShape(
        3,
        layer,
        config.get("target_hidden_size") or layer.hidden_size,
        states=tuple(states) if states else None,
        draft_vocabulary=draft,
        windows=windows,
        fc_bias="fc.bias" in tensors,
        own_output=output is not None or draft != layer.vocab_size,
        last_norm=config.get("use_last_layernorm") is not False,
        feeds_normed=bool(config.get("norm_output")),
        **flags,
    )


_FAMILIES: dict[str, type[LlamaConfig | Qwen3Config]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}


def _layer(config: Mapping[str, Any], family: str, layers: int) -> tuple[LlamaConfig | Qwen3Config, tuple[int, ...]]:
    """Return the configuration of a head's layers, and the window of each."""
    if family not in _FAMILIES:
        raise ValueError(f"model_type must be {' or '.join(_FAMILIES)}, got {family!r}")
    sizes = {name: _wanted(config, name) for name in _SIZES}
    optional = {name: config[name] for name in _OPTIONAL if config.get(name) is not None}
    kinds = [*(config.get("layer_types") or ())][:layers]
    if {*kinds} - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types={kinds} is unsupported: layers must use full or sliding attention")
    windows = [_wanted(config, "sliding_window") if kind == "sliding_attention" else 0 for kind in kinds]
    if config.get("use_sliding_window") is False or not any(windows):
        windows = []
    elif len(windows) < layers:
        raise ValueError(f"layer_types must name {layers} layers, got {kinds}")
    shape = {"num_hidden_layers": layers, "num_key_value_heads": sizes["num_attention_heads"]}
    if "head_dim" not in optional and family == "qwen3":  # its own default is 128, whatever the sizes
        raise ValueError("head_dim is missing from the configuration of the qwen3 layer")
    if optional.get("hidden_act", "silu") not in ACT2FN:
        raise ValueError(f"hidden_act {optional['hidden_act']!r} is unknown to transformers")
    shape |= {**sizes, **optional, "rope_parameters": _rope(config, {*kinds} or {"full_attention"})}
    try:
        return _FAMILIES[family](**shape, attn_implementation="sdpa"), tuple(windows)
    except (StrictDataclassError, TypeError) as error:
        raise ValueError(f"invalid configuration of a {family} layer: {' '.join(str(error).split())}") from None


def _rope(config: Mapping[str, Any], kinds: Collection[str]) -> dict[str, Any]:
    """Return the rotary parameters of layers of these kinds. The three positions of mrope are the same in text."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in rope.values()):
        if len(kinds) > 1:
            raise ValueError(f"rope_parameters must be the same in all layers, got {rope}")
        rope = dict(rope.get(*kinds) or {})
    kinds = rope.pop("rope_type", None), rope.pop("type", None)
    kind = next((name for name in kinds if name not in (None, "default", "mrope")), "default")
    if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
        raise ValueError(f"rope_type must be default, mrope or one of {', '.join(ROPE_INIT_FUNCTIONS)}, got {kind!r}")
    _check_keys({"partial_rotary_factor": rope.get("partial_rotary_factor")}, ())
    rope = {name: value for name, value in rope.items() if not name.startswith("mrope")}
    return {**rope, "rope_type": kind, "rope_theta": rope.get("rope_theta") or config.get("rope_theta") or THETA}


def _check_keys(config: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ValueError for unsupported values, and warn of values without a known meaning."""
    unknown = {}
    for name, value in config.items():
        if value == _PLAIN.get(name) or value is None or name in _IDLE or name.endswith("_token_id"):
            continue
        if name in _PLAIN:
            raise ValueError(f"{name}={value!r} is unsupported")
        if name not in known and value not in (False, "", [], {}):
            unknown[name] = value
    if unknown:
        listed = ", ".join(f"{name}={value!r}" for name, value in unknown.items())
        logger.warning("ignored keys without a known meaning in the configuration of an EAGLE head: %s", listed)


def _wanted(config: Mapping[str, Any], name: str) -> Any:
    if config.get(name) is None:
        raise ValueError(f"{name} is missing from the configuration")
    return config[name]


def _match_biases(head: EagleHead, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give the matrices of the layers the biases in the file: programs differ in the keys that specify them."""
    for name, module in head.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not head.fc and f"{name}.bias" in tensors:
            module.bias = torch.nn.Parameter(torch.empty(module.out_features))


def _ids(tensors: dict[str, torch.Tensor], shape: HeadShape) -> torch.Tensor | None:
    """Return the target's id of each of the head's tokens; removes the tensors that define it from `tensors`."""
    offsets, marks = tensors.pop("d2t", None), tensors.pop("t2d", None)
    vocabulary, draft = shape.layer.vocab_size, shape.draft_vocabulary
    if shape.version == 1 and offsets is not None:
        raise ValueError("d2t is not allowed in an EAGLE-1 head")
    if shape.version == 1 or (draft == vocabulary and (offsets is None or not offsets.any())):
        return None
    if offsets is None or tuple(offsets.shape) != (draft,):
        got = None if offsets is None else tuple(offsets.shape)
        raise ValueError(f"d2t must have shape ({draft},), an offset for each token of the head, got {got}")
    ids = torch.arange(draft) + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary or len(ids.unique()) < draft:
        raise ValueError(f"d2t is invalid: added to 0, 1, 2, ... it must give {draft} distinct ids below {vocabulary}")
    if marks is not None and (
        tuple(marks.shape) != (vocabulary,) or marks.sum() != draft or not marks.bool()[ids].all()
    ):
        raise ValueError(f"t2d contradicts d2t: it must mark the same {draft} ids among {vocabulary}")
    return ids


def _check(tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError for the first tensor that is missing, unknown or of the wrong shape."""
    for name, size in wanted.items():
        if name not in tensors:
            raise ValueError(f"tensor {name} of shape {size} is missing")
        if tuple(tensors[name].shape) != size:
            raise ValueError(f"{name} must have shape {size}, got {tuple(tensors[name].shape)}")
    for name in tensors:
        if name not in wanted:
            raise ValueError(f"unknown tensor {name}: this head has no such parameter")


def save_head(folder: str | os.PathLike[str], head: EagleHead, model: PreTrainedModel, **facts: Any) -> None:
    """Write a head trained for `model` in the authors' format; `load_head` returns `facts`."""
    where, shape, tensors = Path(folder), head.shape, dict(head.state_dict())
    layer = shape.layer
    size, bias = shape.draft_vocabulary, shape.fc_bias
    writable = HeadShape(shape.version, layer, layer.hidden_size, draft_vocabulary=size, fc_bias=bias)
    assert shape == writable, "only heads in the shapes that are trained here can be written"
    names = ("attention_bias", "mlp_bias", "model_type", "num_hidden_layers", *_SIZES, *_OPTIONAL)
    config: dict[str, Any] = {name: getattr(layer, name) for name in sorted(names)}
    config["rope_theta"] = layer.rope_parameters["rope_theta"]
    if shape.version == 1:
        config |= {"architectures": ["LlamaForCausalLMEagle"], "bias": shape.fc_bias}
    else:
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": shape.draft_vocabulary}
    if head.ids is not None:
        marks = torch.zeros(layer.vocab_size, dtype=torch.bool)
        marks[head.ids.cpu()] = True
        tensors |= {"d2t": head.ids.cpu() - torch.arange(len(head.ids)), "t2d": marks}
    with replacing(where / _WEIGHTS) as temporary:
        contents = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(contents, temporary, metadata={"format": "pt"})
    with replacing(where / _CONFIG) as temporary:
        Path(temporary).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    describe_part(where, KIND, model, facts)
