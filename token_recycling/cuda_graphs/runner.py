"""Fast steps of one model: the slots, the buffers and the captured graphs, which stay from call to call."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from threading import Lock, get_ident
from typing import Any

import numpy as np
import torch

from ..model.kv_cache import unroll
from ..model.prefill import prefill
from ..model.remembered import lasting
from ..model.state import State
from ..model.tree_model import TreeModel
from . import NoFastPathError
from .graphs import Graphs
from .slots import FixedCache, band_of
from .sources import DeviceSource, HostSource, Source
from .step import Choice, Report, StepPlan, Verified, verify

_AHEAD = 2048
"""Slots that are reserved beyond twice a prompt, if so many may be needed; then room doubles."""


def state_of(target: TreeModel) -> State:
    """Equal as long as captured steps of the model can be replayed."""
    return State(target.model, target.info.attention)


class StepRunner:
    """Made once for a model in one state. Runs one text at a time."""

    @lasting()
    def __init__(self, target: TreeModel) -> None:
        self.device = target.device
        self.state: State | None = None
        """That of the model, once this was tried out."""
        self._free = Lock()
        self._holder: int | None = None
        self._like = target.new_cache()
        prefill(target, [torch.ones(2, dtype=torch.long, device=self.device)], self._like)
        unroll(self._like)
        self.cache = FixedCache(self._like, 0, self.device)
        self.root = torch.zeros(1, dtype=torch.long, device=self.device)
        """(1,) int64: the newest token of the text."""
        self.seed = torch.zeros(1, dtype=torch.long, device=self.device)
        """(1,) int64: that of the text's draws."""
        self._graphs = Graphs(self.device)
        self._sources: dict[int, HostSource] = {}
        self._device_source: DeviceSource | None = None
        self._logits: dict[int, torch.Tensor] = {}
        self._pinned: dict[int, torch.Tensor] = {}
        self._read = torch.cuda.Event() if self.device.type == "cuda" else None

    def take(self) -> bool:
        """Holds it for one text, unless another one is under way."""
        taken = self._free.acquire(blocking=False)
        if taken:
            self._holder = get_ident()
        return taken

    def give_back(self) -> None:
        """The text has ended; any thread may say so."""
        self._holder = None
        self._free.release()

    def wait(self) -> bool:
        """Waits until no text is under way; False, at once, if this thread has begun one and would wait for itself."""
        if self._holder == get_ident():
            return False
        with self._free:
            return True

    @lasting()
    def begin(self, cache: Any, slots: int) -> None:
        """Takes over the text in `cache`; it may grow up to `slots` slots."""
        held = int(cache.get_seq_length())
        self.reserve(min(slots, 2 * held + _AHEAD))
        self.cache.read(cache)

    @lasting()
    def reserve(self, slots: int) -> None:
        """Room for `slots` slots, those of the text kept."""
        if slots <= self.cache.capacity:
            return
        before, self.cache = (
            self.cache,
            FixedCache(self._like, band_of(max(slots, 2 * self.cache.capacity)), self.device),
        )
        for own, old in zip(self.cache.stores, before.stores, strict=True):
            own[:, :, :, : before.capacity] = old
        self.cache.shared.length.copy_(before.shared.length)
        self._graphs.forget()

    @lasting()
    def host_source(self, nodes: int) -> HostSource:
        """The one for trees of up to `nodes` nodes."""
        if nodes not in self._sources:
            self._sources[nodes] = HostSource(nodes, self.device)
        return self._sources[nodes]

    @lasting()
    def device_source(self, retrieval: Any) -> DeviceSource:
        """The one for this template and matrix."""
        known = self._device_source
        if known is None or known.retrieval != retrieval:
            self._device_source = DeviceSource(retrieval, self.device)
            self._graphs.forget()
        assert self._device_source is not None
        return self._device_source

    @lasting()
    def run(self, target: TreeModel, plan: StepPlan, source: Source, choice: Choice) -> tuple[Report, torch.Tensor]:
        """One step: what the host must know, and the logits (n, vocabulary) at every node, which are the caller's."""
        self.cache.shared.band = plan.band
        key = (plan, isinstance(source, DeviceSource), choice.sample, tuple(map(_written, choice.warpers)))
        state = [self.cache.shared.length, self.root, *source.state()]
        function = partial(self._step, target, plan, source, choice)
        if key not in self._graphs and self.state is not None and self.state != state_of(target):
            raise NoFastPathError(
                "expected the model as it was when the text began, got another adapter, part or option of it; "
                "change it between texts, or leave fast=True out"
            )
        with target.attending():
            report, logits = self._graphs.run(key, function, state)
        if self._read is None:
            return Report(plan, report.numpy()), logits
        if plan.reported not in self._pinned:
            self._pinned[plan.reported] = torch.empty(plan.reported, dtype=torch.int32, pin_memory=True)
        pinned = self._pinned[plan.reported]
        pinned.copy_(report, non_blocking=True)
        self._read.record(torch.cuda.current_stream(self.device))
        # Enqueued behind the step while the device still works on it: the next step writes these logits again.
        own = logits.clone()
        self._read.synchronize()
        return Report(plan, np.array(pinned.numpy())), own

    @lasting()
    def rehearse(self, target: TreeModel, plan: StepPlan, source: Source, choice: Choice) -> None:
        """One step, operation by operation, whose result is not used."""
        self.cache.shared.band = plan.band
        with target.attending():
            self._step(target, plan, source, choice)

    def _step(
        self, target: TreeModel, plan: StepPlan, source: Source, choice: Choice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        verified: Verified = verify(
            target.model, self.cache, target.info.layers, plan, source, choice, self.root, self.seed
        )
        self.cache.commit(verified.accepted.path, verified.accepted.number)
        if self.device.type != "cuda":
            return verified.report, verified.logits
        # All graphs of one size write the same logits, so that these are kept in memory once.
        if plan.nodes not in self._logits:
            self._logits[plan.nodes] = torch.empty_like(verified.logits)
        kept = self._logits[plan.nodes]
        kept.copy_(verified.logits)
        return verified.report, kept


def _written(warper: Any) -> Hashable:
    """What a processor does, so that equal ones are known for equal."""
    return type(warper), tuple(sorted(vars(warper).items()))
