"""DFlash assistants in the formats of their authors (z-lab, 2602.06036), which SpecForge and ModelOpt write too, and of
speculators.

Their layers compute the same as those of the assistant in transformers, except that layers with a window may be causal
within the block. The configuration is that of a Qwen3 model with a `dflash_config`, and two tensors have other names.
Files of speculators contain copies of the target's embedding and output layer, which are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from transformers import MODEL_MAPPING, AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel, Qwen3Config
from transformers.masking_utils import create_bidirectional_mask, create_sliding_window_causal_mask
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ...model.compat import CACHE

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
    "projector_type": None,
    "quantization_config": None,
    "sample_from_anchor": False,
    "shift_label": False,
}
"""Options that are supported with this value only."""
_COPIES = ("^d2t$", "^embed_tokens", "^lm_head", "^t2d$")
"""Tensors in files of speculators that are made from the target's."""


class AutoAssistantConfig:
    """Reads configurations of assistants, as AutoConfig does for the format of transformers."""

    @staticmethod
    def from_pretrained(name: str) -> PretrainedConfig:
        """Raises ValueError for an assistant that cannot be computed."""
        return _published(name) or AutoConfig.from_pretrained(name)


class AutoAssistant:
    """Loads assistants, as AutoModel does for the format of transformers."""

    @staticmethod
    def from_pretrained(name: str, dtype: torch.dtype) -> PreTrainedModel:
        """Raises ValueError for missing or unknown tensors."""
        config = _published(name)
        if config is None:
            return AutoModel.from_pretrained(name, dtype=dtype)
        kind = _variant(MODEL_MAPPING[type(config)], config.causal_windows, config.has_copies)
        model, found = kind.from_pretrained(
            name, config=config, dtype=dtype, key_mapping=_NAMES, output_loading_info=True
        )
        for problem in ("missing", "unexpected", "mismatched"):
            if tensors := found[f"{problem}_keys"]:
                raise ValueError(f"{problem} tensors: {', '.join(sorted(map(str, tensors)))}")
        return model


@cache
def _variant(kind: Any, causal: bool, has_copies: bool) -> Any:
    """Return the class of an assistant whose layers with windows may be causal within the block, and whose files may
    contain copies of the target's weights.
    """

    class PublishedAssistant(kind):
        _keys_to_ignore_on_load_unexpected = _COPIES if has_copies else ()

        def forward(self, noise_embeds: torch.Tensor, *args: Any, **options: Any) -> Any:
            if causal:
                given = {"attention_mask": options.pop("attention_mask", None), CACHE: options.get(CACHE)}
                given |= {"config": self.config, "inputs_embeds": noise_embeds}
                options["attention_mask"] = {
                    "full_attention": create_bidirectional_mask(**given),
                    "sliding_attention": create_sliding_window_causal_mask(**given),
                }
            return super().forward(noise_embeds, *args, **options)

    return PublishedAssistant


def _published(name: str) -> PretrainedConfig | None:
    """Return the configuration of an assistant in the authors' format as one of transformers; None if there is none."""
    written, _ = PretrainedConfig.get_config_dict(name)
    if written.get("speculators_model_type") == "dflash":
        return _of_speculators(written)
    nested = written.get("dflash_config")
    return converted(written, nested) if isinstance(nested, dict) else None


def _of_speculators(written: Mapping[str, Any]) -> PretrainedConfig:
    """Convert a configuration of speculators, which counts the inputs of layers, not their outputs."""
    inner, numbers = written.get("transformer_layer_config") or {}, written.get("aux_hidden_state_layer_ids")
    nested = {name: written.get(name) for name in ("block_size", "mask_token_id", "sample_from_anchor")}
    nested["target_layer_ids"] = None if numbers is None else [number - 1 for number in numbers]
    nested["causal"] = False if written.get("sliding_window_non_causal") else None
    return converted({**inner, "architectures": None}, nested, has_copies=True)


def converted(written: Mapping[str, Any], nested: Mapping[str, Any], has_copies: bool = False) -> PretrainedConfig:
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
    has_windows, causal = "sliding_attention" in kinds, nested.get("causal")
    if causal and {*kinds} != {"sliding_attention"}:
        raise ValueError("causal=True is unsupported with full attention")
    if has_windows:
        own["sliding_window"] = nested.get("swa_window_size") or written.get("sliding_window")
    for name, value in own.items():
        if value is None:
            raise ValueError(f"{name} is missing from the configuration")
    own["causal_windows"] = has_windows and causal is not False
    if has_windows and not own["causal_windows"]:
        own["sliding_window"] -= 1  # transformers counts the distance, if attention is not causal
    sizes = {name: getattr(qwen3, name) for name in _SIZES}
    return CONFIG_MAPPING[_SAME](**sizes, **own, layer_types=kinds, has_copies=has_copies)
