"""Makes the steps of a call in constant shapes.

The host drafts, sends all drafts in one copy, and reads once per step what was accepted; everything in between is one
graph. Slots that a step has written beyond the end of a sequence are overwritten by the next step.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from ..loop.accept import step_of
from ..loop.prompt import prefill
from ..loop.state import BatchState, RequestState, places_left
from ..model.tree_model import ROWS
from ..trees.draft import Draft, Step
from .runner import StepRunner
from .step import Choice, Verified


class CapturedStepper:
    """Makes the steps of a batch that `support.why_not` has nothing against."""

    def __init__(self, batch: BatchState, runner: StepRunner) -> None:
        self.batch, self.runner = batch, runner
        rows, selector = batch.requests, batch.requests[0].selector
        self._choice = Choice(tuple(selector.processors), selector.sample)
        prefill(batch)
        longest = max(row.sequence.max_length for row in rows)
        lengths = [row.sequence.length - 1 for row in rows]
        penalty = self._choice.penalised
        runner.begin(batch.target, batch.cache, len(rows), longest + ROWS[-1], penalty is not None)
        self._first = min(lengths)
        """Slots of the cache that stay as they are."""
        self._said = [0] * len(rows)
        """Columns of each sequence that the device has noted, where there is a penalty."""
        for place, row in enumerate(rows):
            if selector.sample:
                with row.guarded():
                    runner.seeds[place].random_(2**63 - 1, generator=row.selector.generator)
            own = Choice(tuple(row.selector.processors)).penalised
            if own is not None:
                ignored = 0 if own.prompt_ignore_length is None else int(own.prompt_ignore_length)
                runner.mark_said(place, row.sequence.padded[0, ignored:], anew=True)
                self._said[place] = row.sequence.columns
        self._steps: list[Step] = []
        """Not yet learned from."""

    def step(self, active: list[int]) -> list[Step]:
        clock, batch, runner, traits = self.batch.clock, self.batch, self.runner, self.batch.requests[0].traits
        drafts = self._draft(active)
        clock.lap("retrieve")
        lengths = [row.sequence.length - 1 for row in batch.requests]
        states = traits.layers_read(batch.target.config.num_hidden_layers)
        plan = runner.plan(drafts, lengths, traits.top_k, states)
        clock.lap("prepare")
        report, found = runner.run(batch.target, plan, drafts, lengths, self._choice)
        clock.lap("forward")
        self._steps = []
        for place in active:
            row, draft = batch.requests[place], drafts[place]
            if row.error is None:
                with row.guarded():
                    path, tokens = report.accepted(place)
                    append = _Appending(row, found, place, path)
                    candidates = report.candidates(place, len(draft.tree))
                    logits = found.logits[place, : len(draft.tree)]
                    step = step_of(draft, logits, path, tokens, append, place, candidates)
                    if found.states is not None:
                        step = replace(step, states=found.states[place, : len(draft.tree)])
                    self._steps.append(step)
        clock.lap("verify")
        return self._steps

    def _draft(self, active: list[int]) -> list[Draft]:
        batch = self.batch
        drafts = batch.drafts(active)
        for place in active:
            row = batch.requests[place]
            if drafts[place].sampled_from and self._choice.sample:
                with row.guarded():
                    raise ValueError(
                        f"{batch.sequence_drafter(row).describe()} gave sampled tokens without declaring it; declare "
                        "it in its traits, or leave fast=True out"
                    )
                drafts[place] = drafts[place].cut(0)
            if self._choice.penalised is not None:
                new = row.sequence.padded[0, self._said[place] :]
                self.runner.mark_said(place, new)
                self._said[place] = row.sequence.columns
        return drafts

    def learn(self) -> None:
        steps, self._steps = self._steps, []
        for step in steps:
            row = self.batch.requests[step.row]
            with row.guarded():
                row.observe(self.batch.target, self.batch.costs, step)

    def leave(self, finished: Collection[RequestState]) -> None:
        """Remove finished rows; at least one must remain. The last row takes the place of a removed one."""
        rows, order = self.batch.requests, places_left(self.batch.requests, finished)
        self.runner.move(order, max(row.sequence.length - 1 for row in rows))
        rows[:], self._said = [rows[row] for row in order], [self._said[row] for row in order]

    def close(self) -> None:
        self.learn()
        if self.batch.returns_cache:
            self.runner.write(self.batch.cache, [row.sequence.length - 1 for row in self.batch.requests], self._first)

    def describe(self) -> str:
        captured = "captured as CUDA graphs" if self.runner.device.type == "cuda" else "not captured"
        return f"fast: constant shapes, {captured}"


class _Appending:
    """Appends tokens to a sequence, and before each the scores that it was chosen by, where they are wanted."""

    def __init__(self, row: RequestState, found: Verified, place: int, path: list[int]) -> None:
        self._row, self._found, self._place, self._path = row, found, place, iter(path)

    def __call__(self, token: int) -> bool:
        node, sequence, logits = next(self._path), self._row.sequence, self._row.selector.logits
        if sequence.scores is not None:
            sequence.scores.append(self._found.scores[self._place, node][None].to(torch.float32))
        if logits is not None:
            logits.append(self._found.logits[self._place, node][None].to(torch.float32))
        return sequence.append(token)
