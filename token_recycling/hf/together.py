"""Calls of `generate` from several threads, decoded together: in one thread, as a batch that they join and leave.

transformers prepares each call in the thread that makes it; then the call waits while its text is decoded among the
others (`many.RunningBatch`), and its streamer is given the tokens there. What is not one text, or whose cache somebody
will see, is decoded by itself in its own thread, as ever.
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

from ..cuda_graphs import Fast
from ..drafters._base import Drafter
from ..loop.continuous import RunningBatch
from ..loop.run import Row
from ..loop.stats import Stats
from ..loop.text import Draws
from ..model.kv_cache import slots
from ..model.self_test import ready
from ..model.tree_model import TreeModel
from ..trees.draft import Step
from .acceleration import Acceleration, view
from .generate_call import GenerateCall
from .run_call import Output, beginnings, run_call

T = TypeVar("T")


class Together:
    """A thread that decodes, for as many calls as there are at once."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises UnsupportedModelError with the reason for a model whose texts cannot share passes."""
        self._model, self.target = model, ready(model)
        self._batch = RunningBatch(self.target)
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """What to do before the next step; None: end."""
        self._waiting: dict[Row, Future[None]] = {}
        self._ending, self._ended = threading.Lock(), False
        self._thread = threading.Thread(target=self._decode, name="decoding", daemon=True)
        self._thread.start()

    def model(self, drafter: Drafter, seed: int) -> PreTrainedModel:
        """The model, such that a call of its `generate` returns, among others, what it returns alone after
        `torch.manual_seed(seed)`; any number of threads may each have one, with one drafter or several.
        """
        return view(self._model, Acceleration(drafter, False, self.target, decode=partial(self._decoded, seed)))

    def between_steps(self, function: Callable[[], T]) -> Future[T]:
        """Calls a function in the thread that decodes, between two steps; here, where that has ended."""
        called: Future[T] = Future()

        def call() -> None:
            try:
                called.set_result(function())
            except Exception as error:
                called.set_exception(error)

        with self._ending:
            if not self._ended:
                self._asked.put(call)
                return called
        call()
        return called

    def close(self) -> None:
        """Ends the thread, once all texts have ended; may be called again."""
        self._asked.put(None)
        self._thread.join()

    def _decoded(
        self, seed: int, target: TreeModel, call: GenerateCall, drafter: Drafter, stats: Stats, fast: Fast
    ) -> Output | torch.Tensor:
        """As `run_call`."""
        if len(call.input_ids) > 1 or call.cache_is_seen or slots(call.cache):
            torch.manual_seed(seed)
            return run_call(target, call, drafter, stats, fast)
        (sequence,), (selector,) = beginnings(call)
        row, ended, streamer = Row(sequence, selector, drafter, stats), Future[None](), call.streamer

        def take(step: Step) -> None:
            if streamer is not None:
                streamer.put(torch.tensor(step.tokens))

        def join() -> None:
            if self._ended:
                raise RuntimeError("expected a call before Together.close(), got one after it; make another Together")
            if selector.sample:
                row.draws = Draws(seed, target.device)
            self._batch.join(row, take, streamed=streamer is not None)
            self._waiting[row] = ended

        self.between_steps(join).result()
        ended.result()
        if streamer is not None:
            streamer.end()
        return sequence.padded

    def _decode(self) -> None:
        """The thread: steps as long as there are texts, and what was asked for before each."""
        closing = False
        while not closing or self._waiting:
            while not self._asked.empty() or not (self._waiting or closing):
                asked = self._asked.get()
                closing = closing or asked is None
                if asked is not None:
                    asked()
            for row in self._step() if self._waiting else ():
                ended = self._waiting.pop(row)
                if row.error is None:
                    ended.set_result(None)
                else:
                    ended.set_exception(row.error)
        with self._ending:
            self._ended = True
        while not self._asked.empty():
            asked = self._asked.get()
            if asked is not None:
                asked()

    def _step(self) -> list[Row]:
        """The texts that have ended with a step; all of them where a batch fails in a way that it does not provide for,
        which is given up then.
        """
        try:
            return self._batch.step()
        except Exception as error:
            self._batch = RunningBatch(self.target)
            for row in self._waiting:
                row.error = row.error or error
            return list(self._waiting)
