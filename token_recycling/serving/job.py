"""One request, from its arrival to its last token.

transformers' handlers call `generate` on what they take for the model; what they are given is a `Job`. It runs in the
one thread that generates: it seeds torch, acquires the drafter that the isolation allows, calls the model's own
`generate`, accelerated, and ends as soon as its client disconnects or its time is over.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..draft import Context, Draft, Step
from ..drafter import Drafter, DrafterTraits, TextDrafter
from ..hf.accelerate import accelerated
from ..model.step_costs import StepCosts
from ..model.tree_model import TreeModel
from ..stats import Stats
from ..text_stream import one_line
from .errors import ApiError, CancelledError

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.generation.streamers import BaseStreamer

logger = logging.getLogger("token_recycling.serving")


@dataclass
class Job:
    """An accepted request. All but `cancel` and `generate` is for the thread of the event loop."""

    model: PreTrainedModel
    drafter: AbstractContextManager[Drafter]
    """Gives the drafter for the length of a `with` block, once."""
    key: str = ""
    """Name of its API key; empty where none is needed."""
    prefix: str = ""
    """What its id begins with."""
    seed: int | None = None
    stop: Sequence[str] = ()
    timeout: float | None = None
    """Seconds from arrival to the last token at most."""
    on_step: Callable[[Step, float], None] | None = None
    """Called in the thread that generates, with every step and the seconds since the prompt was read."""
    on_end: Callable[[Job], None] = lambda job: None
    """Called once, when nothing more will be generated."""
    warm_up: bool = False
    """The server's own request at start: its prompt may be longer than clients' may."""

    stats: Stats = field(default_factory=Stats, init=False)
    fallback: str | None = field(default=None, init=False)
    """Why transformers' own decoding was used, or None."""
    waited: float = field(default=0.0, init=False)
    """Seconds before its turn came."""
    started: bool = field(default=False, init=False)
    prompt_tokens: int = field(default=0, init=False)
    cancelled: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}{uuid.uuid4().hex}"
        self._since = time.monotonic()
        self._ended, self._failed, self._ending = False, False, threading.Lock()

    def cancel(self) -> None:
        """The client has disconnected: a running generation ends with its step, a waiting one never begins."""
        if not self._ended:
            self.cancelled = True
        if not self.started:
            self.end()

    def end(self) -> None:
        """Nothing more will be generated: calls `on_end`, the first time only."""
        with self._ending:
            first, self._ended = not self._ended, True
        if first:
            self.on_end(self)

    @property
    def outcome(self) -> str | None:
        """How it ended: complete, cancelled, failed; None if it was refused before its text began."""
        if self.cancelled:
            return "cancelled"
        if not self.started:
            return None
        return "failed" if self._failed else "complete"

    def check(self) -> None:
        """Raises CancelledError, or ApiError where the time is over."""
        if self.cancelled:
            raise CancelledError
        if self.timeout is None or time.monotonic() - self._since < self.timeout:
            return
        if not self.started:
            raise ApiError(503, f"the request waited for {self.timeout:g} s", "timeout", headers={"Retry-After": "5"})
        # Clients retry after a 504 unless a header forbids it.
        headers = {"x-should-retry": "false"}
        raise ApiError(504, f"the text was not complete within {self.timeout:g} s", "timeout", headers=headers)

    def generate(self, streamer: BaseStreamer | None = None, **arguments: Any) -> Any:
        """The model's own `generate`, in the thread of all generation."""
        try:
            result = self._generated(streamer, arguments)
        except (ApiError, CancelledError):
            self._failed = True
            raise
        except Exception as error:
            self._failed = True
            if streamer is None:
                raise
            # Once a stream has begun, transformers sends the error's text between quotation marks, without escapes.
            logger.exception("the generation %s failed", self.id)
            raise RuntimeError(one_line(error).replace("\\", "/").replace('"', "'")) from error
        finally:
            self.end()
        # Only now, so that the statistics are there when the stream ends.
        if streamer is not None:
            streamer.end()
        return result

    def _generated(self, streamer: BaseStreamer | None, arguments: dict[str, Any]) -> Any:
        self.check()
        self.started, self.waited = True, time.monotonic() - self._since
        # All requests share one random generator: none may predict another's draws.
        torch.manual_seed(secrets.randbits(63) if self.seed is None else self.seed)
        with self.drafter as drafter:
            if self.on_step is not None:
                drafter = StepReporter(drafter, self.on_step)
            with accelerated(self.model, drafter) as acceleration:
                try:
                    return self.model.generate(**arguments, streamer=_CancellingStreamer(self, streamer))
                finally:
                    self.stats, self.fallback = acceleration.stats, acceleration.fallback


class _CancellingStreamer:
    """Forwards to another streamer, and ends a generation that was cancelled or takes too long."""

    def __init__(self, job: Job, inner: BaseStreamer | None) -> None:
        self._job, self._inner = job, inner

    def put(self, value: torch.Tensor) -> None:
        self._job.check()
        if self._inner is not None:
            self._inner.put(value)

    def end(self) -> None:
        """The job itself ends the inner streamer, once its statistics are known."""


class StepReporter(Drafter):
    """Wraps a drafter: calls `on_step` with every step that it has learned from, and the seconds since the prompt was
    read.
    """

    def __init__(self, inner: Drafter, on_step: Callable[[Step, float], None]) -> None:
        self._inner, self._on_step = inner, on_step

    @property
    def traits(self) -> DrafterTraits:
        return self._inner.traits

    def start(self, prompt: torch.Tensor, target: TreeModel, costs: StepCosts) -> TextDrafter:
        return _ReportedText(self, self._inner.start(prompt, target, costs), self._on_step)

    def describe(self) -> str:
        return self._inner.describe()


class _ReportedText(TextDrafter):
    """One text of a wrapped drafter; it has no `retrieval`, since a device that drafts by itself reports no steps."""

    def __init__(self, drafter: Drafter, inner: TextDrafter, on_step: Callable[[Step, float], None]) -> None:
        super().__init__(drafter)
        self._inner, self._on_step = inner, on_step
        self._since: float | None = None

    def observe_prompt(self, tokens: torch.Tensor, logits: torch.Tensor) -> None:
        self._inner.observe_prompt(tokens, logits)

    def read_prompt(self, states: torch.Tensor) -> None:
        self._inner.read_prompt(states)

    def draft(self, context: Context) -> Draft:
        if self._since is None:
            self._since = time.perf_counter()
        return self._inner.draft(context)

    def observe(self, step: Step) -> None:
        self._inner.observe(step)
        assert self._since is not None
        self._on_step(step, time.perf_counter() - self._since)

    def statistics(self) -> Mapping[str, float]:
        return self._inner.statistics()

    def describe(self) -> str:
        return self._inner.describe()
