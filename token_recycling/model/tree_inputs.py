"""Ids, masks and positions of passes over trees.

Positions, not cache slots, decide what is within a window or a chunk: nodes of one depth lie in different slots and
have the same position. Rows may differ, so that the same code serves several texts with holes in their caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..trees.draft import Draft
from ..trees.packed import PackedTrees, send
from ..trees.tree import Tree
from .architectures import Reach
from .cache_layers import Frame
from .info import ModelInfo
from .shapes import band_of, rows_of

Masks = torch.Tensor | dict[str, torch.Tensor]
"""One mask for all layers, or one by type of layer."""
_MASK_GRAIN = 256
_ALIGNED = 8
"""Numbers: rows of a mask begin at multiples of it, as attention kernels of accelerators require."""


class TreeInputs:
    """Ids, masks and positions of one model's passes."""

    def __init__(self, info: ModelInfo, device: torch.device, dtype: torch.dtype) -> None:
        self._info, self._device, self._dtype = info, device, dtype
        self._widest: tuple[Tree | None, int, Masks] = None, 0, {}
        """The last tree, a length of text, and the tree's mask for it."""

    def of(self, drafts: Sequence[Draft], lengths: Sequence[int], held: int) -> dict[str, Any]:
        """Inputs of a pass over one draft for each text, filled up to the largest. The root of each follows
        `lengths[row]` tokens, the first ones of the `held` slots of the cache.
        """
        if len(drafts) > 1:
            return self._of_batch(drafts, lengths, held)
        (draft,) = drafts
        inputs: dict[str, Any] = {
            "input_ids": draft.tokens[None].to(self._device),
            "attention_mask": self._mask(draft.tree, held),
            "position_ids": (draft.tree.on(self._device).depths + held)[None],
        }
        if self._info.recurrent and len(draft.tree) > 1:
            inputs["parents"] = [draft.tree.parents]
        return inputs

    @property
    def fixed_shapes(self) -> bool:
        """Whether passes over drafts have shapes from few (`shapes`): on an accelerator, where positions are an
        argument.
        """
        info = self._info
        return self._device.type != "cpu" and info.branches and info.key_bias is None and not info.recurrent

    def of_packed(
        self, drafts: Sequence[Draft], lengths: Sequence[int], held: int
    ) -> tuple[dict[str, Any], PackedTrees]:
        """As `of`, in a fixed shape, and the trees on the device; the cache must take frames."""
        n = rows_of(max(len(draft.tree) for draft in drafts))
        trees = send(drafts, lengths, n, self._device)
        places = torch.arange(held, held + n, device=self._device).expand(len(drafts), -1)
        frame = Frame(places, band_of(held + n), held + n)
        return {**self.of_trees(trees, held, frame.band), "frame": frame}, trees

    def of_trees(self, trees: PackedTrees, start: int | torch.Tensor, band: int) -> dict[str, torch.Tensor | Masks]:
        """Inputs of a pass over packed trees whose nodes have the slots from `start`, a number or (batch, 1), on."""
        return {
            "input_ids": trees.tokens.clamp(min=0),
            "attention_mask": tree_masks(self._info.layers, trees, start, band, self._dtype),
            "position_ids": trees.positions,
        }

    def of_text(self, unread: torch.Tensor, draft: Draft, held: int) -> dict[str, Any]:
        """Inputs of a pass over a text's tokens (m,) behind the `held` slots of the cache and a draft below them: m + n
        rows.
        """
        m, shape = len(unread), draft.tree.on(self._device)
        depths = torch.cat([torch.arange(m, device=self._device), shape.depths + m])
        seen = torch.ones(len(depths), len(depths), dtype=torch.bool, device=self._device).tril()
        seen[m:, m:] = shape.ancestors
        return self.of_layer(torch.cat([unread, draft.tokens.to(self._device)]), seen, depths, held)

    def of_layer(
        self, tokens: torch.Tensor, ancestors: torch.Tensor, depths: torch.Tensor, length: int
    ) -> dict[str, Any]:
        """Inputs of the newest n nodes of a tree after `length` tokens, whose other nodes have their slots in the
        cache, in order: for a tree that is grown layer by layer.

        `tokens` (n,); `ancestors` (n, nodes) bool, what each of the new ones sees of all nodes; `depths` (nodes,).
        """
        n = len(tokens)
        inputs = {
            "input_ids": tokens[None],
            "attention_mask": self._masks(ancestors, depths, length),
            "position_ids": (depths[-n:] + length)[None],
        }
        if self._info.key_bias is not None:
            before = torch.arange(length, device=self._device)
            inputs["key_positions"] = torch.cat([before, depths[:-n] + length])[None]
        return inputs

    def _of_batch(self, drafts: Sequence[Draft], lengths: Sequence[int], held: int) -> dict[str, Any]:
        device, n = self._device, max(len(draft.tree) for draft in drafts)
        ids = torch.zeros(len(drafts), n, dtype=torch.long, device=device)
        positions = torch.tensor(lengths, device=device)[:, None].repeat(1, n)
        visible = (torch.arange(held + n, device=device) < positions[:, :1])[:, None].repeat(1, n, 1)
        for row, draft in enumerate(drafts):
            shape, nodes = draft.tree.on(device), len(draft.tree)
            ids[row, :nodes] = draft.tokens
            positions[row, :nodes] += shape.depths
            visible[row, :nodes, held : held + nodes] |= shape.ancestors
        keys = torch.cat([torch.arange(held, device=device).expand(len(drafts), held), positions], dim=1)
        mask = masks(self._info.layers, visible[:, None], positions, keys, self._dtype)
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        if self._info.recurrent:
            inputs["parents"] = [[*draft.tree.parents, *[0] * (n - len(draft.tree))] for draft in drafts]
        return inputs

    def _mask(self, tree: Tree, length: int) -> Masks | None:
        """(1, 1, n, length + n) each; None for a lone root, which sees everything.

        The mask of a longer text is the same with more columns before it, so each is a window on the last one; only
        where layers see fixed chunks of the text is it made anew.
        """
        n = len(tree)
        if n == 1:
            return None
        shape = tree.on(self._device)
        chunked = any(reach.kind == "chunked" for reach in self._info.layers.values())
        if chunked or self._device.type != "cpu":  # accelerators take no mask that begins anywhere
            return self._masks(shape.ancestors, shape.depths, length)
        known, room, widest = self._widest  # replaced as one, since several threads may draft with one model
        if known is not tree or room < length:
            # Room to grow only for a tree that comes again: many drafters make one for every step.
            room = -(-(2 * length if known is tree else length) // _MASK_GRAIN) * _MASK_GRAIN
            with torch.inference_mode(False), torch.no_grad():  # kept for later calls, outside of it too
                widest = self._masks(shape.ancestors, shape.depths, room)
            self._widest = tree, room, widest
        return _columns(widest, room - length, length + n)

    def _masks(self, ancestors: torch.Tensor, depths: torch.Tensor, length: int) -> Masks:
        """(1, 1, n, length + nodes) each, for the last n nodes of a tree; see `of_layer`."""
        n, nodes = ancestors.shape
        if all(reach == Reach() for reach in self._info.layers.values()):
            mask = _zeros((1, 1, n, length + nodes), self._dtype, self._device)
            mask[0, 0, :, length:].masked_fill_(~ancestors, torch.finfo(self._dtype).min)
            return mask
        before = torch.arange(length, device=self._device)
        visible = torch.cat([ancestors.new_ones(n, length), ancestors], dim=1)[None, None]
        positions = (depths + length)[None]
        keys = torch.cat([before[None], positions], dim=1)
        return masks(self._info.layers, visible, positions[:, -n:], keys, self._dtype)


def tree_masks(
    layers: Mapping[str, Reach], trees: PackedTrees, start: int | torch.Tensor, band: int, dtype: torch.dtype
) -> Masks:
    """Masks (batch, 1, n, band) of trees whose nodes have the slots from `start`, a number or (batch, 1), on: a node
    sees the tokens of its sequence, in the first slots, and its ancestors.
    """
    n = trees.tokens.shape[1]
    slots = torch.arange(band, device=trees.tokens.device)[None]
    nodes = slots - start
    drafted = (nodes >= 0) & (nodes < n)
    nodes = nodes.clamp(0, n - 1).expand(len(trees.tokens), -1)
    ancestors = trees.ancestors.gather(2, nodes[:, None].expand(-1, n, -1))
    visible = (slots < trees.lengths[:, None])[:, None] | (drafted[:, None] & ancestors)
    keys = torch.where(drafted, trees.positions.gather(1, nodes), slots)
    return masks(layers, visible[:, None], trees.positions, keys, dtype)


def masks(
    layers: Mapping[str, Reach],
    visible: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    dtype: torch.dtype,
) -> Masks:
    """Masks to be added to attention scores, (batch or 1, 1, n, length + n) each: 0 where a query sees a key, else the
    lowest number.

    `visible` (batch or 1, 1, n, length + n) bool says what may be seen at all: no padding, no holes, no unrelated
    tokens. Positions are (batch or 1, n) and (batch or 1, length + n). Layers of one reach share a mask; a single one
    is returned alone.
    """
    made: dict[Reach, torch.Tensor] = {}
    for reach in layers.values():
        if reach not in made:
            within = reach.of(query_positions, key_positions)
            seen = visible if within is None else visible & within
            made[reach] = _zeros(seen.shape, dtype, seen.device)
            made[reach].masked_fill_(~seen, torch.finfo(dtype).min)
    if len(made) == 1:
        return next(iter(made.values()))
    return {kind: made[reach] for kind, reach in layers.items()}


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros whose rows begin at multiples of `_ALIGNED` on an accelerator."""
    *rows, columns = shape
    wide = columns if device.type == "cpu" else -(-columns // _ALIGNED) * _ALIGNED
    return torch.zeros(*rows, wide, dtype=dtype, device=device)[..., :columns]


def _columns(mask: Masks, start: int, length: int) -> Masks:
    """Columns `start` to `start + length` of every mask, as views; a shared mask stays shared."""
    if isinstance(mask, torch.Tensor):
        return mask.narrow(3, start, length)
    views = {id(whole): whole.narrow(3, start, length) for whole in mask.values()}
    return {kind: views[id(whole)] for kind, whole in mask.items()}
