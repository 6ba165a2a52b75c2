"""Passes of constant shapes, for one text: the fast way of `passes.Passes`.

The device goes as far as it can alone: a whole step from the tree's tokens, or from retrieval, to the kept slots. The
host reads once a step what was accepted, ends the text where `generate` would, and drafts the next tree where a drafter
needs the host for it. What a step has written beyond the end of a text is forgotten: its slots lie behind the text, and
learning waits until the host knows where the text ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..accept import emitted
from ..drafting import Draft, Step
from ..passes import Run
from .slots import band_of
from .sources import BUCKETS, DeviceSource, HostSource, bucket_of
from .step import Choice, Plan
from .steps import Steps


class FastPasses:
    """For a run that `support.why_not` has nothing against."""

    def __init__(self, run: Run, steps: Steps) -> None:
        self.run, self.steps = run, steps
        (self._text,), (chooser,) = run.texts, run.choosers
        self._choice = Choice(tuple(chooser.processors), chooser.sample)
        steps.begin(run.target, run.cache, self._text.max_length + BUCKETS[-1])
        steps.root.copy_(self._text.tokens[-1:])
        if chooser.sample:
            steps.seed.random_(2**63 - 1)
        retrieval = run.drafter.retrieval()
        self._device = None if retrieval is None else steps.device_source(retrieval)
        if self._device is not None:
            self._device.forget()
        self._pending: Step | None = None
        """A step that the device will learn from in the next one."""

    def step(self, going: Sequence[int]) -> list[Step]:
        clock, text, steps = self.run.clock, self._text, self.steps
        draft = self._drafted()
        clock.lap("retrieve")
        source: HostSource | DeviceSource
        if draft is None:
            assert self._device is not None
            source, k, alone = self._device, self._device.retrieval.matrix.k, True
        else:
            source, k, alone = steps.host_source(bucket_of(len(draft.tree))), self.run.drafter.learns_candidates, False
            source.send(draft)
        slots = text.length - 1 + source.nodes
        steps.reserve(slots)
        plan = Plan(source.nodes, source.depths, band_of(slots), k, bool(k) and not alone, alone)
        clock.lap("prepare")
        report, logits = steps.run(self.run.target, plan, source, self._choice)
        clock.lap("forward")
        if draft is None:
            assert self._device is not None
            draft = Draft(self._device.retrieval.tree, torch.from_numpy(report.drafted).long())
        n, candidates = len(draft.tree), report.candidates
        if candidates is not None:
            candidates = candidates[0][:n], candidates[1][:n]
        done = emitted(draft, logits[:n], report.path, report.tokens, text.append, candidates=candidates)
        self._pending = done if alone and not done.finished else None
        clock.lap("verify")
        return [done]

    def _drafted(self) -> Draft | None:
        """A draft of the host's, or None where the device drafts."""
        if self._device is not None and self.run.depth_limit(0) >= self._device.retrieval.tree.depth:
            return None
        self._learn_pending()
        draft = self.run.draft(0)
        if draft.drawn_from and self._choice.sample:
            name = type(self.run.drafter).__name__
            raise ValueError(
                f"expected a drafter that says that it draws, got drawn tokens from {name}; define its property "
                "`draws`, or pass fast=False"
            )
        return draft

    def learn(self, step: Step) -> None:
        if step is not self._pending:
            self.run.drafter.observe(step)
            if self._device is not None:
                self._device.forget()

    def _learn_pending(self) -> None:
        """The host learns instead of the device."""
        if self._pending is not None:
            step, self._pending = self._pending, None
            self.learn(step)

    def close(self) -> None:
        self._learn_pending()
        self.steps.cache.write(self.run.cache, self._text.length - 1)

    def describe(self) -> str:
        made = {"captured": "", "compiled": ", compiled", "flex": ", compiled with flex_attention"}[self.steps.kind]
        captured = "captured as CUDA graphs" if self.steps.device.type == "cuda" else "not captured"
        drafting = "trees from the host" if self._device is None else "drafting on the device"
        return f"fast: constant shapes{made}, {captured}, {drafting}"
