"""Makes the steps of one text of constant shapes.

The device goes as far as it can alone: a whole step from the tree's tokens, or from retrieval, to the kept slots. The
host reads once a step what was accepted, ends the text where `generate` would, and drafts the next tree where a drafter
needs the host for it. What a step has written beyond the end of a text is forgotten: its slots lie behind the text, and
learning waits until the host knows where the text ended.
"""

from __future__ import annotations

import torch

from ..loop.accept import step_of
from ..loop.run import Run
from ..trees.draft import Draft, Step
from .runner import StepRunner
from .slots import band_of
from .sources import BUCKETS, Source, bucket_of
from .step import Choice, StepPlan


class CapturedStepper:
    """Makes the steps of a run that `support.why_not` has nothing against."""

    def __init__(self, run: Run, runner: StepRunner) -> None:
        self.run, self.runner = run, runner
        (row,) = run.rows
        self._row, self._sequence, self._traits, selector = row, row.sequence, row.traits, row.selector
        self._drafter = run.text_drafter(row)
        self._choice = Choice(tuple(selector.processors), selector.sample)
        run.prefill()
        runner.begin(run.cache, self._sequence.max_length + BUCKETS[-1])
        runner.root.copy_(self._sequence.tokens[-1:])
        if selector.sample:
            runner.seed.random_(2**63 - 1)
        retrieval = self._drafter.retrieval
        self._device = None if retrieval is None else runner.device_source(retrieval)
        if self._device is not None:
            self._device.forget()
        self._pending: Step | None = None
        """The last step, not yet learned from."""
        self._device_learns = False
        """Whether the device will learn from it, in the next one."""

    def step(self, going: list[int]) -> list[Step]:
        clock, sequence, runner = self.run.clock, self._sequence, self.runner
        draft = self._drafted()
        clock.lap("retrieve")
        source: Source
        if draft is None:
            assert self._device is not None
            source, k, alone = self._device, self._device.retrieval.matrix.k, True
        else:
            source, k, alone = runner.host_source(bucket_of(len(draft.tree))), self._traits.top_k, False
            source.send(draft)
        slots = sequence.length - 1 + source.nodes
        runner.reserve(slots)
        plan = StepPlan(source.nodes, source.depths, band_of(slots), k, bool(k) and not alone, alone)
        clock.lap("prepare")
        report, logits = runner.run(self.run.target, plan, source, self._choice)
        clock.lap("forward")
        if draft is None:
            assert self._device is not None
            draft = Draft(self._device.retrieval.tree, torch.from_numpy(report.drafted).long())
        n, candidates = len(draft.tree), report.candidates
        if candidates is not None:
            candidates = candidates[0][:n], candidates[1][:n]
        done = step_of(draft, logits[:n], report.path, report.tokens, sequence.append, candidates=candidates)
        self._pending, self._device_learns = done, alone and not done.finished
        clock.lap("verify")
        return [done]

    def learn(self) -> None:
        if not self._device_learns:
            self._learn_pending()

    def _drafted(self) -> Draft | None:
        """A draft of the host's, or None where the device drafts."""
        if self._device is not None and self._row.deepest(self.run.target) >= self._device.retrieval.tree.depth:
            return None
        self._learn_pending()
        draft = self._row.draft(self.run.target, self.run.costs)
        if draft.drawn_from and self._choice.sample:
            raise ValueError(
                "expected a drafter that says that it draws, got drawn tokens from "
                f"{self._drafter.describe()}; declare it in its traits, or leave fast=True out"
            )
        return draft

    def _learn_pending(self) -> None:
        """The host learns."""
        step, self._pending = self._pending, None
        if step is None:
            return
        self._drafter.observe(step)
        if self._device is not None:
            self._device.forget()

    def close(self) -> None:
        self._learn_pending()
        self.runner.cache.write(self.run.cache, self._sequence.length - 1)

    def describe(self) -> str:
        captured = "captured as CUDA graphs" if self.runner.device.type == "cuda" else "not captured"
        drafting = "trees from the host" if self._device is None else "drafting on the device"
        return f"fast: constant shapes, {captured}, {drafting}"
