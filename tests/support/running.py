"""Sequences of one running batch, and their outputs."""

from __future__ import annotations

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria

import token_recycling as tr
from token_recycling.loop.continuous import RunningBatch
from token_recycling.loop.request import NO_HINTS, Request, TokenSelector, TokenSequence
from token_recycling.model.backend import EAGER
from token_recycling.model.target import Target


class GoneError(Exception):
    """Error of a request whose client has disconnected."""


class Texts:
    """Sequences of one running batch, with their outputs in `outputs`."""

    def __init__(self, model, backend=EAGER):
        self.model, self.batch = model, RunningBatch(Target(model), backend)
        self.outputs: dict[Request, list[int]] = {}
        self.ended: list[Request] = []

    def join(
        self,
        ids,
        new,
        drafter="recycling",
        seed=None,
        processors=(),
        criteria=(),
        on_step=lambda step: None,
        streamed=True,
        reading=None,
        hints=NO_HINTS,
    ):
        """Add a request to the batch and return it; it is sampled if it has a seed."""
        limit = MaxLengthCriteria(ids.shape[1] + new)
        sequence = TokenSequence(ids[0], StoppingCriteriaList([limit, *criteria]))
        generator = None if seed is None else torch.Generator(ids.device).manual_seed(seed)
        selector = TokenSelector(sequence, LogitsProcessorList(processors), seed is not None, generator=generator)
        row = Request(
            self.batch.target,
            sequence,
            selector,
            tr.make_drafter(drafter),
            tr.Stats(),
            hints=hints,
            streamed=streamed,
            reading=reading,
        )
        output = self.outputs[row] = []

        def emit(step):
            output.extend(step.tokens)
            on_step(step)

        self.batch.join(row, emit)
        return row

    def step(self):
        self.ended += self.batch.step()

    def finish(self):
        while self.batch.requests:
            self.step()
