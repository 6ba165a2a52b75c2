"""The model that decides: one forward pass of it over a draft tree.

A tree forward is an ordinary call of the model with two additions: a mask in which every node sees the context and its
own ancestors, and positions of context length plus depth. No model code is copied or changed. What a model needs beyond
that is in `architectures`; `unsupported` says in advance why a model cannot be used, and nothing is ever tried that is
not known to be exact.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from .architectures import MASKED_ATTENTION, Reach, Support, accepts, support
from .attention import NAME, attending, biased_by_position
from .cache import TreeCache, unroll, unsupported_layers
from .drafting import Draft
from .hidden import hidden_states
from .masks import Masks, masks, moves_with_text, windowed
from .templates import chain, root_only
from .tree import Tree
from .wrappers import input_device

if TYPE_CHECKING:
    from .fast.steps import Steps

logger = logging.getLogger("token_recycling")

_PREFILL_PIECE = 512
"""Tokens of all texts together whose logits are held at once."""
_EXTENDED_PIECE = 64
"""Tokens of each text, at most, that are read at once behind what a cache holds already."""
_MASK_GRAIN = 256

ObservePrompt = Callable[[torch.Tensor, torch.Tensor, int], None]
"""Told of a piece of a prompt: tokens (length,), the logits (length, vocabulary) after each, and which text it is."""

_found: WeakKeyDictionary[PreTrainedModel, str | None] = WeakKeyDictionary()
_said: WeakKeyDictionary[PreTrainedModel, set[str]] = WeakKeyDictionary()


class UnsupportedModelError(ValueError):
    """The model, or the way it was called, cannot be accelerated without risking its output."""


def unsupported(model: PreTrainedModel) -> str | None:
    """Why a tree cannot be verified with this model, or None if it can.

    Known families are judged by their configuration. A model of another family is tested once, on a short text.
    """
    return _judged(model, support(model))


def _judged(model: PreTrainedModel, known: Support) -> str | None:
    if not known.supported or known.tested:
        return known.reason
    if model not in _found:
        from .checking import check

        _found[model] = check(model, self_test=True).reason
    return _found[model]


def unsupported_cache(cache: Cache) -> str | None:
    """Why accepted slots cannot be kept in this cache, or None if they can."""
    if type(cache) is not DynamicCache:
        return f"expected a DynamicCache, got {type(cache).__name__}"
    return unsupported_layers(cache)


class Target:
    """A model that verifies drafts of one text or of a batch."""

    def __init__(self, model: PreTrainedModel, trusted: bool = False) -> None:
        """Raises UnsupportedModelError with the reason. `trusted` leaves out the test of an unknown family."""
        self.support = support(model)
        reason = self.support.reason if trusted else _judged(model, self.support)
        if reason is not None:
            raise UnsupportedModelError(reason)
        self.model = model
        device = input_device(model)
        if device is None:
            raise UnsupportedModelError(
                f"expected a model with its weights, got {type(model).__name__} with an embedding on the meta device"
            )
        self.device = device
        self.dtype = model.dtype
        self.config = model.config.get_text_config(decoder=True)
        self.steps: Steps | None = None
        """How passes over one text are made where they are fast (`fast`), else None."""
        self._mask_tree: Tree | None = None
        self._mask_room = 0
        self._last_logits_only = {"logits_to_keep": 1} if accepts(model, "logits_to_keep") else {}
        self._positions_given = accepts(model, "position_ids")
        self._say_what_is_switched()

    @property
    def vocab_size(self) -> int:
        """Number of logits, which is the number of ids a draft may name."""
        head = self.model.get_output_embeddings()
        return head.weight.shape[0] if head is not None else self.config.vocab_size

    def check_vocabulary(self, learned: int) -> None:
        """Raises ValueError if a drafter has learned from a vocabulary of another size."""
        if learned != self.vocab_size:
            raise ValueError(
                f"expected a target of {learned} tokens, as this drafter has learned, got one of {self.vocab_size}; "
                "make a new drafter"
            )

    @property
    def embedded(self) -> int:
        """Number of ids that a text may hold."""
        return self.model.get_input_embeddings().weight.shape[0]

    @property
    def max_length(self) -> int | None:
        """The context the model was made for, if its configuration says so."""
        return getattr(self.config, "max_position_embeddings", None) or getattr(self.config, "max_seq_len", None)

    @property
    def tree_attention(self) -> str:
        """The attention implementation of passes over trees."""
        return NAME if self.support.attention == "sdpa" and self.support.named_attention else self.support.attention

    def new_cache(self) -> DynamicCache:
        return DynamicCache(config=self.config)

    def depth_limit(self, tree: Tree, length: int) -> int:
        """How deep a node may stand after `length` tokens in the cache: not at all where trees are not exact."""
        return tree.depth if self.support.fits(length, len(tree)) else 0

    def prefill(
        self,
        texts: Sequence[torch.Tensor],
        cache: Cache,
        observe: ObservePrompt | None = None,
        held: Sequence[int] | None = None,
    ) -> None:
        """Puts each of `texts` (length,) without its last token into the cache, as far as it is not there.

        `held[row]` slots of each text are there; as many as the cache has if it is not given. Shorter texts are filled
        up on the right, where nothing of the text sees it. `observe` is shown the logits after every token put there,
        in pieces, so that they are never held whole.
        """
        unroll(cache)
        slots, border = cache.get_seq_length(), self.support.border
        if border is not None and border.at_once and len(texts[0]) > border.at:
            self._read_at_once(texts[0], cache)
            return
        held = held or [slots] * len(texts)
        missing = [text[there:-1].to(self.device) for text, there in zip(texts, held, strict=True)]
        if set(held) != {slots}:
            for pieces, logits in self.extend(missing, held, cache):
                for row, own in enumerate(pieces):
                    if observe is not None and len(own):
                        observe(own, logits[row, : len(own)], row)
            return
        tokens = torch.nn.utils.rnn.pad_sequence(missing, batch_first=True)
        if not tokens.shape[1]:
            return
        if observe is None and self._last_logits_only:
            self._read(tokens, cache, **self._last_logits_only)
            return
        piece = max(1, _PREFILL_PIECE // len(texts))
        for start in range(0, tokens.shape[1], piece):
            logits = self._read(tokens[:, start : start + piece], cache)
            if observe is not None:
                for row, text in enumerate(missing):
                    own = text[start : start + piece]
                    if len(own):
                        observe(own, logits[row, : len(own)], row)

    def extend(
        self, tokens: Sequence[torch.Tensor], lengths: Sequence[int], cache: Cache
    ) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
        """Puts `tokens[row]` (any number,) after the first `lengths[row]` slots of each text, whatever stood there.

        Yields piece by piece the tokens of every text and the logits (batch, n, vocabulary) after each; a text with
        fewer tokens than others has shorter pieces, or empty ones.
        """
        kept, lengths = TreeCache(cache), list(lengths)
        size = max(1, min(_EXTENDED_PIECE, _PREFILL_PIECE // len(tokens)))
        for start in range(0, max(map(len, tokens)), size):
            pieces = [own[start : start + size].to(self.device) for own in tokens]
            drafts = [_line(piece) for piece in pieces]
            slots = cache.get_seq_length()
            logits = self.forward(self.inputs(drafts, lengths, slots), cache)
            kept.keep(slots, lengths, [range(len(piece)) for piece in pieces])
            lengths = [length + len(piece) for length, piece in zip(lengths, pieces, strict=True)]
            yield pieces, logits

    def cross(self, texts: Sequence[torch.Tensor], cache: Cache) -> None:
        """Reads a text again if the model does so at its length."""
        border = self.support.border
        if border is not None and border.reread and len(texts[0]) == border.at + 1:
            self._read_at_once(texts[0], cache)

    def _read_at_once(self, text: torch.Tensor, cache: Cache) -> None:
        """As `generate` reads a prompt whose length decides how it is read: whole, with its last token."""
        border = self.support.border
        if border is not None and border.reread and cache.get_seq_length() <= border.at:
            cache.crop(-cache.get_seq_length())
        self._read(text[None, cache.get_seq_length() :], cache, **self._last_logits_only)
        cache.crop(-1)

    def _read(self, tokens: torch.Tensor, cache: Cache, **more: Any) -> torch.Tensor:
        tokens = tokens.to(self.device)
        if self._positions_given:  # some models, made for pictures too, would count on from an earlier call's
            positions = torch.arange(tokens.shape[1], device=self.device) + cache.get_seq_length()
            more["position_ids"] = positions.expand(len(tokens), -1)
        with attending(self.config, self.support.attention):
            output = self.model(input_ids=tokens, past_key_values=cache, use_cache=True, **more)
        return output.logits.to(self.device)

    def inputs(self, drafts: Sequence[Draft], lengths: Sequence[int], held: int) -> dict[str, Any]:
        """Ids, mask and positions of one draft for each text, filled up to the largest.

        The root of each follows `lengths[row]` tokens, the first ones of the `held` slots of the cache.
        """
        if len(drafts) > 1:
            return self._batch_inputs(drafts, lengths, held)
        (draft,) = drafts
        return {
            "input_ids": draft.tokens[None].to(self.device),
            "attention_mask": self._mask(draft.tree, held),
            "position_ids": (draft.tree.on(self.device).depths + held)[None],
        }

    def _batch_inputs(self, drafts: Sequence[Draft], lengths: Sequence[int], held: int) -> dict[str, Any]:
        n = max(len(draft.tree) for draft in drafts)
        ids = torch.zeros(len(drafts), n, dtype=torch.long, device=self.device)
        positions = torch.tensor(lengths, device=self.device)[:, None].repeat(1, n)
        visible = (torch.arange(held + n, device=self.device) < positions[:, :1])[:, None].repeat(1, n, 1)
        for row, draft in enumerate(drafts):
            shape, own = draft.tree.on(self.device), len(draft.tree)
            ids[row, :own] = draft.tokens
            positions[row, :own] += shape.depths
            visible[row, :own, held : held + own] |= shape.ancestors
        keys = torch.cat([torch.arange(held, device=self.device).expand(len(drafts), held), positions], dim=1)
        mask = masks(self.support.layers, visible[:, None], positions, keys, self.dtype)
        return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}

    def layer_inputs(
        self, tokens: torch.Tensor, ancestors: torch.Tensor, depths: torch.Tensor, length: int
    ) -> dict[str, Any]:
        """Ids, mask and positions of the newest n nodes of a tree, where the others have their slots in the cache
        already, in order: for a tree that is grown layer by layer after `length` tokens.

        `tokens` (n,); `ancestors` (n, nodes) bool, what each of the new ones sees of all nodes; `depths` (nodes,).
        """
        n = len(tokens)
        inputs = {
            "input_ids": tokens[None],
            "attention_mask": self._tree_masks(ancestors, depths, length),
            "position_ids": (depths[-n:] + length)[None],
        }
        if self.support.key_bias is not None:
            before = torch.arange(length, device=self.device)
            inputs["key_positions"] = torch.cat([before, depths[:-n] + length])[None]
        return inputs

    def forward(self, inputs: dict[str, Any], cache: Cache) -> torch.Tensor:
        """Logits (batch, n, vocabulary) after each of the n nodes of `inputs`, whose slots are appended to the cache.

        They are on the target's device, even if the model's last layer is on another.
        """
        with attending(self.config, self.tree_attention), self._bias(inputs, cache):
            return self.model(**inputs, past_key_values=cache, use_cache=True).logits.to(self.device)

    def forward_with_hidden(self, inputs: dict[str, Any], cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, and the last hidden states (batch, n, hidden) that the logits were made of."""
        with hidden_states(self.model) as seen:
            logits = self.forward(inputs, cache)
        return logits, seen[-1].to(self.device)

    def _bias(self, inputs: dict[str, Any], cache: Cache) -> contextlib.AbstractContextManager[None]:
        """For a model with ALiBi: takes what such a model cannot be given as an argument out of `inputs`."""
        bias = self.support.key_bias
        if bias is None:
            return contextlib.nullcontext()
        mask, positions, before = (
            inputs.pop("attention_mask"),
            inputs["position_ids"],
            inputs.pop("key_positions", None),
        )
        if not self._positions_given:
            del inputs["position_ids"]
        if mask is None:
            return contextlib.nullcontext()
        if before is None:
            before = torch.arange(cache.get_seq_length(), device=positions.device).expand(len(positions), -1)
        return biased_by_position(self.model, bias, mask, torch.cat([before, positions], dim=1))

    def _mask(self, tree: Tree, length: int) -> Masks | None:
        """Added to attention scores, (1, 1, n, length + n): every node sees the text and its own ancestors.

        The mask of a longer text is the same with more columns before it, so each is a window on the last one; only
        where layers see fixed chunks of the text is it made anew.
        """
        n = len(tree)
        if n == 1:
            return None
        if not moves_with_text(self.support.layers):
            return self._made_mask(tree, length)
        if self._mask_tree is not tree or self._mask_room < length:
            # Room to grow only for a tree that comes again: many drafters make one for every step.
            wanted = 2 * length if self._mask_tree is tree else length
            self._mask_tree, self._mask_room = tree, -(-wanted // _MASK_GRAIN) * _MASK_GRAIN
            self._full_mask = self._made_mask(tree, self._mask_room)
        return windowed(self._full_mask, self._mask_room - length, length + n)

    def _made_mask(self, tree: Tree, length: int) -> Masks:
        shape = tree.on(self.device)
        return self._tree_masks(shape.ancestors, shape.depths, length)

    def _tree_masks(self, ancestors: torch.Tensor, depths: torch.Tensor, length: int) -> Masks:
        """(1, 1, n, length + nodes) each, for the last n nodes of a tree; see `layer_inputs`."""
        n, nodes = ancestors.shape
        if all(reach == Reach() for reach in self.support.layers.values()):
            mask = torch.zeros(1, 1, n, length + nodes, dtype=self.dtype, device=self.device)
            mask[0, 0, :, length:].masked_fill_(~ancestors, torch.finfo(self.dtype).min)
            return mask
        before = torch.arange(length, device=self.device)
        visible = torch.cat([ancestors.new_ones(n, length), ancestors], dim=1)[None, None]
        positions = (depths + length)[None]
        return masks(
            self.support.layers, visible, positions[:, -n:], torch.cat([before[None], positions], dim=1), self.dtype
        )

    def _say_what_is_switched(self) -> None:
        wanted, used = self.config._attn_implementation, self.support.attention
        if wanted not in MASKED_ATTENTION:
            say_once(
                self.model,
                f"{wanted} takes no tree mask: accelerated calls use {used}; all others, and the model after them, "
                f"keep {wanted}",
            )


def _line(tokens: torch.Tensor) -> Draft:
    """Tokens in a row; where there are none, one that nobody looks at."""
    if len(tokens) < 2:
        return Draft(root_only(), tokens if len(tokens) else tokens.new_zeros(1))
    return Draft(chain(len(tokens) - 1), tokens)


def say_once(model: PreTrainedModel, message: str) -> None:
    """A warning about a model, the first time only."""
    said = _said.setdefault(model, set())
    if message not in said:
        said.add(message)
        logger.warning(message)
