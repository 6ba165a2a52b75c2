"""The model that decides: what it must offer, and one forward pass over a draft tree.

A tree forward is an ordinary call of the model with two additions: a mask in which every node sees the context and its
own ancestors, and positions of context length plus depth. No model code is copied or changed. `unsupported` says in
advance why a model cannot be used; nothing is ever tried that is not known to be exact.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from .attention import attending_trees
from .cache import TreeLayer
from .drafting import Draft
from .tree import Tree

MASKED_ATTENTION = ("sdpa", "eager")
"""Attention implementations that take a mask of any shape."""


_PREFILL_PIECE = 512
_MASK_GRAIN = 256

ObservePrompt = Callable[[torch.Tensor, torch.Tensor], None]
"""Told of a piece of the prompt: tokens (length,) and the logits (length, vocabulary) after each."""


class UnsupportedModelError(ValueError):
    """The model, or the way it was called, cannot be accelerated without risking its output."""


def unsupported(model: PreTrainedModel) -> str | None:
    """Why a tree cannot be verified with this model, or None if it can."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        return f"expected a transformers model that generates text, got {name}; load it with AutoModelForCausalLM"
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        return f"expected a decoder-only model, got the encoder-decoder {name}"
    if getattr(model, "_is_stateful", False):
        return f"expected a model whose cache can forget tokens, got {name} with a recurrent state"
    if not _accepts(model, "position_ids"):
        return f"expected a model that takes position_ids, got {name}, which derives positions itself"
    if getattr(config, "alibi", False):
        return f"expected rotary or learned positions, got {name} with ALiBi, whose bias follows cache slots"
    layers = DynamicCache(config=config).layers
    others = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if others:
        return f"expected full attention in every layer, got {name} with {', '.join(others)}"
    if getattr(config, "model_type", "") == "gpt_neo":
        return f"expected full attention in every layer, got {name} with local attention by cache slot"
    implementation = config._attn_implementation
    if implementation not in MASKED_ATTENTION:
        return f"expected sdpa or eager attention, got {implementation}; call model.set_attn_implementation('sdpa')"
    return None


def unsupported_cache(cache: Cache) -> str | None:
    """Why accepted slots cannot be kept in this cache, or None if they can."""
    if type(cache) is not DynamicCache or cache.offloading:
        return f"expected a DynamicCache that is not offloaded, got {type(cache).__name__}"
    others = sorted({type(layer).__name__ for layer in cache.layers if type(layer) not in (DynamicLayer, TreeLayer)})
    return f"expected a cache of full-attention layers, got {', '.join(others)}" if others else None


def _accepts(model: PreTrainedModel, argument: str) -> bool:
    parameters = inspect.signature(model.forward).parameters
    return argument in parameters


class Target:
    """A model that verifies drafts of one text or of a batch."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises UnsupportedModelError with the reason."""
        reason = unsupported(model)
        if reason is not None:
            raise UnsupportedModelError(reason)
        self.model = model
        self.device = model.get_input_embeddings().weight.device
        self.dtype = model.dtype
        self.config = model.config.get_text_config(decoder=True)
        self._mask_tree: Tree | None = None
        self._mask_room = 0
        self._last_logits_only = {"logits_to_keep": 1} if _accepts(model, "logits_to_keep") else {}

    @property
    def vocab_size(self) -> int:
        """Number of logits, which is the number of ids a draft may name."""
        head = self.model.get_output_embeddings()
        return head.weight.shape[0] if head is not None else self.config.vocab_size

    @property
    def embedded(self) -> int:
        """Number of ids that a text may hold."""
        return self.model.get_input_embeddings().weight.shape[0]

    @property
    def max_length(self) -> int | None:
        """The context the model was made for, if its configuration says so."""
        return getattr(self.config, "max_position_embeddings", None)

    def new_cache(self) -> DynamicCache:
        return DynamicCache(config=self.config)

    def prefill(self, texts: Sequence[torch.Tensor], cache: Cache, observe: ObservePrompt | None = None) -> None:
        """Puts the tokens (length,) of each text, which come after what the cache holds, into the cache.

        Shorter texts are filled up on the right, where nothing of the text sees it. `observe` is shown the logits after
        every token, in pieces, so that they are never held whole.
        """
        tokens = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
        if observe is None:
            self.model(input_ids=tokens, past_key_values=cache, use_cache=True, **self._last_logits_only)
            return
        for start in range(0, tokens.shape[1], _PREFILL_PIECE):
            piece = tokens[:, start : start + _PREFILL_PIECE]
            logits = self.model(input_ids=piece, past_key_values=cache, use_cache=True).logits
            for row, text in enumerate(texts):
                own = text[start : start + _PREFILL_PIECE]
                observe(own, logits[row, : len(own)])

    def inputs(self, drafts: Sequence[Draft], lengths: Sequence[int], held: int) -> dict[str, torch.Tensor | None]:
        """Ids, mask and positions of one draft for each text, filled up to the largest.

        The root of each follows `lengths[row]` tokens, the first ones of the `held` slots of the cache.
        """
        if len(drafts) > 1:
            return self._batch_inputs(drafts, lengths, held)
        (draft,) = drafts
        return {
            "input_ids": draft.tokens[None],
            "attention_mask": self._mask(draft.tree, held),
            "position_ids": (draft.tree.on(self.device).depths + held)[None],
        }

    def _batch_inputs(
        self, drafts: Sequence[Draft], lengths: Sequence[int], held: int
    ) -> dict[str, torch.Tensor | None]:
        n = max(len(draft.tree) for draft in drafts)
        ids = torch.zeros(len(drafts), n, dtype=torch.long, device=self.device)
        positions = torch.tensor(lengths, device=self.device)[:, None].repeat(1, n)
        visible = (torch.arange(held + n, device=self.device) < positions[:, :1])[:, None].repeat(1, n, 1)
        for row, draft in enumerate(drafts):
            shape, own = draft.tree.on(self.device), len(draft.tree)
            ids[row, :own] = draft.tokens
            positions[row, :own] += shape.depths
            visible[row, :own, held : held + own] |= shape.ancestors
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=self.device)
        mask.masked_fill_(~visible, torch.finfo(self.dtype).min)
        return {"input_ids": ids, "attention_mask": mask[:, None], "position_ids": positions}

    def forward(self, inputs: dict[str, torch.Tensor | None], cache: Cache) -> torch.Tensor:
        """Logits (batch, n, vocabulary) after each of the n nodes of `inputs`, whose slots are appended to the
        cache.
        """
        with attending_trees(self.config):
            return self.model(**inputs, past_key_values=cache, use_cache=True).logits

    def _mask(self, tree: Tree, length: int) -> torch.Tensor | None:
        """Added to attention scores, (1, 1, n, length + n): every node sees the text and its own ancestors.

        The mask of a longer text is the same with more visible columns before it, so each is a window on the last one.
        """
        n = len(tree)
        if n == 1:
            return None
        if self._mask_tree is not tree or self._mask_room < length:
            self._mask_tree, self._mask_room = tree, -(-2 * length // _MASK_GRAIN) * _MASK_GRAIN
            self._full_mask = torch.zeros(1, 1, n, self._mask_room + n, dtype=self.dtype, device=self.device)
            tail = self._full_mask[0, 0, :, self._mask_room :]
            tail.masked_fill_(tree.on(self.device).hidden, torch.finfo(self.dtype).min)
        return self._full_mask.narrow(3, self._mask_room - length, length + n)
