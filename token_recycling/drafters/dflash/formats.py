"""DFlash assistants in the format of their authors (z-lab, 2602.06036), which SpecForge and ModelOpt write too.

Their layers compute the same as those of the assistant in transformers. The configuration is that of a Qwen3 model with
a `dflash_config`, and two tensors have other names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel, Qwen3Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

_SAME = "muse_glimmer_assistant"
"""Model type of transformers that computes the same."""
_NAMES = {r"^fc\.": "encoder.fc.", r"^hidden_norm\.": "encoder.output_norm_enc."}
_SIZES = (
    *("head_dim", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads"),
    *("num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_parameters"),
)
_PLAIN = {
    "attention_bias": False,
    "attention_mode": "gqa",
    "attention_sink_bias": False,
    "causal": False,
    "projector_type": None,
    "quantization_config": None,
    "shift_label": False,
}
"""Options that are supported with this value only."""


class AssistantConfig:
    """Reads configurations of assistants, as AutoConfig does for the format of transformers."""

    @staticmethod
    def from_pretrained(name: str) -> PretrainedConfig:
        """Raises ValueError for an assistant that cannot be computed."""
        return _published(name) or AutoConfig.from_pretrained(name)


class Assistant:
    """Loads assistants, as AutoModel does for the format of transformers."""

    @staticmethod
    def from_pretrained(name: str, dtype: torch.dtype) -> PreTrainedModel:
        """Raises ValueError for missing or unknown tensors."""
        config = _published(name)
        if config is None:
            return AutoModel.from_pretrained(name, dtype=dtype)
        model, found = AutoModel.from_pretrained(
            name, config=config, dtype=dtype, key_mapping=_NAMES, output_loading_info=True
        )
        for kind in ("missing", "unexpected", "mismatched"):
            if tensors := found[f"{kind}_keys"]:
                raise ValueError(f"{kind} tensors: {', '.join(sorted(map(str, tensors)))}")
        return model


def _published(name: str) -> PretrainedConfig | None:
    """Return the configuration of an assistant in the authors' format as one of transformers; None if there is none."""
    written, _ = PretrainedConfig.get_config_dict(name)
    if "speculators_model_type" in written:
        raise ValueError("the format of speculators is unsupported; use the assistant from which it was converted")
    nested = written.get("dflash_config")
    return converted(written, nested) if isinstance(nested, dict) else None


def converted(written: Mapping[str, Any], nested: Mapping[str, Any]) -> PretrainedConfig:
    """Return a configuration `written` with the options `nested` as one of transformers; raises ValueError."""
    for name in written.get("architectures") or ():
        if name != "DFlashDraftModel":
            raise ValueError(f"architecture {name} is unsupported; supported: DFlashDraftModel")
    options = {**written, **nested}
    for name, value in _PLAIN.items():
        if options.get(name) not in (None, value):
            raise ValueError(f"{name}={options[name]!r} is unsupported")
    qwen3 = Qwen3Config(**{name: written[name] for name in written if name in (*_SIZES, "rope_scaling", "rope_theta")})
    kinds = written.get("layer_types") or ["full_attention"] * qwen3.num_hidden_layers
    if nested.get("use_swa"):
        kinds = ["sliding_attention"] * qwen3.num_hidden_layers
    own: dict[str, Any] = {"block_size": options.get("block_size")}
    own |= {name: nested.get(name) for name in ("mask_token_id", "target_layer_ids")}
    if "sliding_attention" in kinds:
        if nested.get("causal") is None:
            raise ValueError("layer_types has sliding_attention: supported only with dflash_config.causal=false")
        own["sliding_window"] = nested.get("swa_window_size") or written.get("sliding_window")
    for name, value in own.items():
        if value is None:
            raise ValueError(f"{name} is missing from the configuration")
    if "sliding_window" in own:
        own["sliding_window"] -= 1  # transformers counts the distance
    sizes = {name: getattr(qwen3, name) for name in _SIZES}
    return CONFIG_MAPPING[_SAME](**sizes, **own, layer_types=kinds)
