"""Captured steps of one model: its slots, buffers and graphs, which stay from call to call."""

from __future__ import annotations

from functools import partial
from threading import Lock, get_ident
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache
from transformers.utils.logging import tqdm

from ..model.kv_cache import TreeCache, TreeLayer, unroll
from ..model.prefill import prefill
from ..model.remembered import State, lasting
from ..model.tree_model import ROWS, TreeModel, band_of, batch_of, rows_of
from ..trees.draft import Draft
from ..trees.packed import PackedTrees, pack, packed_size, unpack
from ..trees.templates import star
from . import NoFastPathError
from .graphs import Graphs
from .step import Choice, Report, StepPlan, Verified, verify

_AHEAD = 2048
"""Slots that are reserved beyond twice a prompt, if so many may be needed; then room doubles."""
_COMMON_ROWS = ROWS[:5]
"""Numbers of rows of most steps: trees of up to 64 nodes, and 1 where drafting is disabled."""
_COMMON_SLOTS = 4096
"""Slots that are reserved for their graphs: prompts of up to 1,024 tokens leave them in place."""
_DEPTHS = 16
"""Depth of the paths that short plans have room for: chains of a bucket's length are rare."""


def state_of(target: TreeModel) -> State:
    """Equal as long as captured steps of the model can be replayed."""
    return State(target.model, target.info.attention)


class _Buffer(NamedTuple):
    """Packed drafts of one shape, on the host and on the device."""

    on_host: torch.Tensor
    on_device: torch.Tensor
    trees: PackedTrees


class StepRunner:
    """Made once for a model in one state. Runs one call at a time."""

    @lasting()
    def __init__(self, target: TreeModel) -> None:
        self.device = target.device
        self.state: State | None = None
        """State of the model when this was tested."""
        self._free = Lock()
        self._holder: int | None = None
        self._graphs = Graphs(self.device)
        self._buffers: dict[tuple[int, int], _Buffer] = {}
        self._results: dict[tuple[str, torch.Size, torch.dtype], torch.Tensor] = {}
        self._pinned: dict[tuple[int, ...], torch.Tensor] = {}
        self._read = torch.cuda.Event() if self.device.type == "cuda" else None
        self.seeds = torch.zeros(0, dtype=torch.long, device=self.device)
        """(batch,) int64: the seeds of the sequences."""
        self.said: torch.Tensor | None = None
        """(batch, vocabulary) bool: tokens of each sequence, where a penalty asks for them."""
        self.batch = self.capacity = 0
        self.slots = self._room(target, 1, 0)

    def take(self) -> bool:
        """Hold it for one call, unless another one is under way."""
        taken = self._free.acquire(blocking=False)
        if taken:
            self._holder = get_ident()
        return taken

    def give_back(self) -> None:
        """The call has ended; any thread may say so."""
        self._holder = None
        self._free.release()

    def wait(self) -> bool:
        """Wait until no call is under way; False, at once, if this thread has begun one and would wait for itself."""
        if self._holder == get_ident():
            return False
        with self._free:
            return True

    def forget(self) -> None:
        """Drop all captured graphs; the next step of each shape is captured again."""
        self._graphs.forget()

    def _room(self, target: TreeModel, batch: int, capacity: int) -> TreeCache:
        """Slots for so many sequences; graphs that point to others are forgotten."""
        self._graphs.forget()
        cache = target.new_cache()
        prefill(target, [torch.ones(2, dtype=torch.long, device=self.device)], cache)
        unroll(cache)
        made = TreeCache(cache)
        for store in made.stores:
            store.resize(batch)
            store.reserve(capacity)
            store.buffer.zero_()  # what attention hides is still multiplied by zero
        self.batch, self.capacity = batch, capacity
        if len(self.seeds) < batch:
            self.seeds = torch.zeros(batch, dtype=torch.long, device=self.device)
        return made

    @lasting()
    def begin(self, target: TreeModel, cache: Cache, sequences: int, slots: int, penalised: bool = False) -> None:
        """Take over the sequences in `cache`; they may grow up to `slots` slots. `penalised`: a penalty asks for what
        was said.
        """
        batch, held = batch_of(sequences), int(cache.get_seq_length())
        assert batch is not None, "support.why_not lets no larger batches through"
        wanted = band_of(min(slots, 2 * held + _AHEAD))
        if batch > self.batch or wanted > self.capacity:
            del self.slots  # gives back its memory before more is taken
            self.slots = self._room(target, max(batch, self.batch), max(wanted, self.capacity))
        if held:
            self.slots.take(TreeCache(cache), sequences, held)
        if penalised and (self.said is None or len(self.said) < self.batch):
            self.said = torch.zeros(self.batch, target.vocab_size, dtype=torch.bool, device=self.device)
            self._graphs.forget()

    def capture_common(self, target: TreeModel, k: int, states: tuple[int, ...]) -> None:
        """Capture greedy steps of one sequence in the common numbers of rows; those captured before stay. They hold
        for calls of up to `_COMMON_SLOTS` slots: a longer call needs more slots, elsewhere in memory.
        """
        longest = _COMMON_SLOTS if target.max_length is None else min(_COMMON_SLOTS, target.max_length + ROWS[-1])
        self.reserve(target, band_of(longest))
        drafts = [Draft(star(rows), torch.zeros(rows, dtype=torch.long)) for rows in _COMMON_ROWS]
        plans = [self.plan([draft], [1], k, states) for draft in drafts]
        missing = [one for one in zip(plans, drafts, strict=True) if (one[0], Choice().key) not in self._graphs]
        bar = tqdm(missing, desc="Capturing CUDA graphs", unit="graph", leave=False, disable=None if missing else True)
        for plan, draft in bar:
            self.run(target, plan, [draft], [1], Choice())

    @lasting()
    def reserve(self, target: TreeModel, slots: int) -> None:
        """Room for `slots` slots, those of the sequences kept."""
        if slots > self.capacity:
            before, held = self.slots, self.capacity
            self.slots = self._room(target, self.batch, band_of(max(slots, 2 * self.capacity)))
            self.slots.take(before, self.batch, held)

    @lasting()
    def mark_said(self, row: int, tokens: torch.Tensor, anew: bool = False) -> None:
        """Note that a sequence holds `tokens` (any number,); `anew`: and no others."""
        assert self.said is not None, "begin makes it"
        if anew:
            self.said[row] = False
        known = tokens.to(self.device, non_blocking=True)
        self.said[row].scatter_(0, known.clamp(max=self.said.shape[1] - 1), True)

    @lasting()
    def write(self, cache: Cache, lengths: list[int], first: int) -> None:
        """Append to a cache the slots of the sequences from `first` on, as far as the longest one goes."""
        if (more := int(cache.get_seq_length()) - first) > 0:  # crop(0) empties a cache before transformers 5.14
            cache.crop(-more)
        for index, layer in enumerate(self.slots.cache.layers):
            if isinstance(layer, TreeLayer):
                parts = (store.tensors[place] for store, place in layer.parts)
                cache.update(*(part[: len(lengths), :, first : max(lengths)] for part in parts), index)

    @lasting()
    def move(self, order: list[int], slots: int) -> None:
        """Let sequences take other places: that in `order[place]` moves to `place`, which no later one needs."""
        for place, row in enumerate(order):
            if place != row:
                for store in self.slots.stores:
                    store.buffer[:, place, :, :slots] = store.buffer[:, row, :, :slots]
                for numbers in (self.seeds, self.said):
                    if numbers is not None:
                        numbers[place] = numbers[row]

    def plan(self, drafts: list[Draft], lengths: list[int], k: int = 0, states: tuple[int, ...] = ()) -> StepPlan:
        """The smallest plan for drafts below sequences of `lengths` cached tokens."""
        batch, nodes = batch_of(len(drafts)), rows_of(max(len(draft.tree) for draft in drafts))
        assert batch is not None, "a larger batch than is captured, which `support.why_not` refuses"
        deepest = 1 + max(draft.tree.depth for draft in drafts)
        depths = min(nodes, _DEPTHS if deepest <= _DEPTHS else nodes)
        return StepPlan(batch, nodes, depths, band_of(max(lengths) + nodes), k, states)

    @lasting()
    def run(
        self, target: TreeModel, plan: StepPlan, drafts: list[Draft], lengths: list[int], choice: Choice
    ) -> tuple[Report, Verified]:
        """One step of drafts below sequences of `lengths` cached tokens: what the host must know, and the rest, which
        is the caller's.
        """
        self.reserve(target, plan.band)
        buffer = self._buffer(plan.batch, plan.nodes)
        absent = plan.batch - len(drafts)
        pack([*drafts, *drafts[:1] * absent], [*lengths, *[0] * absent], plan.nodes, buffer.on_host)
        if self.device.type != "cpu":
            buffer.on_device.copy_(buffer.on_host, non_blocking=True)
        key = plan, choice.key
        if key not in self._graphs and self.state is not None and self.state != state_of(target):
            raise NoFastPathError(
                "an adapter, part or option of the model changed during the call; change it between calls, or leave "
                "fast=True out"
            )
        said = None if self.said is None or choice.penalised is None else self.said[: plan.batch]
        step = partial(verify, target, self.slots, plan, choice, buffer.trees, self.seeds[: plan.batch], said)
        found = self._graphs.run(key, lambda: self._kept(step()))
        if self._read is None:
            return Report(plan, found.report.cpu().numpy().copy()), _own(found)
        pinned = self._pinned.get(found.report.shape)
        if pinned is None:
            pinned = torch.empty(found.report.shape, dtype=torch.int32, pin_memory=True)
            self._pinned[found.report.shape] = pinned
        pinned.copy_(found.report, non_blocking=True)
        self._read.record(torch.cuda.current_stream(self.device))
        # Enqueued after the step while the device still works on it: the next step overwrites these tensors.
        own = _own(found)
        self._read.synchronize()
        return Report(plan, pinned.numpy().copy()), own

    def _kept(self, found: Verified) -> Verified:
        """Copy results into tensors that all graphs of one shape share, so that memory holds them once."""
        if self.device.type != "cuda":
            return found
        shared: list[Any] = []
        for name, made in found._asdict().items():
            if made is not None:
                key = name, made.shape, made.dtype
                if key not in self._results:
                    self._results[key] = torch.empty_like(made)
                made = self._results[key].copy_(made)
            shared.append(made)
        return Verified(*shared)

    def _buffer(self, batch: int, nodes: int) -> _Buffer:
        if (batch, nodes) not in self._buffers:
            size = packed_size(batch, nodes)
            on_host = torch.zeros(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            on_device = on_host if self.device.type == "cpu" else torch.empty_like(on_host, device=self.device)
            self._buffers[batch, nodes] = _Buffer(on_host, on_device, unpack(on_device, batch, nodes))
        return self._buffers[batch, nodes]


def _own(found: Verified) -> Verified:
    """Copies, which the next step of this shape does not write to."""
    return Verified(*(None if one is None else one.clone() for one in found))  # type: ignore[arg-type]
