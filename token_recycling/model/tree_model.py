"""A model that reads trees: one forward pass over the nodes of a draft.

A tree forward is an ordinary call of the model with two additions: a mask in which every node sees the context and its
own ancestors, and positions of context length plus depth. No model code is copied or changed; what a family needs
beyond that is in `architectures`; masks and positions are made in `tree_inputs`. `target` and `draft` are roles that
such a model can have.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from .attention import attending, biased_by_position
from .cache_layers import framed
from .info import UnsupportedModelError, model_info
from .inspection import last_state, layer_states, uncompiled
from .kv_cache import count
from .prepacking import PREPACKED, drop
from .recurrence import node_by_node
from .remembered import kept_of, turns
from .tree_inputs import TreeInputs


class TreeModel:
    """One model, ready to read trees."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises UnsupportedModelError as far as it shows without trying, as `self_test.ready` does."""
        if not isinstance(model, PreTrainedModel):
            raise UnsupportedModelError(model_info(model).reason)
        self.kept = kept_of(model)
        """What was found out about it as it is."""
        self.info = info = model_info(model, self.kept)
        """What is known about it."""
        if info.reason is not None:
            raise UnsupportedModelError(info.reason)
        if info.device is None or info.config is None:
            raise UnsupportedModelError(
                f"expected a model with its weights, got {type(model).__name__} with an embedding on the meta device"
            )
        self.model, self.device, self.dtype, self.config = model, info.device, info.dtype, info.config
        self.eager = uncompiled(model)
        """What its passes call: torch would compile trees, whose shapes change, again and again."""
        self.inputs = TreeInputs(info, self.device, self.dtype)
        """Ids, masks and positions of its passes."""
        self.prepacked = self.kept.recall(PREPACKED)
        """Weights laid out for short passes, where `prepack` was called before."""
        self.vocab_size, self.embedded, self.max_length = info.vocab_size, info.embedded, info.max_length
        self._takes_positions, self._takes_mask = (
            name in info.arguments for name in ("position_ids", "attention_mask")
        )
        self._cache = "cache_params" if "cache_params" in info.arguments else "past_key_values"
        self.leaves_logits_out = "logits_to_keep" in info.arguments
        """Whether it can be told to make no logits but those of the last tokens."""

    def attending(self) -> contextlib.AbstractContextManager[None]:
        """For the length of the block, let passes of this thread attend as they do over trees."""
        return attending(self.config, self.info.attention, grouped=self.info.named_attention)

    def check_weights(self) -> None:
        """Let go of packed weights that are no longer the model's; before every text, for what torch does not count."""
        if self.prepacked is not None and not self.prepacked.unchanged:
            drop(self.model)
            self.prepacked = None

    def unmeasured(self) -> TreeModel:
        """The same without packed weights whose use was decided by measuring: it rounds alike in every process."""
        if self.prepacked is None or self.prepacked.fixed:
            return self
        found = copy.copy(self)
        found.prepacked = None
        return found

    def _weights(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.prepacked is None else self.prepacked.used()

    def alone(self) -> contextlib.AbstractContextManager[Any]:
        """For the length of the block, keep other threads out of such blocks of this model, if its passes change the
        model.
        """
        border = self.info.border
        return turns(self.model) if border is not None and border.changes_model else contextlib.nullcontext()

    def new_cache(self) -> DynamicCache:
        return DynamicCache(config=self.config)

    def forward(self, inputs: dict[str, Any], cache: Cache, last: int = 0) -> torch.Tensor:
        """Logits (batch, n, vocabulary) after each of the n nodes of `inputs`, whose slots are appended to the cache;
        of the `last` ones alone where the model can leave the others out. They are on the model's input device.
        """
        inputs = {**inputs, **self._only(last), self._cache: cache}
        frame = inputs.pop("frame", None)
        with (
            self.attending(),
            framed(cache, frame),
            self._weights(),
            self._key_bias(inputs, cache),
            self._by_node(inputs, cache),
        ):
            logits = self.eager(**inputs, use_cache=True).logits
        if self.info.recurrent:
            count(cache, inputs["input_ids"].shape[1])
        return logits.to(self.device)

    def forward_with_hidden(self, inputs: dict[str, Any], cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, and the last hidden states (batch, n, hidden) that the logits were made of."""
        with layer_states(self.model, last_state) as seen:
            logits = self.forward(inputs, cache)
        return logits, seen[-1].to(self.device)

    def read(
        self, tokens: torch.Tensor, cache: Cache, last: int = 0, padding: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Logits (batch, n, vocabulary) after plain text, tokens (batch, n) behind all that the cache holds; of the
        `last` ones alone as in `forward`. The first `padding[row]` tokens of all that was read so are of no text.
        """
        tokens, more = tokens.to(self.device), self._only(last)
        places = torch.arange(cache.get_seq_length() + tokens.shape[1], device=self.device).expand(len(tokens), -1)
        if padding is not None and any(padding):
            before = torch.tensor(padding, device=self.device)[:, None]
            more["attention_mask"] = (places >= before).long()
            places = (places - before).clamp(min=0)
        if self._takes_positions:  # some models, made for pictures too, would count on from an earlier call's
            more["position_ids"] = places[:, -tokens.shape[1] :]
        behind = tokens.shape[1] > 1 and cache.get_seq_length() > 0  # where every layer has a mask
        grouped = behind and self.info.named_attention
        with attending(self.config, self.info.attention, grouped), self._weights():
            logits = self.eager(input_ids=tokens, use_cache=True, **more, **{self._cache: cache}).logits
        if self.info.recurrent:
            count(cache, tokens.shape[1])
        return logits.to(self.device)

    def _only(self, last: int) -> dict[str, Any]:
        """Arguments that leave out the logits of all tokens but the `last` ones; 0 for all."""
        return {"logits_to_keep": last} if last and self.leaves_logits_out else {}

    def _by_node(self, inputs: dict[str, Any], cache: Cache) -> contextlib.AbstractContextManager[None]:
        """For a model with recurrent layers: take out of `inputs` which node follows which, and let them read so."""
        parents = inputs.pop("parents", None)
        if not self._takes_positions and self.info.mixers:
            inputs.pop("position_ids", None)
        if not self._takes_mask and self.info.mixers:
            inputs.pop("attention_mask")
        return contextlib.nullcontext() if parents is None else node_by_node(self.info.mixers, cache, parents)

    def _key_bias(self, inputs: dict[str, Any], cache: Cache) -> contextlib.AbstractContextManager[None]:
        """For a model with ALiBi: take out of `inputs` what such a model cannot be given as an argument."""
        bias = self.info.key_bias
        if bias is None:
            return contextlib.nullcontext()
        mask, positions = inputs.pop("attention_mask"), inputs["position_ids"]
        before = inputs.pop("key_positions", None)
        if not self._takes_positions:
            del inputs["position_ids"]
        if mask is None:
            return contextlib.nullcontext()
        if before is None:
            before = torch.arange(cache.get_seq_length(), device=positions.device).expand(len(positions), -1)
        return biased_by_position(self.model, bias, mask, torch.cat([before, positions], dim=1))
