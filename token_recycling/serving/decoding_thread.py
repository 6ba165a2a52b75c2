"""Continuous batching of `generate` calls: one thread decodes the sequences of all calling threads in one batch.

transformers prepares each call in the thread that makes it. The call then waits while its sequence is decoded in the
shared batch (`loop.continuous.RunningBatch`), which also feeds its streamer. Calls with several sequences, with a
cache that the caller sees, or with a reproducible drafter are decoded in their own thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import torch
from transformers import PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from ..drafters._base import Drafter
from ..hf.acceleration import Acceleration, view
from ..hf.call import GenerateCall, requests_of, run_call
from ..loop.continuous import RunningBatch
from ..loop.request import NO_HINTS, Hints, Request
from ..loop.stats import Stats
from ..model.backend import EAGER, Backend
from ..model.foreign import mixes_sequences
from ..model.support import ready

T = TypeVar("T")


class DecodingThread:
    """Decodes the sequences of all concurrent calls."""

    def __init__(self, model: PreTrainedModel, backend: Backend = EAGER) -> None:
        """Start the thread; `backend` runs the forward passes. Raise UnsupportedModelError for a model that cannot
        decode batches.
        """
        self._model, self.target, self._backend = model, ready(model), backend
        self._batch = RunningBatch(self.target, backend)
        self._functions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """Functions to call before the next step; None ends the thread."""
        self._waiting: dict[Request, Future[None]] = {}
        self._ending, self._ended = threading.Lock(), False
        self._thread = threading.Thread(target=self._decode, name="decoding", daemon=True)
        self._thread.start()

    def model(self, drafter: Drafter, seed: int, hints: Hints = NO_HINTS) -> PreTrainedModel:
        """Return a view of the model whose `generate` decodes in this thread. Its output is that of an unbatched call
        after `manual_seed(seed)`.
        """
        decode = partial(self._decoded, seed)
        return view(self._model, Acceleration(drafter, EAGER, self.target, decode=decode, hints=hints))

    def between_steps(self, function: Callable[[], T]) -> Future[T]:
        """Call a function in the decoding thread between two steps, or in the caller's thread if it has ended."""
        result: Future[T] = Future()

        def call() -> None:
            try:
                result.set_result(function())
            except Exception as error:
                result.set_exception(error)

        with self._ending:
            if not self._ended:
                self._functions.put(call)
                return result
        call()
        return result

    def close(self) -> None:
        """End the thread after all its sequences; may be called repeatedly."""
        self._functions.put(None)
        self._thread.join()

    def _decoded(
        self,
        seed: int,
        call: GenerateCall,
        drafter: Drafter,
        stats: Stats,
        backend: Backend,
        hints: Hints,
    ) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """Decode a call like `run_call`, but in the decoding thread."""
        generator = torch.Generator(call.input_ids.device).manual_seed(seed)
        alone = drafter.traits.isolates_requests or call.target is not self.target or mixes_sequences(call.target)
        if len(call.input_ids) > 1 or call.cache_is_seen or not call.cache_is_new or alone:
            return run_call(call, drafter, stats, backend, hints, generator)
        (request,) = requests_of(call, drafter, stats, [0], hints, generator)
        sequence = request.sequence
        ended: Future[None] = Future()

        def join() -> None:
            if self._ended:
                raise RuntimeError("DecodingThread is closed; create a new one")
            self._batch.join(request, lambda step: call.put(sequence))
            self._waiting[request] = ended

        self.between_steps(join).result()
        try:
            ended.result()
        finally:
            call.put(sequence)  # tokens chosen before an error ended the step
        if call.streamer is not None:
            call.streamer.end()
        return sequence.padded

    def _decode(self) -> None:
        """Run the thread's loop: decode while there are sequences, and call the queued functions before each step."""
        closing = False
        while not (closing and self._has_ended()):
            while not self._functions.empty() or not (self._waiting or closing):
                function = self._functions.get()
                closing = closing or function is None
                if function is not None:
                    function()
            for request in self._step() if self._waiting else ():
                ended = self._waiting.pop(request)
                if request.error is None:
                    ended.set_result(None)
                else:
                    ended.set_exception(request.error)

    def _has_ended(self) -> bool:
        """Return whether no work is left. From then on, `between_steps` calls functions in the calling thread."""
        with self._ending:
            self._ended = not self._waiting and self._functions.empty()
            return self._ended

    def _step(self) -> list[Request]:
        """Run a step and return the ended requests; all requests, if the batch as a whole fails."""
        try:
            return self._batch.step()
        except Exception as error:
            self._batch.close()
            self._batch = RunningBatch(self.target, self._backend)
            for request in self._waiting:
                request.error = request.error or error
            return list(self._waiting)
