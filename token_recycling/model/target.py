"""Target model: one forward pass over the nodes of a draft.

A tree forward is an ordinary call of the model with two additions: a mask in which every node sees the context, its
ancestors and itself, and positions of context length plus depth. No model code is copied or changed; `architectures`
holds what else a family needs. `target` and `draft` are roles that such a model can have.

Positions, not cache slots, determine what is within a window or a chunk: nodes of one depth lie in different slots and
have the same position. Rows may differ, so the same code serves several sequences with holes in their caches.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from ..trees.draft import Draft
from .architectures import Reach
from .attention import attending, stand_in, still_registered
from .compat import CACHE, cache_argument, chosen_experts
from .facts import facts_of
from .info import ModelInfo, UnsupportedModelError, model_info
from .inspection import arguments_of, bytes_read, context_length, input_device, shape_of, vocabulary_size
from .kv_cache import TreeCache
from .parts import is_uncompiled, parts_of, uncompiled
from .prepacking import PREPACKED, prepacked_of
from .tree_layer import Frame, TreeLayer

if TYPE_CHECKING:
    from .recurrence import Mixer

Masks = torch.Tensor | dict[str, torch.Tensor]
"""One mask for all layers, or one per layer type."""
_ALIGNED = 8
"""Rows of a mask begin at multiples of this many numbers, as attention kernels of accelerators require."""


class Target:
    """One model, prepared for forward passes over trees."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raise UnsupportedModelError if this shows without running the model, as `support.ready` does."""
        if not isinstance(model, PreTrainedModel):
            raise UnsupportedModelError(model_info(model).reason)
        self.facts = facts_of(model)
        """Facts about the model in its present state."""
        self.foreign: tuple[Any, Any, str | None] | None = None
        """Foreign code in the model, for one state of its code (`foreign`); None until it is searched."""
        self.info = info = model_info(model, self.facts)
        """Facts known without running it."""
        if info.reason is not None:
            raise UnsupportedModelError(info.reason)
        device = input_device(model)
        if device is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no weights: its embedding is on the meta device; load the weights"
            )
        self._model: weakref.ref[PreTrainedModel] = weakref.ref(model)
        self._held: PreTrainedModel | None = model
        self.device, self.dtype = device, model.dtype
        self.config: PretrainedConfig = model.config.get_text_config(decoder=True)
        """The configuration of the text decoder."""
        self._attention_names = stand_in(self.config, info.attention, info.named_attention)
        """Names of the attention functions that ours replace."""
        eager = uncompiled(model)
        self._eager: Any = None if eager is model else eager
        self.inputs = TreeInputs(info, self.device, self.dtype)
        """Builds the ids, masks and positions of its forward passes."""
        self.fixed_shapes = device.type != "cpu" and info.branches and info.key_bias is None and not info.recurrent
        """Whether passes over drafts have one of a few shapes (`frames`): on an accelerator, if positions are an
        argument.
        """
        self.prepacked = prepacked_of(model, self.facts)
        """Prepacked weights, if `prepack` was called before."""
        self.compiled = self._eager is not None
        """Whether the whole model is compiled by torch.compile."""
        self.processes = model.tp_size or 1
        """Number of processes that hold a part of the model each (tensor parallelism)."""
        self.vocab_size, self.max_length = vocabulary_size(model), context_length(model)
        """Number of logits, the limit for token ids of a draft; and the context length in tokens, None if unknown."""
        embeddings = getattr(model.get_input_embeddings(), "weight", None)
        self.embedded = len(embeddings) if isinstance(embeddings, torch.Tensor) else self.vocab_size
        """Number of token ids that it can embed; that of its logits if unknown."""
        if self.embedded < self.vocab_size:
            raise UnsupportedModelError(
                f"{type(model).__name__} has logits of {self.vocab_size} tokens but embeds {self.embedded}: a draft "
                "could contain a token that it cannot read"
            )
        self.arguments = arguments_of(model)
        """Names of the arguments of its forward."""
        self._takes_positions = "position_ids" in self.arguments
        self._takes_mask = info.key_bias is None and ("attention_mask" in self.arguments or not info.recurrent)
        """Whether its forward takes tree masks as an argument."""
        self.cache_argument = cache_argument(self.arguments) or CACHE
        """The forward argument that takes the cache."""
        self.leaves_logits_out = "logits_to_keep" in self.arguments
        """Whether it can compute the logits of only the last tokens."""
        self._options: dict[str, Any] = {"use_cache": True, "return_dict": True}
        """Arguments of every pass, whatever the configuration says."""
        if "output_router_logits" in self.arguments:  # needed only for a loss, which cannot take a tree mask
            self._options["output_router_logits"] = False

    @property
    def model(self) -> PreTrainedModel:
        """The model itself."""
        model = self._model() if self._held is None else self._held
        assert model is not None, "a call holds its model"
        return model

    @property
    def eager(self) -> Any:
        """The uncompiled model, which forward passes call: torch would recompile for every new shape of a tree."""
        return self.model if self._eager is None else self._eager

    def hold_weakly(self) -> None:
        """No longer keep the model alive. Called where the model holds this target, so that `del model` frees its
        weights immediately, as for every other model.
        """
        self._held = None

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """Its recurrent layers."""
        from .recurrence import Mixer, keeps_state

        return tuple(Mixer(part) for part in parts_of(self.model) if keeps_state(part))

    @cached_property
    def shape(self) -> str:
        """Short name of its configuration, wherever it was loaded from."""
        return shape_of(self.model.config)

    @cached_property
    def bytes_read(self) -> int:
        """Bytes of weights that a forward pass reads."""
        return bytes_read(self.model)

    def is_current(self) -> bool:
        """Return whether the model has not changed since this target was made."""
        facts, packed = facts_of(self.model), self.prepacked
        if (
            facts is not self.facts
            or facts.recall(PREPACKED) is not packed
            or not still_registered(self._attention_names)
        ):
            return False
        if not is_uncompiled(self.eager, self.model):
            return False
        return packed is None or packed.unchanged

    def unmeasured(self) -> Target:
        """Return the target without prepacked weights that depend on measurements: it rounds alike in every process."""
        if self.prepacked is None or self.prepacked.fixed:
            return self
        unmeasured = copy.copy(self)
        unmeasured.prepacked = None
        return unmeasured

    @contextlib.contextmanager
    def _experts_of_decoding(self) -> Iterator[None]:
        """Within a pass over a few nodes on an accelerator, compute experts as transformers does while it decodes: one
        matrix product per expert and token is faster than products over groups of tokens.
        """
        chosen = chosen_experts(self.model)
        if chosen is None or "grouped_mm" not in chosen.values():
            yield
            return
        self.model.set_experts_implementation(
            {part: "batched_mm" if name == "grouped_mm" else name for part, name in chosen.items()}
        )
        try:
            yield
        finally:
            self.model.set_experts_implementation(chosen)

    def turns(self) -> Callable[..., contextlib.AbstractContextManager[Any]]:
        """Return a factory of contexts for the steps of a call, which takes True for the last step. The contexts do
        nothing unless forward passes change the model.
        """
        threshold = self.info.length_threshold
        if threshold is None or not threshold.changes_model:
            return contextlib.nullcontext
        from .frequencies import Frequencies

        return Frequencies(self.model, self.facts.lock).turn

    def new_cache(self) -> TreeCache:
        """Return an empty cache."""
        return TreeCache(DynamicCache(config=self.config))

    def forward(self, inputs: PassInputs, cache: TreeCache, last: int = 0) -> torch.Tensor:
        """Return logits (batch, n, vocabulary) after each of the n nodes of `inputs`, on the model's input device, and
        append their slots to the cache. With `last`, return only the logits of the last `last` nodes.
        """
        info, mask, windowed = self.info, inputs.mask, cache.windowed
        if mask is not None and inputs.frame is None and windowed is not None and any(windowed.starts):
            mask = within_windows(mask, info.layers, windowed)
        arguments: dict[str, Any] = {}
        if self._takes_mask:
            arguments["attention_mask"] = mask
        if self._takes_positions:
            arguments["position_ids"] = inputs.positions
        with contextlib.ExitStack() as others:
            if inputs.frame is not None:
                others.enter_context(cache.framed(inputs.frame))
            if self.device.type != "cpu":
                others.enter_context(self._experts_of_decoding())
            if info.key_bias is not None and isinstance(mask, torch.Tensor):
                from .key_bias import biased_by_position

                others.enter_context(biased_by_position(self.model, info.key_bias, mask, _key_positions(inputs, cache)))
            if inputs.parents is not None and cache.states is not None:
                others.enter_context(cache.states.node_by_node(self.mixers, inputs.parents))
            return self._logits(inputs.tokens, cache, last, info.named_attention, arguments)

    def read(
        self, tokens: torch.Tensor, cache: TreeCache, last: int = 0, padding: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return logits (batch, n, vocabulary) after plain text, tokens (batch, n) that follow everything in the cache;
        `last` as in `forward`. Of all tokens read this way into a row, the first `padding[row]` are padding.
        """
        arguments: dict[str, Any] = {}
        tokens = tokens.to(self.device)
        places = torch.arange(cache.length + tokens.shape[1], device=self.device).expand(len(tokens), -1)
        if padding is not None and any(padding):
            before = torch.tensor(padding, device=self.device)[:, None]
            arguments["attention_mask"] = (places >= before).long()
            places = (places - before).clamp(min=0)
        if self._takes_positions:  # some multimodal models would continue an earlier call's
            arguments["position_ids"] = places[:, -tokens.shape[1] :]
        behind = tokens.shape[1] > 1 and cache.length > 0  # where every layer has a mask
        return self._logits(tokens, cache, last, behind and self.info.named_attention, arguments)

    def _logits(
        self, tokens: torch.Tensor, cache: TreeCache, last: int, grouped: bool, arguments: dict[str, Any]
    ) -> torch.Tensor:
        """Call the model with tokens (batch, n) and further `arguments`; return logits as `forward` does. `grouped`:
        see `attending`.
        """
        arguments = {**self._options, **arguments, self.cache_argument: cache.cache}
        if last and self.leaves_logits_out:
            arguments["logits_to_keep"] = last
        packed = contextlib.nullcontext() if self.prepacked is None else self.prepacked.used()
        with attending(self.config, self.info.attention, grouped), packed:
            logits: torch.Tensor = self.eager(input_ids=tokens, **arguments).logits
        if cache.states is not None:
            cache.states.counter.length += tokens.shape[1]
        if last:  # an overridden forward may return all
            logits = logits[:, -last:]
        return logits.to(self.device)


class PassInputs(NamedTuple):
    """Inputs of a forward pass over n nodes of trees."""

    tokens: torch.Tensor
    """(batch, n) int64."""
    mask: Masks | None
    """(batch or 1, 1, n, slots) each; None for lone roots, which see everything."""
    positions: torch.Tensor
    """(batch, n) int64."""
    frame: Frame | None = None
    """Slots of a pass of a fixed shape."""
    parents: Sequence[Sequence[int]] | None = None
    """For recurrent layers, the parent of each node, -1 for the root; None for lone roots."""
    key_positions: torch.Tensor | None = None
    """(batch, length) positions of the slots before the nodes, if some of these slots hold nodes of a tree."""


def _key_positions(inputs: PassInputs, cache: TreeCache) -> torch.Tensor:
    """Return positions (batch, length + n) of all keys of a pass."""
    before, positions = inputs.key_positions, inputs.positions
    if before is None:
        before = torch.arange(cache.length, device=positions.device).expand(len(positions), -1)
    return torch.cat([before, positions], dim=1)


class TreeInputs:
    """Ids, masks and positions of one model's passes."""

    def __init__(self, info: ModelInfo, device: torch.device, dtype: torch.dtype) -> None:
        self._info, self._device, self._dtype = info, device, dtype
        self._sees_all = all(reach == Reach() for reach in info.layers.values())
        """Whether no layer has a window or chunks."""

    def of(
        self, drafts: Sequence[Draft], lengths: Sequence[int], cached: int, active: Collection[int] | None = None
    ) -> PassInputs:
        """Return the inputs of a pass over one draft per sequence, padded to the largest. Each root follows
        `lengths[row]` tokens, the first of the `cached` slots of the cache. Rows of a batch that are not `active`
        attend to nothing; by default all are.
        """
        if len(drafts) > 1:
            visible = [length if active is None or row in active else 0 for row, length in enumerate(lengths)]
            return self._of_batch(drafts, visible, cached)
        (draft,) = drafts
        depths = self._sent(draft.depths)
        return PassInputs(
            self._sent(draft.tokens)[None],
            None if len(draft) == 1 else self._masks(self._sent(draft.ancestors), depths, cached),
            (depths + cached)[None],
            parents=[draft.parents.tolist()] if self._info.recurrent and len(draft) > 1 else None,
        )

    def of_prompt(self, unread: torch.Tensor, draft: Draft, cached: int) -> PassInputs:
        """Return the inputs of a forward pass over the m uncached tokens (m,) of a sequence after the `cached` slots of
        the cache, and over a draft that follows them: m + n rows.
        """
        m = len(unread)
        depths = torch.cat([torch.arange(m, device=self._device), self._sent(draft.depths) + m])
        ancestors = torch.ones(len(depths), len(depths), dtype=torch.bool, device=self._device).tril()
        ancestors[m:, m:] = self._sent(draft.ancestors)
        tokens = torch.cat([unread, self._sent(draft.tokens)])
        return PassInputs(tokens[None], self._masks(ancestors, depths, cached), (depths + cached)[None])

    def of_text(self, tokens: torch.Tensor, cached: int) -> PassInputs:
        """Return the inputs of a pass over tokens (n,) on the model's device that follow the `cached` slots."""
        n, device = len(tokens), self._device
        depths = torch.arange(n, device=device)
        ancestors = torch.ones(n, n, dtype=torch.bool, device=device).tril()
        return PassInputs(
            tokens[None], None if n == 1 else self._masks(ancestors, depths, cached), (depths + cached)[None]
        )

    def of_layer(self, tokens: torch.Tensor, ancestors: torch.Tensor, depths: torch.Tensor, length: int) -> PassInputs:
        """Return the inputs of the newest n nodes of a tree after `length` tokens, whose other nodes have their slots
        in the cache, in order: for a tree that is grown layer by layer.

        `tokens` (n,); `ancestors` (n, nodes) bool: the nodes that each new node sees; `depths` (nodes,).
        """
        n = len(tokens)
        inputs = PassInputs(tokens[None], self._masks(ancestors, depths, length), (depths[-n:] + length)[None])
        if self._info.key_bias is None:
            return inputs
        before = torch.arange(length, device=self._device)
        return inputs._replace(key_positions=torch.cat([before, depths[:-n] + length])[None])

    def _of_batch(self, drafts: Sequence[Draft], lengths: Sequence[int], cached: int) -> PassInputs:
        device, n = self._device, max(map(len, drafts))
        ids = torch.tensor([int(draft.tokens[0]) for draft in drafts], device=device)[:, None].repeat(1, n)
        positions = torch.tensor(lengths, device=device)[:, None].repeat(1, n)
        visible = (torch.arange(cached + n, device=device) < positions[:, :1])[:, None].repeat(1, n, 1)
        for row, draft in enumerate(drafts):
            nodes = len(draft)
            ids[row, :nodes] = self._sent(draft.tokens)
            positions[row, :nodes] += self._sent(draft.depths)
            visible[row, :nodes, cached : cached + nodes] |= self._sent(draft.ancestors)
        keys = torch.cat([torch.arange(cached, device=device).expand(len(drafts), cached), positions], dim=1)
        mask = masks(self._info.layers, visible[:, None], positions, keys, self._dtype)
        if not self._info.recurrent or cached == 0:  # an empty cache has no state to begin with
            return PassInputs(ids, mask, positions)
        parents = [[*draft.parents.tolist(), *[0] * (n - len(draft))] for draft in drafts]
        return PassInputs(ids, mask, positions, parents=parents)

    def _sent(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _masks(self, ancestors: torch.Tensor, depths: torch.Tensor, length: int) -> Masks:
        """Return masks (1, 1, n, length + nodes) for the last n nodes of a tree; see `of_layer`."""
        n, nodes = ancestors.shape
        if self._sees_all:
            mask = _zeros((1, 1, n, length + nodes), self._dtype, self._device)
            mask[0, 0, :, length:].masked_fill_(~ancestors, torch.finfo(self._dtype).min)
            return mask
        before = torch.arange(length, device=self._device)
        visible = torch.cat([ancestors.new_ones(n, length), ancestors], dim=1)[None, None]
        positions = (depths + length)[None]
        keys = torch.cat([before[None], positions], dim=1)
        return masks(self._info.layers, visible, positions[:, -n:], keys, self._dtype)


def masks(
    layers: Mapping[str, Reach],
    visible: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    dtype: torch.dtype,
) -> Masks:
    """Return masks to be added to attention scores, (batch or 1, 1, n, length + n) each: 0 where a query sees a key,
    else the lowest number.

    `visible` (batch or 1, 1, n, length + n) bool leaves out padding, holes and unrelated tokens. Positions are (batch
    or 1, n) and (batch or 1, length + n). Layers of one reach share a mask; a single mask is returned by itself.
    """
    by_reach: dict[Reach, torch.Tensor] = {}
    for reach in layers.values():
        if reach not in by_reach:
            within = reach.of(query_positions, key_positions)
            visible_within = visible if within is None else visible & within
            by_reach[reach] = _zeros(visible_within.shape, dtype, visible_within.device)
            by_reach[reach].masked_fill_(~visible_within, torch.finfo(dtype).min)
    if len(by_reach) == 1:
        return next(iter(by_reach.values()))
    return {kind: by_reach[reach] for kind, reach in layers.items()}


def within_windows(mask: Masks, layers: Mapping[str, Reach], layer: TreeLayer) -> Masks:
    """Return masks without the slots that windowed layers such as `layer` have dropped."""
    if isinstance(mask, torch.Tensor):
        return _within_window(mask, layer)
    near = {id(whole): _within_window(whole, layer) for kind, whole in mask.items() if layers[kind] != Reach()}
    return {kind: near.get(id(whole), whole) for kind, whole in mask.items()}


def _within_window(mask: torch.Tensor, layer: TreeLayer) -> torch.Tensor:
    """Return the columns of a mask (batch, 1, n, length + nodes) that a layer still has, in the layer's order."""
    length, columns = layer.length, layer.columns
    if len(set(layer.starts)) == 1 and layer.starts[0] + columns == length:
        near = mask.narrow(3, layer.starts[0], mask.shape[3] - layer.starts[0])
    else:
        rows, _, n, _ = mask.shape
        slots = torch.tensor(layer.starts, device=mask.device)[:, None] + torch.arange(columns, device=mask.device)
        index = slots.clamp(max=length - 1)[:, None, None].expand(rows, 1, n, columns)
        cached = mask.gather(3, index).masked_fill((slots >= length)[:, None, None], torch.finfo(mask.dtype).min)
        near = torch.cat([cached, mask[..., length:]], dim=3)
    # On an accelerator, rows of a mask begin at multiples of `_ALIGNED`.
    return near if mask.device.type == "cpu" else _zeros(near.shape, mask.dtype, mask.device).copy_(near)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros whose rows begin at multiples of `_ALIGNED` on an accelerator."""
    *rows, columns = shape
    wide = columns if device.type == "cpu" else -(-columns // _ALIGNED) * _ALIGNED
    return torch.zeros(*rows, wide, dtype=dtype, device=device)[..., :columns]
