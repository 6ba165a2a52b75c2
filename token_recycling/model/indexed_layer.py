"""Tree layers of models with sparse attention, which use index keys to choose the keys they attend to.

Index keys move with their slots, and are dropped with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import DynamicLayer

from .._util.device import outside_inference_mode
from .compat import DynamicIndexedLayer
from .tree_layer import TreeLayer, roll


class IndexedTreeLayer(TreeLayer, DynamicIndexedLayer):
    """A layer of a model with sparse attention, which also keeps index keys (batch, slots, size)."""

    indexer_keys: torch.Tensor | None
    _has_positions = False
    """Whether the model passes positions."""
    _paddings: Sequence[int] = ()
    """Padding slots before each sequence after it was handed back; else empty."""
    _taken: torch.Tensor | None = None
    """Index keys that `take` has written, until `admit` counts them."""

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """(3, batch, slots) positions of the slots, which some models read; None if there are no slots."""
        if not self.columns:
            return None
        device = self.buffers[0].device
        positions = torch.arange(self.columns, device=device)
        paddings = torch.tensor(self._paddings or [0] * self.rows, device=device)
        return (positions - paddings[:, None]).clamp(min=0).expand(3, -1, -1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: torch.Tensor | None) -> None:
        """Record only that there are positions. Models append those of a pass, draft nodes included, and never remove
        any; slots show which are left, since each sequence is in the slots from 0 on, in order.
        """
        self._has_positions = positions is not None

    def take_over(self, layer: Any) -> None:
        super().take_over(layer)
        if layer.indexer_keys is not None:
            self.update_indexer(layer.indexer_keys)

    def _plain_layer(self) -> DynamicLayer:
        plain = DynamicIndexedLayer()
        if self.indexer_keys is not None:
            plain.update_indexer(self.indexer_keys)
        if self._has_positions:
            plain.indexer_position_ids = self.indexer_position_ids
        return plain

    @outside_inference_mode
    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append index keys and return those of all slots, as in transformers."""
        return super().update_indexer(indexer_key_states)

    def slice(self, row: int, first: int, last: int) -> list[torch.Tensor]:
        states = super().slice(row, first, last)
        return states if self.indexer_keys is None else [*states, self.indexer_keys[row, first:last]]

    def append(self, states: Sequence[torch.Tensor]) -> None:
        super().append(states)
        for keys in states[2:]:
            self.update_indexer(keys[None])

    def move(self, rows: torch.Tensor, columns: torch.Tensor, to: torch.Tensor) -> None:
        super().move(rows, columns, to)
        if self.indexer_keys is not None:
            self.indexer_keys[rows, to] = self.indexer_keys[rows, columns]

    def shift(self, distances: Sequence[int], lengths: Sequence[int]) -> None:
        touched = max(self.columns, max(lengths))
        super().shift(distances, lengths)
        self._paddings = [max(0, distance) for distance in distances]
        if self.indexer_keys is not None:
            self.indexer_keys = pad(self.indexer_keys, (0, 0, 0, touched - self.indexer_keys.shape[1]))
            for row, distance in enumerate(distances):
                roll(self.indexer_keys[row], distance)
            self.indexer_keys = self.indexer_keys[:, : self.length]

    def settle(self, lengths: Sequence[int]) -> None:
        super().settle(lengths)
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[:, : self.length]

    def wipe(self, lengths: Sequence[int]) -> None:
        super().wipe(lengths)
        if self.indexer_keys is not None:
            for row, length in enumerate(lengths):
                self.indexer_keys[row, length:] = 0

    def take(self, other: TreeLayer, first: int, lengths: Sequence[int]) -> None:
        super().take(other, first, lengths)
        assert isinstance(other, IndexedTreeLayer)
        if (given := other.indexer_keys) is not None:
            kept = [] if self.indexer_keys is None else [*self.indexer_keys[:first]]
            taken = [given[row, :length] for row, length in enumerate(lengths)]
            self._taken = pad_sequence([*kept, *taken], batch_first=True)

    def admit(self, first: int, lengths: Sequence[int]) -> None:
        super().admit(first, lengths)
        self._paddings = []
        if (taken := self._taken) is not None:
            self.indexer_keys = self._taken = None
            self.is_indexer_initialized = False
            self.update_indexer(taken[:, : self.length])

    def select(self, rows: Sequence[int], slots: int) -> None:
        super().select(rows, slots)
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[list(rows), :slots]
        self._paddings = [self._paddings[row] for row in rows] if self._paddings else []

    def cut(self, slots: int) -> None:
        super().cut(slots)
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[:, : self.length]

    def reset(self) -> None:
        super().reset()
        self.indexer_keys, self.is_indexer_initialized = None, False

    def _pick(self, rows: torch.Tensor) -> None:
        super()._pick(rows)
        self._paddings = []
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[rows.to(self.indexer_keys.device)]


class BlockTreeLayer(IndexedTreeLayer):
    """A layer of MiniMax M3, which attends to blocks of keys and chooses them by one index key (1, size) per slot."""

    def take_over(self, layer: Any) -> None:
        TreeLayer.take_over(self, layer)
        if self.buffers:
            self.update_index(layer.idx_keys)

    def _plain_layer(self) -> DynamicLayer:
        from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLSparseCacheLayer

        plain: DynamicLayer = MiniMaxM3VLSparseCacheLayer()
        if self.indexer_keys is not None:
            plain.update_index(self.indexer_keys[:, None])
        return plain

    def update_index(self, idx_k: torch.Tensor) -> torch.Tensor:
        """Append index keys (batch, 1, n, size) and return those of all slots, as in transformers."""
        return self.update_indexer(idx_k[:, 0])[:, None]
