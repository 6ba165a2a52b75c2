"""EAGLE heads: small networks that continue from the target's hidden states.

The head of EAGLE-1 and EAGLE-2 (Li et al., 2401.15077 and 2406.16858) predicts the next hidden state from a token and
the target's last hidden state before it, by a linear layer and one decoder layer; the target's output layer maps it to
a token. EAGLE-3 (2503.01840) reads states from three depths and predicts a token, by its own output layer over the most
frequent tokens. The layers are those of transformers; parameters have the names of the authors' files.

Cost of a pass: one layer over its rows, and an output layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, Qwen3Config
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3MLP

from ...model.compat import CACHE
from ...model.hidden import last_state

_PAPERS = (lambda layers: 2, lambda layers: layers // 2, lambda layers: layers - 3)
"""The layers whose inputs EAGLE-3 reads, given the target's number of layers."""


@dataclass(frozen=True)
class HeadShape:
    """Sizes and options of a head."""

    version: int
    """1 for EAGLE-1 and EAGLE-2, or 3."""
    layer: LlamaConfig | Qwen3Config
    """Configuration of the head's decoder layers; its `vocab_size` is the target's."""
    target_hidden: int
    """Size of the target's hidden states."""
    states: tuple[int, ...] | None = None
    """Indices of the target's hidden states that it reads; None for those of the paper."""
    draft_vocabulary: int = 0
    """Number of tokens that an EAGLE-3 head can predict."""
    windows: tuple[int, ...] = ()
    """Number of positions that each layer attends to, its own included, 0 for all; () if all layers attend to all."""
    fc_bias: bool = False
    own_output: bool = True
    """An EAGLE-3 head has its own output layer, not the target's."""
    norm_before_fc: bool = False
    """Normalize the concatenated states."""
    fc_norm: bool = False
    """Normalize each state separately."""
    norm_before_residual: bool = False
    """The residual path carries the normalized state."""
    last_norm: bool = True
    """There is a norm before the output layer."""
    feeds_normed: bool = False
    """The normalized state is fed back (EAGLE-3.1)."""

    @property
    def width(self) -> int:
        """Size of the head's own states."""
        return self.layer.hidden_size

    @property
    def read_width(self) -> int:
        """Size of the concatenated target states that it reads."""
        return self.target_hidden * (1 if self.version == 1 else len(self.states or _PAPERS))

    def states_of(self, layers: int) -> tuple[int, ...]:
        """Return the indices, as in transformers, of the hidden states it reads of a target with that many layers."""
        if self.version == 1:
            return last_state(layers)
        return self.states or tuple(place(layers) for place in _PAPERS)


class EagleHead(nn.Module):
    """Common parts of both heads. A pass reads n rows: the embedding of a token and the state before it."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.rotary = LlamaRotaryEmbedding(shape.layer)

    def fused(self, states: torch.Tensor) -> torch.Tensor:
        """Return the head's states (..., width) from the concatenated target states."""
        raise NotImplementedError

    def forward(
        self,
        embedded: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        cache: Cache,
        keys: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return outputs (batch, n, width) from embeddings and states (batch, n, ...) at `positions` (batch or 1, n),
        and append the rows to the cache. A row attends to the keys in `mask` (batch or 1, 1, n, keys) bool, all if
        None; in a layer with a window, to those of them within it by their positions `keys` (keys,).
        """
        rotated, masks = self.rotary(embedded, positions), {0: mask}
        for window in {*self.shape.windows} - {0}:
            assert keys is not None
            near = (keys > positions[..., None] - window)[:, None]
            masks[window] = near if mask is None else mask & near
        windows = self.shape.windows or (0,) * self.shape.layer.num_hidden_layers
        attentions = [
            {"position_embeddings": rotated, "attention_mask": masks[window], CACHE: cache} for window in windows
        ]
        return self.through(embedded, states, attentions)

    def through(self, embedded: torch.Tensor, states: torch.Tensor, attentions: list[dict[str, Any]]) -> torch.Tensor:
        """Return outputs as `forward` does, given the arguments of each layer's attention."""
        raise NotImplementedError

    def fed(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the states (..., width) that are fed back after these outputs."""
        return outputs

    def normed(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the input (..., width) of the output layer."""
        return outputs

    def output(self, output_layer: nn.Module) -> nn.Module:
        """Return the output layer; `output_layer` is the target's."""
        return output_layer

    def logits(self, outputs: torch.Tensor, output_layer: nn.Module) -> torch.Tensor:
        """Return logits (..., draft vocabulary) from the head's outputs; `output_layer` is the target's."""
        logits: torch.Tensor = self.output(output_layer)(self.normed(outputs))
        return logits

    @property
    def ids(self) -> torch.Tensor | None:
        """(draft vocabulary,) int64: the target's id of each token it can predict; None if ids are the same."""
        return None


class Eagle1Head(EagleHead):
    """`fc` and one layer without a norm before its attention; its output is a hidden state of the target."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.fc = nn.Linear(2 * shape.width, shape.width, bias=shape.fc_bias)
        self.layers = nn.ModuleList([_FirstLayer(shape, shape.width)])

    def fused(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def through(self, embedded: torch.Tensor, states: torch.Tensor, attentions: list[dict[str, Any]]) -> torch.Tensor:
        inputs = self.fc(torch.cat([embedded, states.to(embedded.dtype)], dim=-1))
        return self.layers[0](inputs, inputs, attentions[0])


class Eagle3Head(EagleHead):
    """`fc` over the target's states, a layer that reads the embedding and the state concatenated, further layers, and
    an output layer.
    """

    def __init__(self, shape: HeadShape, ids: torch.Tensor | None = None) -> None:
        super().__init__(shape)
        layer, width = shape.layer, shape.width
        self.fc = nn.Linear(shape.read_width, width, bias=shape.fc_bias)
        if shape.norm_before_fc:
            self.input_norm = LlamaRMSNorm(shape.read_width, layer.rms_norm_eps)
        if shape.fc_norm:
            each = range(shape.read_width // shape.target_hidden)
            self.fc_norm = nn.ModuleList([LlamaRMSNorm(shape.target_hidden, layer.rms_norm_eps) for _ in each])
        self.midlayer = _FusedLayer(shape)
        kind = _kinds(layer)[2]
        more = range(1, layer.num_hidden_layers)
        self.layers = nn.ModuleDict({str(number): kind(layer, number) for number in more})
        self.norm = LlamaRMSNorm(width, layer.rms_norm_eps) if shape.last_norm else nn.Identity()
        self.lm_head: Any = nn.Linear(width, shape.draft_vocabulary, bias=False) if shape.own_output else None
        self.register_buffer("_ids", ids, persistent=False)

    @property
    def ids(self) -> torch.Tensor | None:
        return self._ids  # type: ignore[return-value]

    def fused(self, states: torch.Tensor) -> torch.Tensor:
        states = states.to(self.fc.weight.dtype)
        if self.shape.fc_norm:
            each = states.split(self.shape.target_hidden, dim=-1)
            states = torch.cat([norm(state) for norm, state in zip(self.fc_norm, each, strict=True)], dim=-1)
        return self.fc(self.input_norm(states) if self.shape.norm_before_fc else states)

    def through(self, embedded: torch.Tensor, states: torch.Tensor, attentions: list[dict[str, Any]]) -> torch.Tensor:
        outputs = self.midlayer(embedded, states, attentions[0])
        for layer, attention in zip(self.layers.values(), attentions[1:], strict=True):
            outputs = layer(outputs, **attention)
        return outputs

    def fed(self, outputs: torch.Tensor) -> torch.Tensor:
        return self.norm(outputs) if self.shape.feeds_normed else outputs

    def normed(self, outputs: torch.Tensor) -> torch.Tensor:
        return self.norm(outputs)

    def output(self, output_layer: nn.Module) -> nn.Module:
        return self.lm_head or output_layer


def _kinds(layer: LlamaConfig | Qwen3Config) -> tuple[type[Any], type[Any], type[Any]]:
    """Return the classes of attention, feed-forward network and decoder layer of a family."""
    if isinstance(layer, Qwen3Config):
        return Qwen3Attention, Qwen3MLP, Qwen3DecoderLayer
    return LlamaAttention, LlamaMLP, LlamaDecoderLayer


class _FirstLayer(nn.Module):
    """A decoder layer whose attention reads inputs of width `inputs`; subclasses apply the input norm."""

    def __init__(self, shape: HeadShape, inputs: int) -> None:
        super().__init__()
        layer = shape.layer
        attention, mlp, _ = _kinds(layer)
        self.self_attn = attention(layer, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            projection = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(inputs, projection.out_features, bias=False))
        self.post_attention_layernorm = LlamaRMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.mlp = mlp(layer)

    def forward(self, inputs: torch.Tensor, residual: torch.Tensor, attention: dict[str, Any]) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=inputs, **attention)
        states = residual + attended
        return states + self.mlp(self.post_attention_layernorm(states))


class _FusedLayer(_FirstLayer):
    """The first layer of EAGLE-3: embedding and state, each normalized, are concatenated."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape, 2 * shape.width)
        self.norms_residual = shape.norm_before_residual
        self.input_layernorm = LlamaRMSNorm(shape.width, shape.layer.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(shape.width, shape.layer.rms_norm_eps)

    def forward(self, inputs: torch.Tensor, residual: torch.Tensor, attention: dict[str, Any]) -> torch.Tensor:
        normed = self.hidden_norm(residual)
        both = torch.cat([self.input_layernorm(inputs), normed.to(inputs.dtype)], dim=-1)
        return super().forward(both, normed if self.norms_residual else residual, attention)
