"""Captured forward passes of one model: slots, buffers and graphs that persist from call to call."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from threading import Lock, get_ident
from typing import Any, NamedTuple

import torch
from transformers.utils.logging import tqdm

from ..._util.device import outside_inference_mode
from ...trees.draft import Draft, star
from ...trees.packed import PackedTrees, pack, packed_size, unpack
from ..frames import ROWS, SHORTEST_BAND, band_of, batch_of, packed_inputs, rows_of
from ..hidden import layer_states
from ..kv_cache import TreeCache
from ..runner import NoFastPathError, Pass, Runner
from ..state import state_of
from ..target import Target
from .capture import Graphs

_AHEAD = 2048
"""Slots reserved beyond twice a prompt, if the sequence may need them; after that, capacity doubles."""
_EIGHTHS = 8
"""Capacities are multiples of an eighth of the power of two below them."""
_COMMON_ROWS = ROWS[:5]
"""Numbers of rows in most passes: trees of up to 64 nodes, and 1 where drafting is disabled."""
_COMMON_NODES = 256
"""Rows of all sequences together, in most passes over a batch."""
_COMMON_SLOTS = 4096
"""Slots reserved for their graphs: prompts of up to 1,024 tokens do not move them."""


class Shape(NamedTuple):
    """Constants of a pass, which determine every operation."""

    batch: int
    nodes: int
    """n of each sequence, padding to the bucket included."""
    band: int
    """Slots that attention runs over, those of the nodes included."""
    states: tuple[int, ...] = ()
    """Numbers of the hidden states that drafters read."""


class _Buffer(NamedTuple):
    """Packed drafts of one shape, on the host and on the device."""

    on_host: torch.Tensor
    on_device: torch.Tensor
    trees: PackedTrees


class CapturedPasses:
    """Created once per state of a model. Serves one call, or one continuous batch, at a time."""

    kind = "captured"
    """Name under which the costs of these passes are stored."""

    def __init__(self, target: Target) -> None:
        self.device = target.device
        self.state: list[Any] | None = None
        """State of the model when these passes were tested."""
        self._free = Lock()
        self._holder: int | None = None
        self._suspends = False
        """Whether the call that holds the passes may be suspended for any length of time."""
        self._graphs = Graphs(self.device)
        self._buffers: dict[tuple[int, int], _Buffer] = {}
        self._results: dict[tuple[str, torch.Size, torch.dtype], torch.Tensor] = {}
        self.batch = self.capacity = 0
        self._addresses: list[int] = []
        """Addresses of the slots that the graphs use."""
        self.slots = self._empty(target)

    def runner(self, eager: Runner, longest: int) -> GraphRunner:
        """Return a runner that replaces an eager one, for sequences that may grow up to `longest` tokens."""
        return GraphRunner(self, eager, longest)

    def acquire(self, suspends: bool = False) -> bool:
        """Acquire the passes for one call; return whether they were free. No call waits for one that `suspends`."""
        is_free = self._free.acquire(blocking=False)
        if is_free:
            self._holder, self._suspends = get_ident(), suspends
        return is_free

    def release(self) -> None:
        """Release the passes at the end of a call, from any thread."""
        self._holder = None
        self._free.release()

    def wait(self) -> bool:
        """Wait until no call holds the passes. Return False immediately if this thread's own call holds them, or if
        that call may be suspended.
        """
        if self._suspends or self._holder == get_ident():
            return False
        with self._free:
            return True

    def _empty(self, target: Target, drops: bool = True) -> TreeCache:
        """Return a cache without slots, whose layers drop slots outside their windows unless `drops` is False."""
        self.batch = self.capacity = 0
        cache = target.new_cache()
        if not drops:
            cache.keep_all()
        return cache

    @outside_inference_mode
    def begin(self, target: Target, cache: TreeCache, lengths: Sequence[int], longest: int) -> None:
        """Hold the sequences of a cache from now on; their prompts have `lengths` tokens and may grow up to `longest`.
        Cached slots are copied; without any, prompts are read directly into these slots, without a second copy.
        """
        if (cache.windowed is None) != (self.slots.windowed is None):
            self.slots = self._empty(target, drops=cache.windowed is not None)
        self.slots.crop(0)
        self.reserve(len(lengths), min(longest + ROWS[-1], 2 * max(lengths) + _AHEAD))
        if cache.length:
            self.slots.take(cache, 0, lengths)

    @outside_inference_mode
    def reserve(self, sequences: int, slots: int, nodes: int = _COMMON_ROWS[-1]) -> None:
        """Ensure capacity for this many sequences and slots, and keep the slots of the sequences. If memory does not
        suffice for graphs as well, passes are no longer captured.
        """
        batch, capacity = max(self.batch, batch_of(sequences)), self.capacity
        if slots > capacity:
            grain = max(1 << max(0, slots.bit_length() - 1), SHORTEST_BAND) // _EIGHTHS
            capacity = -(-slots // grain) * grain
        try:
            self.slots.reserve(batch, capacity, nodes)
        except torch.OutOfMemoryError:
            self._graphs.stop("there was not enough memory for longer sequences")
            self.slots.reserve(batch, slots, nodes)
            capacity = max(slots, self.capacity)
        self.batch, self.capacity = batch, capacity

    def join(self, other: TreeCache) -> None:
        """Add the sequence of another cache."""
        sequences, cached = self.slots.rows, other.length
        self.reserve(sequences + 1, cached if cached <= self.capacity else 2 * max(cached, self.capacity))
        self.slots.take(other, sequences, [cached])

    @outside_inference_mode
    def forward(
        self, target: Target, drafts: Sequence[Draft], lengths: Sequence[int], states: tuple[int, ...] = ()
    ) -> Pass:
        """Run one pass over drafts below sequences of `lengths` cached tokens; it also returns the hidden states
        numbered `states`. Logits and states belong to the caller; the next pass overwrites the trees.
        """
        nodes = rows_of(max(map(len, drafts)))
        batch, slots = batch_of(len(drafts)), max(lengths) + nodes
        self.reserve(batch, slots if slots <= self.capacity else 2 * self.capacity + nodes, nodes)
        shape = Shape(batch, nodes, min(band_of(slots), self.capacity), states)
        if self._addresses != (addresses := self.slots.addresses()):
            self._graphs.forget()  # they use the old addresses
            self._addresses = addresses
        buffer = self._buffer(shape.batch, nodes)
        absent = shape.batch - len(drafts)
        pack([*drafts, *[drafts[0]] * absent], [*lengths, *[0] * absent], nodes, buffer.on_host)
        if self.device.type != "cpu":
            buffer.on_device.copy_(buffer.on_host, non_blocking=True)
        if shape not in self._graphs:
            self._check_state(target)
        logits, read = self._graphs.run(shape, partial(self._pass, target, shape, buffer.trees))
        trees = PackedTrees(*(part[: len(drafts)] for part in buffer.trees))
        read = None if read is None else read[: len(drafts)].clone()
        return Pass(lengths, lengths, logits[: len(drafts)].clone(), read, trees=trees)

    def _check_state(self, target: Target) -> None:
        """Raise NoFastPathError before a capture if the model has changed since these passes were tested."""
        if self.state is not None and self.state != state_of(target):
            raise NoFastPathError(
                "an adapter, part or option of the model changed during the call; change it between calls, or leave "
                "fast=True out"
            )

    def _pass(self, target: Target, shape: Shape, trees: PackedTrees) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run what a graph captures: return logits (batch, n, vocabulary) and hidden states of the nodes of `trees`,
        and write their slots. Nothing else changes, so it may run again.
        """
        with layer_states(target.model, shape.states) as states:
            logits = target.forward(packed_inputs(target, trees, shape.band, self.slots), self.slots)
        return self._shared("logits", logits), self._shared("states", states[-1]) if states else None

    def _shared(self, name: str, result: torch.Tensor) -> torch.Tensor:
        """Copy a result into the tensor shared by all graphs of one shape, so that memory holds it once."""
        if self.device.type != "cuda":
            return result
        key = name, result.shape, result.dtype
        if key not in self._results:
            self._results[key] = torch.empty_like(result)
        return self._results[key].copy_(result)

    def _buffer(self, batch: int, nodes: int) -> _Buffer:
        if (batch, nodes) not in self._buffers:
            size = packed_size(batch, nodes)
            on_host = torch.zeros(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            on_device = on_host if self.device.type == "cpu" else torch.empty_like(on_host, device=self.device)
            self._buffers[batch, nodes] = _Buffer(on_host, on_device, unpack(on_device, batch, nodes))
        return self._buffers[batch, nodes]

    def capture_common(self, target: Target, sequences: int, states: tuple[int, ...]) -> None:
        """Capture passes over up to `sequences` sequences in the common numbers of rows; earlier captures are kept.
        They are valid for up to `_COMMON_SLOTS` slots: a longer sequence needs more slots, at other addresses.
        """
        most = target.max_length
        self.reserve(sequences, _COMMON_SLOTS if most is None else min(_COMMON_SLOTS, most + ROWS[-1]))
        batches = sorted({batch_of(number) for number in range(1, sequences + 1)})
        common = [
            (batch, rows)
            for batch in batches
            for rows in _COMMON_ROWS
            if batch * rows <= max(_COMMON_NODES, _COMMON_ROWS[1] * batch)
        ]
        missing = [
            (batch, rows) for batch, rows in common if Shape(batch, rows, band_of(1 + rows), states) not in self._graphs
        ]
        bar = tqdm(missing, desc="Capturing CUDA graphs", unit="graph", leave=False, disable=None if missing else True)
        for batch, rows in bar:
            draft = Draft(torch.zeros(rows, dtype=torch.long), star(rows))
            self.forward(target, [draft] * batch, [1] * batch, states)


class GraphRunner(Runner):
    """Makes the passes of one batch in the slots of captured passes. Prompts are read into these slots eagerly, without
    a second copy. A cache with slots, as of a prompt read in pieces, is copied before the first captured pass.
    """

    def __init__(self, passes: CapturedPasses, eager: Runner, longest: int) -> None:
        """Replace an `eager` runner; sequences may grow up to `longest` tokens."""
        super().__init__(eager.target, eager.cache, eager.reading, eager.prepared)
        self._passes, self._longest = passes, longest
        captured = "captured as CUDA graphs" if passes.device.type == "cuda" else "not captured"
        self.path = f"fast: forward passes of constant shapes, {captured}"
        self._given: TreeCache | None = None
        """The cache that the batch began with, after its sequences were moved to the captured slots."""

    def _move(self, sequences: Sequence[torch.Tensor]) -> None:
        """Move the sequences to the captured slots."""
        lengths, given = [len(sequence) - 1 for sequence in sequences], self.cache
        self._passes.begin(self.target, given, lengths, self._longest)
        self.cache, self._given = self._passes.slots, given

    def prefill(
        self,
        sequences: Sequence[torch.Tensor],
        cached: Sequence[int],
        states: tuple[int, ...] = (),
        shared: int = 0,
    ) -> list[torch.Tensor] | None:
        if self._given is None and not self.cache.length:
            self._move(sequences)
        return super().prefill(sequences, cached, states, shared)

    def forward(
        self,
        drafts: Sequence[Draft],
        sequences: Sequence[torch.Tensor],
        active: Collection[int],
        states: tuple[int, ...] = (),
    ) -> Pass:
        lengths, cached = [len(sequence) - 1 for sequence in sequences], self.cache.length
        if self._given is None and (not cached or cached >= max(lengths)):
            self._move(sequences)
        if cached < max(lengths):
            return super().forward(drafts, sequences, active, states)
        self.cache.settle(lengths)
        self.prepared()
        return self._passes.forward(self.target, drafts, lengths, states)

    def join(self, other: Runner) -> None:
        if self._given is None:
            super().join(other)
        else:
            self._passes.join(other.cache)

    def give_back(self, lengths: Sequence[int]) -> None:
        if self._given is not None:
            self._given.take(self._passes.slots, 0, lengths)
