"""Continuous batching: requests join and leave a batch between its steps.

A request starts alone: its prompt is prefilled into a separate cache, and its first step runs there. Then its slots are
copied next to those of the others, and it shares their forward passes (`batch.Batch`). A long prompt is prefilled in
pieces. Between two pieces shorter prompts are prefilled, the running requests make steps for as long as a piece took,
and cancelled requests leave. An error of a request's processors, criteria, drafter or `on_step` ends only that request.

Cost: a copy of a request's slots when it joins or leaves; occasionally a copy of all slots, when buffers grow. A pass
costs as if all sequences had the length of the longest and the size of the largest draft, so drafts are pruned jointly
(`Batch.step`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from .._util.device import synchronize
from ..model.backend import EAGER, Backend
from ..model.info import UnsupportedModelError
from ..model.prefill import piece_of
from ..model.target import Target
from ..trees.draft import Step
from .batch import Batch
from .pacer import Clock, Pacer
from .request import Request

if TYPE_CHECKING:
    from ..model.graphs.passes import CapturedPasses

OnStep = Callable[[Step], None]
_MOST_PASSED_OVER = 8
"""Prompts or pieces that may overtake the oldest prompt before it gets the next piece."""


def why_not_batched(target: Target) -> str | None:
    """Return why a model cannot batch continuously, or None if it can."""
    if target.processes > 1:
        return (
            f"continuous batching needs a model in one process, got {target.processes} processes; sequences "
            "would join at different steps in each"
        )
    return target.info.why_not_batch


class RunningBatch:
    """A continuous batch, used by one thread."""

    def __init__(self, target: Target, backend: Backend = EAGER) -> None:
        """Start empty; `backend` makes the forward passes of steps. Raises UnsupportedModelError for a model that
        cannot batch continuously.
        """
        reason = why_not_batched(target)
        if reason is not None:
            raise UnsupportedModelError(reason)
        self.target = target
        self._backend = backend
        self._captured: CapturedPasses | None = None
        """The captured passes, held while there are requests; None where passes are eager."""
        self._pacer = Pacer.of(target)
        self._piece = piece_of(target, 0, others=True)
        self._joining: dict[Request, Batch] = {}
        """Requests whose prompts are being prefilled, in order of arrival, each with its own batch."""
        self._passed_over = 0
        """How often other prompts were prefilled since the oldest one was."""
        self._owed = 0.0
        """Seconds of decoding steps due before the next piece of a long prompt."""
        self._batch: Batch | None = None
        """The running requests; None if there are none."""
        self._callbacks: dict[Request, OnStep] = {}
        """All requests and their `on_step`."""

    @property
    def _running(self) -> list[Request]:
        """Requests that have made a step."""
        return [] if self._batch is None else self._batch.requests

    @property
    def requests(self) -> list[Request]:
        """All requests: running ones, then those being prefilled."""
        return [*self._running, *self._joining]

    def join(self, request: Request, on_step: OnStep) -> None:
        """Add a request from the next step on. `on_step` is called with each of its steps, before the drafter learns
        from it. Raises ValueError for a drafter whose drafts or hidden states cannot share passes with the others.
        """
        if request.traits.isolates_requests:
            raise ValueError(
                f"{request.drafter.describe()} needs forward passes of its own: in 16 bits those of other requests in "
                "a pass decide how it is rounded; decode it alone, or without reproducible=True"
            )
        needed = request.traits.states_read(self.target)
        for theirs in (other.traits.states_read(self.target) for other in self.requests):
            if needed and theirs and needed != theirs:
                raise ValueError(
                    f"drafters of a batch must need the same hidden states, {[*theirs]}, got {[*needed]} of "
                    f"{request.drafter.describe()}"
                )
        if not self.requests:
            self._captured = self._backend.acquire(self.target)
            self._pacer = Pacer.of(self.target, self._captured)
        request.fails_alone = True
        clock = Clock(request.stats, self.target.device)
        self._joining[request] = Batch([request], self._pacer, self.target.new_cache(), clock)
        self._callbacks[request] = on_step

    @torch.inference_mode(False)  # see `batch.decode`
    @torch.no_grad()
    def step(self) -> list[Request]:
        """Prefill a piece of the waiting prompts, make one step of all requests, and return the requests that ended."""
        ended = [*self._take_cancelled(), *self._begin(), *self._drop()]
        if self._batch is not None:
            began = time.perf_counter()
            try:
                self._pass(self._batch)
            except Exception as error:  # from the forward pass itself: affects all requests
                for request in self._running:
                    request.error = request.error or error
            self._owed -= time.perf_counter() - began
            ended += self._drop()
        if not self.requests:
            self.close()
        return ended

    def close(self) -> None:
        """Release the captured passes; the next request acquires them again."""
        captured, self._batch, self._captured = self._captured, None, None
        if captured is not None:
            captured.release()

    def _begin(self) -> list[Request]:
        """Prefill a piece of the waiting prompts, make first steps, and return the requests that ended."""
        left, ended = self._piece, []
        while left > 0 and (request := self._next(left)) is not None:
            batch, began = self._joining[request], time.perf_counter()
            self._passed_over = 0 if request is next(iter(self._joining)) else self._passed_over + 1
            _take_prefix(batch)
            uncached = request.sequence.length - 1 - request.cached
            piece = piece_of(self.target, request.cached, len(self.requests) > 1)
            is_left = self._read(batch, uncached, piece)
            if uncached > piece and self._running:
                synchronize(self.target.device)
                self._owed = time.perf_counter() - began
            left = 0 if is_left else left - max(1, uncached)
            if not is_left:
                del self._joining[request]
                if not request.active:
                    ended.append(self._ended(request))
        return ended

    def _read(self, batch: Batch, uncached: int, piece: int) -> bool:
        """Read a piece of a prompt, or all of its `uncached` tokens, and then make the first step. Return whether any
        of the prompt is left.
        """
        (request,) = batch.requests
        if request.error is not None:
            return False
        try:
            if uncached <= piece or not self.target.info.reads_on:
                self._first_step(batch)
                return False
            batch.clock.restart()
            batch.read(piece)
            batch.clock.lap("forward")
        except Exception as error:
            request.error = error
        return request.error is None

    def _next(self, left: int) -> Request | None:
        """Return the request to prefill next if `left` tokens may be read before the next step: the one with the
        shortest prompt, or the oldest if others overtook it too often. None if no prompt fits or steps are due.
        """
        if not self._joining:
            return None
        oldest, shortest = next(iter(self._joining)), min(self._joining, key=Request.uncached)
        fresh = left == self._piece
        if self._passed_over >= _MOST_PASSED_OVER:
            return oldest if fresh else None
        if shortest.uncached() <= left:
            return shortest
        return shortest if fresh and not (self._running and self._owed > 0) else None

    def _take_cancelled(self) -> list[Request]:
        """Remove and return cancelled requests that are being prefilled; their read tokens go to the prefix cache."""
        given_up = [request for request in self._joining if request.is_given_up()]
        for request in given_up:
            _keep_prefix(self._joining.pop(request), 0, request.cached + 1)
        return [self._ended(request) for request in given_up]

    def _first_step(self, batch: Batch) -> None:
        """Make the first step of a request alone, then let it join the others."""
        (request,) = batch.requests
        batch.clock.restart()
        batch.keep_states_before_ending()
        batch.begin(self._captured if self._batch is None else None)
        if self._step(batch):
            _keep_prefix(batch, 0, request.sequence.length)
        if not request.active:
            return
        if self._batch is None:
            self._batch = batch
        else:
            self._batch.join(batch)

    def _pass(self, batch: Batch) -> None:
        """Make one forward pass over all sequences; its time counts for each of them."""
        batch.clock.stats = [request.stats for request in batch.requests]
        batch.clock.restart()
        for row in self._step(batch):
            request = batch.requests[row]
            if not request.active:
                _keep_prefix(batch, row, request.sequence.length)

    def _drop(self) -> list[Request]:
        """Remove and return the requests that have ended."""
        batch, finished = self._batch, [request for request in self._running if not request.active]
        if batch is not None and len(finished) == len(batch.requests):
            self._batch = None
            self._pacer.keep()  # idle: time to save
        elif batch is not None and finished:
            batch.leave(finished)
        return [self._ended(request) for request in finished]

    def _step(self, batch: Batch) -> list[int]:
        """Make one step of each request of a batch, deliver it, then learn from it. Return the rows whose step did not
        fail: their slots match their sequences.
        """
        steps = batch.step()
        for step in steps:
            request = batch.requests[step.row]
            try:
                self._callbacks[request](step)
            except Exception as error:
                request.fail(error)
        batch.learn()
        return [step.row for step in steps]

    def _ended(self, request: Request) -> Request:
        """Add the drafter's counts to the statistics, forget the request and return it."""
        request.finish()
        del self._callbacks[request]
        return request


def _take_prefix(batch: Batch) -> None:
    """Start the only request from the prefix cache as it is now: other requests may have cached its beginning."""
    (request,) = batch.requests
    try:
        if (cache := request.take_prefix()) is not None:
            batch.runner.cache = cache
    except Exception as error:
        request.fail(error)


def _keep_prefix(batch: Batch, row: int, tokens: int) -> None:
    """Call `Batch.keep_prefix`; an error ends only that request."""
    try:
        batch.keep_prefix(row, tokens)
    except Exception as error:
        batch.requests[row].fail(error)
