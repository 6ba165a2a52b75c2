"""One request, from its admission to its last token.

transformers' handlers call `generate` on what they take for the model; what they are given is a `Job`. It runs in the
one thread that generates: it seeds torch, borrows the drafter that the isolation allows, calls the model's own
`generate`, accelerated, and ends as soon as its client has gone or its time is over.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..costs.measure import PassCosts
from ..draft import Context, Draft, Step
from ..drafter import Drafter, DrafterTraits
from ..hf.accelerate import accelerated
from ..model.tree_model import TreeModel
from ..stats import Stats
from ..text_stream import one_line
from .errors import ApiError, CancelledError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


logger = logging.getLogger("token_recycling.serving")


class _Streamer(Protocol):
    def put(self, value: torch.Tensor) -> None: ...
    def end(self) -> None: ...


@dataclass
class Job:
    """A request that was let in. All but `cancel` and `generate` is for the thread of the event loop."""

    model: PreTrainedModel
    lend: Callable[[], AbstractContextManager[Drafter]]
    """Gives the drafter, for as long as the text is generated."""
    key: str = ""
    """Name of the API key it came with; empty where none is needed."""
    seed: int | None = None
    stop: Sequence[str] = ()
    timeout: float | None = None
    """Seconds from admission to the last token at most."""
    on_step: Callable[[Step, float], None] | None = None
    """Called in the thread that generates, with every step and the seconds since the prompt was read."""
    on_end: Callable[[Job], None] = lambda job: None
    """Called once, when nothing more will be generated."""
    free: bool = False
    """Whether its prompt may be longer than clients' may."""
    prefix: str = ""
    """What its id begins with."""

    stats: Stats = field(default_factory=Stats, init=False)
    fallback: str | None = field(default=None, init=False)
    """Why transformers' own decoding was used, or None."""
    waited: float = field(default=0.0, init=False)
    """Seconds before its turn came."""
    started: bool = field(default=False, init=False)
    prompt_tokens: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}{uuid.uuid4().hex}"
        self._since = time.monotonic()
        self._cancelled = threading.Event()
        self._ended, self._failed, self._ending = False, False, threading.Lock()

    def cancel(self) -> None:
        """The client has gone: a running generation ends with its step, one that waits will not begin."""
        if not self._ended:
            self._cancelled.set()
        if not self.started:
            self.end()

    def end(self) -> None:
        """Says that nothing more will be generated; only the first call counts."""
        with self._ending:
            first, self._ended = not self._ended, True
        if first:
            self.on_end(self)

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

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
        # Clients try again after a 504 unless they are told that it is of no use.
        headers = {"x-should-retry": "false"}
        raise ApiError(504, f"the text was not complete within {self.timeout:g} s", "timeout", headers=headers)

    def generate(self, streamer: _Streamer | None = None, **arguments: Any) -> Any:
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
            # Of an answer that has begun only the text of the error is left, which is put between quotation marks.
            logger.exception("the generation %s failed", self.id)
            raise RuntimeError(one_line(error).replace("\\", "/").replace('"', "'")) from error
        finally:
            self.end()
        # Only now, so that whoever reads the end of the stream finds the statistics.
        if streamer is not None:
            streamer.end()
        return result

    def _generated(self, streamer: _Streamer | None, arguments: dict[str, Any]) -> Any:
        self.check()
        self.started, self.waited = True, time.monotonic() - self._since
        # The generator of random numbers is one for all requests: nobody may know another's draws.
        torch.manual_seed(secrets.randbits(63) if self.seed is None else self.seed)
        with self.lend() as drafter, accelerated(self.model, self._watched(drafter)) as acceleration:
            try:
                return self.model.generate(**arguments, streamer=_Watch(self, streamer))
            finally:
                self.stats, self.fallback = acceleration.stats, acceleration.fallback

    def _watched(self, drafter: Drafter) -> Drafter:
        return drafter if self.on_step is None else Watched(drafter, self.on_step)


class _Watch:
    """A streamer that ends a generation which nobody waits for, and hands on to another one."""

    def __init__(self, job: Job, inner: _Streamer | None) -> None:
        self._job, self._inner = job, inner

    def put(self, value: torch.Tensor) -> None:
        self._job.check()
        if self._inner is not None:
            self._inner.put(value)

    def end(self) -> None:
        """The job itself says when the end has come."""


class Watched(Drafter):
    """A drafter whose every step is shown to `watcher` after it has learned from it, with the seconds since the
    prompt was read.
    """

    def __init__(self, inner: Drafter, watcher: Callable[[Step, float], None]) -> None:
        self._inner, self._watcher = inner, watcher
        self._since: float | None = None

    @property
    def traits(self) -> DrafterTraits:
        # A device that drafts by itself would not show its steps.
        return replace(self._inner.traits, retrieval=None)

    def start(self, prompts: Sequence[torch.Tensor], target: TreeModel, costs: PassCosts) -> None:
        self._inner.start(prompts, target, costs)

    def observe_prompt(self, tokens: torch.Tensor, logits: torch.Tensor, row: int) -> None:
        self._inner.observe_prompt(tokens, logits, row)

    def draft(self, context: Context) -> Draft:
        if self._since is None:
            self._since = time.perf_counter()
        return self._inner.draft(context)

    def observe(self, step: Step) -> None:
        self._inner.observe(step)
        assert self._since is not None
        self._watcher(step, time.perf_counter() - self._since)

    def statistics(self) -> Mapping[str, float]:
        return self._inner.statistics()

    def describe(self) -> str:
        return self._inner.describe()
