"""The model that is served, and everything that requests share: the thread, the drafters, the limits, the counts."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from ..costs.curve import band
from ..cuda_graphs import costs_of
from ..drafter import Drafter
from ..model.loading import Loaded
from ..model.tree_model import TreeModel
from ..registry import make_drafter
from .errors import ApiError
from .handlers import ChatHandler, OneModel, ResponsesHandler, State, TextHandler, Worker
from .isolation import Drafters
from .job import Job
from .keys import METRICS, Key, find_key
from .metrics import Metrics
from .modes import Isolation
from .offers import DEFAULT, Offers

_LONGEST_MEASURED = 16_384
"""Tokens of a prompt up to which the cost of trees is measured at start: beyond, the cache for it may be large."""


@dataclass(frozen=True)
class Settings:
    """How a model is served: the options of `token-recycling serve`."""

    name: str = "model"
    """What clients call the model."""
    drafter: str = "recycling"
    offers: tuple[str, ...] = DEFAULT
    """Drafters that a request for steps may name instead, made for that request."""
    free_options: bool = False
    """Such a request may change the options of the drafter: for a server with one user."""
    matrix: Path | None = None
    """Loaded at start if it is there; the base of all drafters, and, where one is shared, where it is saved."""
    save_every: float = 60.0
    """Seconds between two savings of what changed."""
    isolation: Isolation = Isolation.shared
    """Or its name."""
    keys: tuple[Key, ...] = ()
    max_keys: int = 64
    """Matrices of keys in memory at most; the one used longest ago makes room."""
    max_prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    max_requests: int = 32
    """Running and waiting."""
    max_requests_per_key: int | None = None
    max_body: float = 2.0
    """Megabytes of a request's body at most."""
    timeout: float | None = None
    """Seconds from the arrival of a request to its last token at most."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "isolation", Isolation(self.isolation))
        for name in ("max_keys", "max_prompt_tokens", "max_new_tokens", "max_requests", "max_requests_per_key"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"expected {name} of 1 or more, got {value}")
        for name in ("save_every", "max_body", "timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"expected {name} above 0, got {value}")
        users = [key for key in self.keys if key.name != METRICS]
        if self.isolation is Isolation.per_key and not users:
            raise ValueError("expected an API key for isolation per-key, got none; give one, or another isolation")


class Service:
    """Serves one model. Made before the event loop runs; raises ValueError where the settings do not fit."""

    def __init__(self, loaded: Loaded, settings: Settings) -> None:
        self.loaded, self.settings, self.metrics = loaded, settings, Metrics()
        self.target = TreeModel(loaded.model)
        self.drafters = Drafters(
            loaded, settings.drafter, settings.isolation, settings.matrix, settings.max_keys, self.metrics.count_save
        )
        self.offers = Offers(settings.offers, settings.free_options)
        self.metrics.matrices.set_function(lambda: len(self.drafters))
        self.worker = Worker(self)
        parts = (OneModel(self), State(self.worker))
        self.chat, self.text, self.responses = ChatHandler(*parts), TextHandler(*parts), ResponsesHandler(*parts)
        self._jobs: dict[str, Job] = {}
        self._by_key: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.closing = self._opened = False
        self.created = int(time.time())

    @property
    def running(self) -> int:
        """Requests that run or wait."""
        return len(self._jobs)

    def key_of(self, authorization: str | None) -> Key | None:
        """The API key of an Authorization header, None where no keys are configured; raises ApiError."""
        keys = self.settings.keys
        if not keys:
            return None
        key = find_key(keys, authorization)
        if key is None or key.name == METRICS:
            message = "expected an API key of this server, as `Authorization: Bearer KEY`, got none or another one"
            raise ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return key

    def check_metrics(self, authorization: str | None) -> None:
        """Raises ApiError unless the request may see /metrics: totals say something about what others do."""
        keys = self.settings.keys
        key = find_key(keys, authorization)
        if keys and (key is None or key.name != METRICS):
            message = f"expected the API key with the name {METRICS!r}, got none or another one"
            raise ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for another model than the one that is served."""
        if name is not None and name != self.settings.name:
            message = f"expected the model {self.settings.name!r}, got {name!r}"
            raise ApiError(404, message, "model_not_found", "model")

    def check_chat(self) -> None:
        """Raises ApiError if there is no chat template."""
        if not getattr(self.loaded.tokenizer, "chat_template", None):
            message = (
                "the model has no chat template, so that it cannot take messages; use /v1/completions, or start the "
                "server with --chat-template"
            )
            raise ApiError(400, message, "no_chat_template", "messages")

    def admit(self, key: Key | None, prefix: str, drafter: str = "accelerated", **options: Any) -> Job:
        """A job for a request with that key, with the server's own drafter (accelerated), none (plain) or one that is
        offered; raises ApiError if it is not, or if there are too many jobs. It must be ended or cancelled.
        """
        settings, name, again = self.settings, key.name if key else "", {"Retry-After": "1"}
        lend = functools.partial(self.drafters.lent, name) if drafter == "accelerated" else self._anew(drafter)
        with self._lock:
            if self.closing:
                raise ApiError(503, "the server is shutting down", "shutting_down", headers=again)
            if settings.max_requests_per_key is not None and self._by_key[name] >= settings.max_requests_per_key:
                message = f"expected {settings.max_requests_per_key} requests at once of a key at most; try again later"
                raise ApiError(429, message, "too_many_requests", headers=again)
            if len(self._jobs) >= settings.max_requests:
                message = f"the server has {settings.max_requests} requests, as many as it takes; try again later"
                raise ApiError(503, message, "overloaded", headers=again)
            own = {"key": name, "prefix": prefix, "timeout": settings.timeout, "on_end": self._ended}
            job = self._job(lend, **own, **options)
            self._by_key[name] += 1
            self.metrics.running.set(len(self._jobs))
        return job

    def _anew(self, drafter: str) -> Callable[[], contextlib.AbstractContextManager[Drafter]]:
        """Lends a drafter that is made for one request."""
        made = make_drafter("plain") if drafter == "plain" else self.offers.make(drafter)
        return lambda: contextlib.nullcontext(made)

    def _job(self, lend: Callable[[], contextlib.AbstractContextManager[Drafter]], **options: Any) -> Job:
        job = Job(self.loaded.model, lend, **options)
        self._jobs[job.id] = job
        return job

    def prepared(self, job_id: str, inputs: Any, config: GenerationConfig) -> Job:
        """The job of that id, its prompt checked and its length limited; raises ApiError."""
        job = self._jobs[job_id]
        job.prompt_tokens = length = inputs["input_ids"].shape[-1]
        limit, context = self.settings.max_prompt_tokens, self.loaded.context
        if not length:
            raise ApiError(400, "expected a prompt of one token or more, got none", "empty_prompt")
        if limit is not None and length > limit and not job.free:
            raise _too_long(f"a prompt of at most {limit} tokens", length)
        if context is not None and length >= context:
            raise _too_long(f"a prompt of fewer tokens than the model's context of {context}", length)
        limits = [config.max_new_tokens, self.settings.max_new_tokens, None if context is None else context - length]
        config.max_new_tokens = min(one for one in limits if one is not None)
        return job

    def _ended(self, job: Job) -> None:
        with self._lock:
            del self._jobs[job.id]
            self._by_key[job.key] -= 1
            self.metrics.running.set(len(self._jobs))
            self.metrics.count_job(job)

    async def open(self) -> None:
        """Measures and compiles what the first requests would wait for, and tries the way that they go. May be called
        again. Raises RuntimeError where that way is barred.
        """
        if self._opened:
            return
        await self.worker.async_submit(self._measure)
        job = self._job(lambda: contextlib.nullcontext(self.drafters.fork()), free=True)
        try:
            body = {"prompt": "The first of the", "model": self.settings.name, "max_tokens": 8}
            await self.text.handle_request(body, job.id)
        except Exception as error:
            raise RuntimeError(
                f"expected transformers' own server to complete a first text, got {type(error).__name__}: {error}"
            ) from error
        finally:
            del self._jobs[job.id]
        self._opened = True

    @torch.no_grad()
    def _measure(self) -> None:
        """The times of passes over trees (`costs`), for every length of prompt."""
        limits = (self.settings.max_prompt_tokens, self.loaded.context, _LONGEST_MEASURED)
        longest = min(limit for limit in limits if limit is not None)
        length, costs = min(longest, band(1)), costs_of(self.target, "auto")
        while True:
            ids = torch.arange(length, device=self.target.device) % self.target.embedded
            self.drafters.fork().start([ids], self.target, costs)
            if length >= longest:
                return
            length = min(longest, 4 * length)

    async def save(self) -> None:
        """Saves what was learned, between two requests."""
        await self.worker.async_submit(self.drafters.save)

    async def save_at_intervals(self) -> None:
        """Saves until it is cancelled."""
        while True:
            await asyncio.sleep(self.settings.save_every)
            await self.save()

    def close(self) -> None:
        """Ends all requests and saves; may be called again."""
        self.closing = True
        for job in list(self._jobs.values()):
            job.cancel()
        self.worker.submit(self.drafters.save).result()


def _too_long(expected: str, length: int) -> ApiError:
    return ApiError(400, f"expected {expected}, got {length}; shorten it", "context_length_exceeded")
