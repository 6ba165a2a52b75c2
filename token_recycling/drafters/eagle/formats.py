"""EAGLE heads on disk: reads configurations, and checks tensors by name and shape.

Three formats are supported: the authors' own, for EAGLE-1 and -2 and for EAGLE-3; SpecForge's, which is the latter with
more keys; and that of speculators, which vLLM reads. A folder contains `config.json` and the weights, in
`model.safetensors` or `pytorch_model.bin`. Heads trained here are written in the authors' formats, with an `eagle.json`
that names the target. An unknown key or tensor is an error: it may change the head's output.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config
from transformers.activations import ACT2FN

from ..._util.files import replacing
from .._shared.saved import TrainedPartError, describe_part, described_part
from .head import Eagle1Head, Eagle3Head, EagleHead, HeadShape

KIND = "eagle"
_CONFIG, _WEIGHTS, _PICKLED = "config.json", "model.safetensors", "pytorch_model.bin"
_EMBEDDING = "embed_tokens.weight"
THETA = 10000.0
"""Base of the rotary positions if a configuration has none, as in the authors' code; never the target's."""

_IDLE = (
    *("_name_or_path", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "initializer_range"),
    *("max_window_layers", "pad_token_id", "pretraining_tp", "tie_word_embeddings", "torch_dtype"),
    *("transformers_version", "use_cache"),
)
"""Keys that do not affect the output of a head."""
_LAYER = frozenset(
    (
        *("attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings"),
        *("mlp_bias", "model_type", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps"),
        *("rope_parameters", "rope_scaling", "rope_theta", "vocab_size"),
    )
)
_ATTENTION = ("sliding_window", "use_sliding_window", "layer_types")
"""Keys that must specify full attention."""
_ARCHITECTURES = ("LlamaForCausalLM", "LlamaForCausalLMEagle", "LlamaForCausalLMEagle3", "Eagle3Speculator")


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
    if not (where / _CONFIG).is_file() or not any((where / name).is_file() for name in (_WEIGHTS, _PICKLED)):
        raise FileNotFoundError(
            f"{where} has no {_CONFIG} with {_WEIGHTS} or {_PICKLED}; use the folder of an "
            "EAGLE head, or train one with `token-recycling train eagle`"
        )
    try:
        config = json.loads((where / _CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise TrainedPartError(f"{where / _CONFIG}: not valid JSON: {error}") from None
    tensors = _tensors(where)
    try:
        shape = shape_of(config, tensors)
        embedding, ids = tensors.pop(_EMBEDDING, None), _ids(tensors, shape)
        head = Eagle1Head(shape) if shape.version == 1 else Eagle3Head(shape, ids)
        _check(tensors, {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()})
    except ValueError as error:
        raise TrainedPartError(f"{where}: {error}") from None
    head.load_state_dict(tensors)
    facts = described_part(where, KIND) if (where / f"{KIND}.json").is_file() else {}
    return SavedHead(head.requires_grad_(False), None if shape.version == 1 else embedding, facts)


def _tensors(where: Path) -> dict[str, torch.Tensor]:
    path = where / (_WEIGHTS if (where / _WEIGHTS).is_file() else _PICKLED)
    try:
        tensors = load_file(path) if path.name == _WEIGHTS else torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise TrainedPartError(f"{path}: cannot be read as weights ({error})") from None
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise TrainedPartError(f"{path}: must be a mapping from names to tensors, got {type(tensors).__name__}")
    return tensors


def shape_of(config: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> HeadShape:
    """Return the shape that a configuration specifies; renames tensors of speculators. Raises ValueError for unknown
    values.
    """
    for name in config.get("architectures") or ():
        if name not in _ARCHITECTURES:
            raise ValueError(f"architecture {name} is unsupported; supported: {', '.join(_ARCHITECTURES)}")
    if "speculators_model_type" in config:
        return _of_speculators(config, tensors)
    if "draft_vocab_size" in config or any(name.startswith("midlayer.") for name in tensors):
        return _of_eagle3(config)
    return _of_eagle1(config)


def _of_eagle1(config: Mapping[str, Any]) -> HeadShape:
    _known(config, _LAYER | {"architectures", "bias", "qkv_bias"})
    layer = _layer(config)
    if layer.num_hidden_layers != 1:
        raise ValueError(f"num_hidden_layers must be 1 in an EAGLE-1 head, got {layer.num_hidden_layers}")
    biases = {"fc_bias": config.get("bias", True), "qkv_bias": config.get("qkv_bias", False)}
    return HeadShape(1, layer, layer.hidden_size, **biases)


def _of_eagle3(config: Mapping[str, Any]) -> HeadShape:
    keys = {"architectures", "draft_vocab_size", "target_hidden_size", "qkv_bias", "fc_norm", "norm_output"}
    _known(config, _LAYER | keys)
    return _eagle3_shape(
        config,
        _layer(config),
        qkv_bias=config.get("qkv_bias", False),
        fc_norm=config.get("fc_norm", False),
        norm_logits=config.get("norm_output", True),  # not speculators' option of this name
    )


def _eagle3_shape(config: Mapping[str, Any], layer: LlamaConfig | Qwen3Config, **more: Any) -> HeadShape:
    size, vocabulary = config.get("target_hidden_size"), config.get("draft_vocab_size")
    return HeadShape(3, layer, size or layer.hidden_size, draft_vocabulary=vocabulary or layer.vocab_size, **more)


def _of_speculators(config: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> HeadShape:
    if config["speculators_model_type"] != "eagle3":
        raise ValueError(
            f"speculators_model_type must be eagle3, got {config['speculators_model_type']!r}; "
            "EAGLE-1 heads are read in the authors' format"
        )
    flags = {"norm_before_residual", "norm_before_fc", "fc_norm"}
    stated = {"architectures", "draft_vocab_size", "norm_output", "target_hidden_size", "transformer_layer_config"}
    idle = {"speculators_model_type", "speculators_version", "speculators_config", "embed_requires_grad"}
    _known(config, flags | stated | idle | {"eagle_aux_hidden_state_layer_ids"})
    inner = _wanted(config, "transformer_layer_config")
    _known(inner, _LAYER | {"architectures", *_ATTENTION})
    if config.get("norm_before_fc") and config.get("fc_norm"):
        raise ValueError("norm_before_fc and fc_norm cannot be combined: their order is not defined")
    states = config.get("eagle_aux_hidden_state_layer_ids")
    for name in [name for name in tensors if name.startswith("layers.0.")]:
        tensors[name.replace("layers.0.", "midlayer.", 1)] = tensors.pop(name)
    return _eagle3_shape(
        config,
        _layer(inner),
        states=tuple(states) if states else None,
        feeds_normed=config.get("norm_output", False),
        **{name: config.get(name, False) for name in flags},
    )


def _layer(config: Mapping[str, Any]) -> LlamaConfig | Qwen3Config:
    families: dict[str, type[LlamaConfig | Qwen3Config]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
    family = config.get("model_type", "llama")
    if family not in families:
        raise ValueError(f"model_type must be {' or '.join(families)}, got {family!r}")
    for name in _ATTENTION:
        value = config.get(name)
        if value and (name != "layer_types" or set(value) != {"full_attention"}):
            raise ValueError(f"{name}={value} is unsupported: layers must use full attention")
    rope = {"rope_type": "default", "rope_theta": config.get("rope_theta") or THETA}
    rope |= config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope["rope_type"] = rope.pop("type", rope["rope_type"])
    required = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    sizes = {name: _wanted(config, name) for name in required}
    optional = {name: config[name] for name in _LAYER - set(sizes) if config.get(name) is not None}
    for name in ("model_type", "rope_theta", "rope_scaling", "rope_parameters"):
        optional.pop(name, None)
    layers = {"num_hidden_layers": 1, "num_key_value_heads": sizes["num_attention_heads"], "rope_parameters": rope}
    if "head_dim" not in optional and family == "qwen3":  # its own default is 128, whatever the sizes
        raise ValueError("head_dim is missing from the configuration of the qwen3 layer")
    if optional.get("hidden_act", "silu") not in ACT2FN:
        raise ValueError(f"hidden_act {optional['hidden_act']!r} is unknown to transformers")
    try:
        return families[family](**{**sizes, **layers, **optional}, attn_implementation="sdpa")
    except (StrictDataclassError, TypeError) as error:
        raise ValueError(f"invalid configuration of a {family} layer: {' '.join(str(error).split())}") from None


def _known(config: Mapping[str, Any], known: Collection[str]) -> None:
    for name in config:
        if name not in known and name not in _IDLE:
            raise ValueError(f"unknown key in the configuration: {name}={config[name]!r}")


def _wanted(config: Mapping[str, Any], name: str) -> Any:
    if config.get(name) is None:
        raise ValueError(f"{name} is missing from the configuration")
    return config[name]


def _ids(tensors: dict[str, torch.Tensor], shape: HeadShape) -> torch.Tensor | None:
    """Return the target's id of each of the head's tokens; removes the tensors that define it from `tensors`."""
    offsets, marks = tensors.pop("d2t", None), tensors.pop("t2d", None)
    vocabulary, draft = shape.layer.vocab_size, shape.draft_vocabulary
    if shape.version == 1 or (offsets is None and draft == vocabulary):
        if offsets is not None:
            raise ValueError("d2t is not allowed in an EAGLE-1 head")
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
    rope = ("rope_parameters", "rope_scaling", "rope_theta")
    config: dict[str, Any] = {name: getattr(layer, name) for name in sorted(_LAYER.difference(rope))}
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
