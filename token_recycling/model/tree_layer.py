"""Cache layers for the slots of a tree: slots of rejected nodes are dropped, those of accepted nodes move.

Every layer owns the buffers of its keys and values, with capacity for an eighth more slots than are in use, so earlier
slots are seldom copied. Layers with a sliding window or chunks drop slots that no later token sees, in blocks, for each
sequence of a batch separately (`window_start`). So memory is that of plain decoding plus an eighth. Layers of an
offloaded cache have their buffers in host memory: a step copies the slots of one layer after another to the device, and
only its own nodes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .._util.device import outside_inference_mode
from .compat import left_by_crop

_GRAIN = 64
"""Capacities are multiples of this."""
_SPARE, _LEAST_SPARE = 8, 128
"""Spare capacity: one part in `_SPARE` of the slots in use, at least `_LEAST_SPARE` slots."""
_MARGIN = 16
"""Slots kept before a window, so that a few tokens can be taken back."""
WINDOW_NODES = 64
"""Slots that a layer with a window has for draft nodes before it needs more."""
_WINDOW_IN_A_TENSOR = [
    name for name, value in vars(DynamicSlidingWindowLayer(sliding_window=1)).items() if isinstance(value, torch.Tensor)
]
"""Attributes in which transformers' sliding layers store the window as a tensor, as iteration over a cache
yields it.
"""
_SMALLEST_BLOCK, _LARGEST_BLOCK, _BLOCKS = 16, 256, 16
"""Slots are dropped in blocks of a sixteenth of the window, within these limits."""


def _block(window: int) -> int:
    return min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, window // _BLOCKS // 8 * 8))


def window_start(lengths: Any, window: int) -> Any:
    """Return the first slot that is kept of a sequence of `lengths` tokens, an int or a tensor of them, in a layer
    whose tokens see the last `window` ones.
    """
    block = _block(window)
    unseen = lengths - window - _MARGIN
    unseen = unseen.clamp(min=0) if isinstance(unseen, torch.Tensor) else max(0, unseen)
    return unseen // block * block


def window_band(window: int, nodes: int) -> int:
    """Return how many slots a layer with this window needs for any sequence and `nodes` nodes of a draft."""
    return _rounded(window + _MARGIN + _block(window) + nodes)


def capacity(slots: int, window: int = 0) -> int:
    """Return the capacity of a layer that needs `slots` slots. With a window, it has no more spare slots than any
    sequence needs; captured passes take up to twice `slots`.
    """
    ample = slots + max(slots // _SPARE, _LEAST_SPARE)
    return _rounded(max(slots, min(ample, window_band(window, WINDOW_NODES))) if window else ample)


def _rounded(slots: int) -> int:
    return -(-slots // _GRAIN) * _GRAIN


@dataclass(frozen=True, eq=False)
class Frame:
    """The slots that a forward pass of a fixed shape writes and attends to."""

    slots: torch.Tensor
    """(batch, n) int64: the slot of every node."""
    band: int
    """Slots that attention runs over, from the first one on."""
    windowed: Frame | None = None
    """The same in layers that drop slots; None where none does."""


class _States:
    """The keys or values of a `TreeLayer`, as attributes like those of a transformers layer."""

    def __init__(self, part: int) -> None:
        """`part`: 0 for the keys, 1 for the values."""
        self._part = part

    def __get__(self, layer: TreeLayer, cls: type | None = None) -> torch.Tensor | None:
        """Return states (batch, heads, n, size) of the slots that the next token sees: layers of transformers keep no
        others.
        """
        if not layer.buffers:
            return None
        layer.shown = True
        states = layer.states()[self._part]
        return states[:, :, -layer.window + 1 :] if layer.window > 1 else states

    def __set__(self, layer: TreeLayer, states: torch.Tensor | None) -> None:
        """Turn the layer into one of transformers: states set from outside need not be views of buffers."""
        if states is not None:  # the constructor of transformers sets None
            layer.hand_back(self._part, states)


class TreeLayer(DynamicLayer):
    """Keys and values of one layer, in its own buffers; for all other code a `DynamicLayer`."""

    keys = _States(0)
    values = _States(1)
    frame: Frame | None = None
    """Frame of the current forward pass, if its shape is fixed."""
    shown = False
    """Whether other code may hold views of the buffers, which must then not be written to."""

    def __init__(self, window: int = 0) -> None:
        """`window`: the number of tokens that a token may see, itself included; 0 for all."""
        self.window = window
        """Slots outside the window are dropped; 0 keeps all."""
        self.is_sliding = window > 0
        for name in _WINDOW_IN_A_TENSOR if window else ():
            setattr(self, name, torch.tensor(window))
        self.buffers: list[torch.Tensor] = []
        """(2, sequences, heads, capacity, size) of keys and values, or (1, ...) of each if they differ in size. Empty
        before the first pass.
        """
        self.rows = 0
        """Sequences; the buffers may have capacity for more."""
        self.length = 0
        """Slots of the longest sequence, including dropped ones."""
        self.columns = 0
        """Slots of the buffers in use."""
        self.starts: list[int] = []
        """By sequence, the number of dropped slots: the slot of this number is in the first column."""
        self.first_needed = 0
        """Slots before this one are seen by no pass after the next one, in any sequence."""
        self.reserved = 0, 0
        """Sequences and columns for which the buffers are first allocated."""
        super().__init__()
        self.device: torch.device

    def states(self) -> list[torch.Tensor]:
        """Return views of the keys and values (batch, heads, columns, size) of all slots."""
        parts = self.buffers[0][0], self.buffers[-1][-1]
        return [part[: self.rows, :, : self.columns] for part in parts]

    def hand_back(self, part: int, states: torch.Tensor) -> None:
        """Turn into a layer of transformers, with keys (`part` 0) or values (1) that other code has set."""
        plain = self._plain_layer()
        if plain is None:
            raise AttributeError(f"keys and values of a {type(self).__name__} are views of its buffers; call update()")
        parts: list[Any] = [self.keys, self.values]
        parts[part] = states
        self._become(plain, parts)

    def release(self) -> None:
        """Turn into a layer of transformers, if there is one of this kind, with keys and values as such a layer has
        them: contiguous and not shared.
        """
        if (plain := self._plain_layer()) is not None:
            states = [states.contiguous() for states in (self.keys, self.values) if states is not None]
            self._become(plain, states)

    def _plain_layer(self) -> DynamicLayer | None:
        """Return an empty layer of transformers of the same kind, or None if there is none."""
        if type(self) is not TreeLayer:
            return None
        return DynamicSlidingWindowLayer(sliding_window=self.window) if self.window else DynamicLayer()

    def _become(self, plain: DynamicLayer, parts: Sequence[Any]) -> None:
        """Turn into a layer of transformers with these keys and values, or without any."""
        if parts:
            plain.lazy_initialization(*parts)
            plain.keys, plain.values = parts
        if isinstance(plain, DynamicSlidingWindowLayer):
            plain.cumulative_length = self.length
        self.__class__, self.__dict__ = type(plain), vars(plain)

    # Capacity

    def _empty(self, like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Return a buffer like (parts, batch, heads, n, size), for `rows` sequences and `columns` slots."""
        # Zeros: fixed-shape passes attend to masked slots that were never written, and zero times NaN is NaN.
        parts, _, heads, _, size = like.shape
        return like.new_zeros(parts, rows, heads, columns, size)

    @outside_inference_mode
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate buffers for keys and values like these (batch, heads, n, size)."""
        self.device, self.dtype = key_states.device, key_states.dtype
        like = [states[None] for states in (key_states, value_states)]
        # Under autocast they may have two dtypes: rotary embeddings compute keys in float32.
        if like[0].shape == like[1].shape and like[0].dtype == like[1].dtype:
            like = [like[0].expand(2, -1, -1, -1, -1)]
        rows, (reserved, columns) = len(key_states), self.reserved
        self.buffers = [self._empty(buffer, max(rows, reserved), columns) for buffer in like]
        self.rows, self.starts = rows, [0] * rows
        self.is_initialized = True

    def reserve(self, rows: int, columns: int, exactly: bool = False) -> None:
        """Ensure capacity for this many sequences and columns; unless `exactly`, it grows with some to spare."""
        _, have_rows, _, have_columns, _ = self.buffers[-1].shape
        if rows <= have_rows and columns <= have_columns:
            return
        if columns > have_columns:
            have_columns = columns if exactly else capacity(columns, self.window)
        if rows > have_rows:
            have_rows = rows if exactly else max(rows, 2 * have_rows)
        self._grow(have_rows, have_columns)

    @outside_inference_mode
    def _grow(self, rows: int, columns: int) -> None:
        """Replace the buffers with larger ones, one after the other; so the capacity is that of the last buffer."""
        for index, buffer in enumerate(self.buffers):
            grown = self._empty(buffer, rows, columns)
            grown[:, : self.rows, :, : self.columns] = buffer[:, : self.rows, :, : self.columns]
            self.buffers[index] = grown

    def own(self) -> None:
        """Ensure that no other code holds views of the buffers: a transformers layer never writes to keys that it has
        returned.
        """
        if self.shown:
            self._grow(*self.buffers[-1].shape[1:4:2])
            self.shown = False

    def __copy__(self) -> TreeLayer:
        copied: TreeLayer = object.__new__(type(self))
        self.shown = bool(self.buffers)
        copied.__dict__.update(vars(self), buffers=[*self.buffers], starts=[*self.starts])
        return copied

    def take_over(self, layer: Any) -> None:
        """Copy the slots of a transformers layer, except those that it has dropped; this layer is empty."""
        if layer.keys is not None:
            self.load(layer.keys, layer.values, layer.cumulative_length - layer.keys.shape[2] if self.window else 0)
            self.device = layer.device  # the states of an offloaded layer lie elsewhere

    def load(self, keys: torch.Tensor, values: torch.Tensor, dropped: int) -> None:
        """Store these slots (batch, heads, n, size), which follow `dropped` dropped ones; the layer is empty."""
        self.update(keys, values)
        self.length, self.starts = self.length + dropped, [dropped] * self.rows

    # Forward passes

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states (batch, heads, n, size) and return views of all slots, or of those in the frame's band."""
        rows, n = len(key_states), key_states.shape[2]
        self.own()
        if not self.buffers:
            self.lazy_initialization(key_states, value_states)
        elif not self.length and self.rows != rows:  # emptied, for another number of sequences
            self.rows, self.starts = 0, [0] * rows
            self.reserve(rows, 0)
            self.rows = rows
        elif self.rows != rows and self.frame is None:  # a frame may have fewer
            raise RuntimeError(f"the cache must hold the {rows} sequences of the pass, got {self.rows}")
        if self.frame is not None:
            return self._update_frame(self.frame, key_states, value_states)
        for part, states in (0, key_states), (-1, value_states):
            buffer = self.buffers[part]
            if states.dtype != buffer.dtype:  # such as after converting the model, in plain `generate`
                self.buffers[part] = buffer.to(torch.promote_types(states.dtype, buffer.dtype))
        self.dtype = self.buffers[0].dtype
        start, end = self.columns, self.columns + n
        self.length += n
        _, most_rows, _, most_columns, _ = self.buffers[-1].shape
        if rows > most_rows or end > most_columns:
            surplus = self.first_needed - min(self.starts)
            if self.window and surplus > 0 and end > most_columns:
                return self._update_window(key_states, value_states, surplus)
            self.reserve(rows, end)
        self.columns = end
        keys, values = self.buffers[0][0, :rows, :, :end], self.buffers[-1][-1, :rows, :, :end]
        keys.narrow(2, start, n).copy_(key_states)
        values.narrow(2, start, n).copy_(value_states)
        return keys, values

    def _update_window(
        self, key_states: torch.Tensor, value_states: torch.Tensor, surplus: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states and return all slots; the first `surplus` slots are dropped after this pass."""
        before = self.states()
        keys = torch.cat([before[0].to(key_states.device), key_states], dim=2)
        values = torch.cat([before[1].to(value_states.device), value_states], dim=2)
        rows, columns = len(keys), keys.shape[2] - surplus
        self.starts = [first + surplus for first in self.starts]
        self.columns = 0  # nothing is copied into larger buffers
        self.reserve(rows, columns)
        self.columns = columns
        self.buffers[0][0, :rows, :, :columns] = keys[:, :, surplus:]
        self.buffers[-1][-1, :rows, :, :columns] = values[:, :, surplus:]
        return keys, values

    def _update_frame(
        self, frame: Frame, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write states to the slots of a frame and return its band."""
        own = frame.windowed if self.window and frame.windowed is not None else frame
        rows, slots = len(key_states), own.slots[:, None, :, None]
        self.reserve(rows, own.band)
        self.length, self.columns = frame.band, own.band
        keys, values = self.buffers[0][0, :rows, :, : own.band], self.buffers[-1][-1, :rows, :, : own.band]
        keys.scatter_(2, slots.expand_as(key_states), key_states)
        values.scatter_(2, slots.expand_as(value_states), value_states)
        return keys, values

    # Slots

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many slots the next pass attends to, and how many were dropped before them."""
        return self.columns + query_length, self.length - self.columns

    def cut(self, slots: int) -> None:
        """Discard all slots from number `slots` on."""
        if slots == 0:
            self.length = self.columns = self.first_needed = 0
            self.starts = [0] * self.rows
            return
        assert not self.window or max(self.starts) <= max(0, slots - self.window + 1), "a window lacks earlier slots"
        self.columns -= self.length - slots
        self.length = slots

    def settle(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths[row]` slots of each sequence, and drop those before its window."""
        if self.rows != len(lengths):  # a frame was padded with further sequences
            self.rows, self.starts = len(lengths), (self.starts + [0] * len(lengths))[: len(lengths)]
        if self.window:
            self._drop(lengths)
        self.length = max(lengths)
        self.columns = max(map(sub, lengths, self.starts))

    def wipe(self, lengths: Sequence[int]) -> None:
        """Write zeros after the first `lengths[row]` slots of each sequence."""
        for buffer in self.buffers:
            for row, slots in enumerate(buffer.unbind(1)):
                slots[:, :, lengths[row] - self.starts[row] if row < len(lengths) else 0 :] = 0

    def _drop(self, lengths: Sequence[int]) -> None:
        """Drop the slots before the window of each sequence, which has `lengths[row]` slots."""
        for row, (length, start, before) in enumerate(zip(lengths, self._starts(lengths), self.starts, strict=True)):
            if start > before:
                for buffer in self.buffers:
                    slots = buffer[:, row]
                    slots[:, :, : length - start] = slots[:, :, start - before : length - before].clone()
                self.starts[row] = start

    def _starts(self, lengths: Sequence[int]) -> list[int]:
        """Return how many slots sequences of these lengths have dropped."""
        return [window_start(length, self.window) if self.window else 0 for length in lengths]

    def shift(self, distances: Sequence[int], lengths: Sequence[int]) -> None:
        """Move each sequence by `distances[row]` slots, to the right if positive, filling with zeros; it then has
        `lengths[row]`.
        """
        starts = self._starts(lengths)
        columns = max(map(sub, lengths, starts))
        touched = max(self.columns, columns)
        self.reserve(self.rows, touched)
        for buffer in self.buffers:
            buffer[:, : self.rows, :, self.columns : touched] = 0
            for row, distance in enumerate(distances):
                roll(buffer[:, row, :, :touched], distance + self.starts[row] - starts[row])
        self.starts, self.length, self.columns = starts, max(lengths), columns

    def take(self, other: TreeLayer, first: int, lengths: Sequence[int]) -> None:
        """Write the first `lengths[row]` slots of each sequence of another layer, followed by zeros, as the sequences
        from number `first` on; they count after `admit`.
        """
        starts = self._starts(lengths)
        columns = max(map(sub, lengths, starts))
        if not self.buffers:
            self.lazy_initialization(*(states[:0] for states in other.states()))
            self.device = other.device  # where the slots of an offloaded layer are not
        used = max(columns, self.columns) if first else columns
        self.reserve(first + len(lengths), used)
        for own, given in zip(self.buffers, other.buffers, strict=True):
            own[:, :first, :, self.columns : used] = 0
            for row, (length, start) in enumerate(zip(lengths, starts, strict=True)):
                slots, dropped = own[:, first + row], other.starts[row]
                begin, end = max(0, dropped - start), length - start
                slots[:, :, :begin] = 0  # no later token sees these
                slots[:, :, begin:end] = given[:, row, :, start + begin - dropped : length - dropped]
                slots[:, :, end:used] = 0

    def admit(self, first: int, lengths: Sequence[int]) -> None:
        """Count the sequences that `take` has written."""
        starts = self._starts(lengths)
        columns = max(map(sub, lengths, starts))
        self.starts = [*self.starts[:first], *starts]
        self.rows = len(self.starts)
        self.length = max(max(lengths), self.length if first else 0)
        self.columns = max(columns, self.columns if first else 0)

    def move(self, rows: torch.Tensor, columns: torch.Tensor, to: torch.Tensor) -> None:
        """Copy slots (n,) of sequences to other columns (n,) of the same sequences, in one operation."""
        for buffer in self.buffers:
            buffer[:, rows, :, to] = buffer[:, rows, :, columns]

    def slice(self, row: int, first: int, last: int) -> list[torch.Tensor]:
        """Return views of some slots of one sequence; see `Slots`."""
        return [part[row, :, first:last] for buffer in self.buffers for part in buffer]

    def append(self, states: Sequence[torch.Tensor]) -> None:
        """Append slots of the only sequence, as `slice` returns them."""
        self.update(states[0][None], states[1][None])

    def select(self, rows: Sequence[int], slots: int) -> None:
        """Keep only these sequences, in this order, with up to `slots` slots. One may move to the row of a removed
        sequence, or the first one be copied to all rows.
        """
        self.reserve(len(rows), self.columns, exactly=True)
        for row, source in enumerate(rows):
            if row != source:
                for buffer in self.buffers:
                    buffer[:, row, :, : self.columns] = buffer[:, source, :, : self.columns]
        self.starts, self.rows = [self.starts[row] for row in rows], len(rows)
        self.columns = min(self.columns, slots - min(self.starts))
        self.length = slots

    # Interface of caches in transformers

    def crop(self, tokens_to_remove: int) -> None:
        """Discard the last `-tokens_to_remove` slots; as in transformers, not after the window has been filled."""
        if 0 < self.window <= self.length:
            raise RuntimeError(
                f"crop() cannot remove tokens after the sliding window of {self.window} has been filled, got "
                f"{self.length}; call activate_past_recording() before that"
            )
        if self.buffers:
            self.cut(left_by_crop(tokens_to_remove, self.length))

    def reset(self) -> None:
        """Discard everything, so that later states may have another dtype or size."""
        self.cut(0)
        self.buffers, self.rows, self.starts, self.is_initialized = [], 0, [], False

    def activate_past_recording(self) -> None:
        """Turn into a layer of transformers, which keeps all slots until it is cropped; do nothing without a window."""
        if self.window:
            self.release()
            self.activate_past_recording()  # the method of transformers

    def _pick(self, rows: torch.Tensor) -> None:
        """Select the sequences with these numbers."""
        for index, buffer in enumerate(self.buffers):
            self.buffers[index] = buffer[:, rows.to(buffer.device)]
        self.starts, self.rows = [self.starts[row] for row in rows.tolist()], len(rows)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self.length:
            self._pick(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.length:
            self._pick(torch.arange(self.rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.length:
            self._pick(torch.arange(self.rows, device=indices.device)[indices])


class OffloadedTreeLayer(TreeLayer):
    """A layer whose slots are in host memory, and on the device only while it attends to them."""

    def _empty(self, like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        # The heads of a slot are contiguous, so the slots of one sequence are copied to the device in one piece.
        parts, _, heads, _, size = like.shape
        pinned = torch.cuda.is_available()
        return torch.empty(parts, rows, columns, heads, size, dtype=like.dtype, pin_memory=pinned).transpose(2, 3)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append as in a `TreeLayer`; return copies of all slots on the device."""
        keys, values = super().update(key_states, value_states)
        # The host waits for this copy, as for that of the new slots, so nothing is read before it has arrived.
        return keys.to(self.device), values.to(self.device)

    def offload(self) -> None:
        """Do nothing: every new slot was copied to the host immediately."""

    def prefetch(self) -> None:
        """Do nothing: one layer at a time is on the device."""


def roll(states: torch.Tensor, distance: int) -> None:
    """Move states (..., slots, size) in place; zeros enter from the left."""
    if distance:
        states.copy_(states.roll(distance, dims=-2))
        states[..., : max(0, distance), :] = 0
