"""The model that is served, and all that requests share: the decoder, the drafters, limits and metrics."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from functools import partial

from ..model.loading import Loaded
from ..model.prefixes import PrefixCache, default_budget
from ..model.tree_model import TreeModel
from .batch_slots import batch_slots
from .decoder import Decoder
from .drafter_pool import DrafterPool
from .errors import ApiError
from .grammars import Grammars
from .job import Job
from .keys import Key
from .metrics import Metrics
from .protocol import Request
from .settings import Isolation, Settings
from .templates import check_template


class Service:
    """Serves one model. Made before the event loop runs; raises ValueError where the settings do not fit."""

    def __init__(self, loaded: Loaded, settings: Settings) -> None:
        check_template(loaded.tokenizer)
        self.loaded, self.settings, self.metrics = loaded, settings, Metrics()
        self.target = TreeModel(loaded.model)
        limit = default_budget(self.target) if settings.cache is None else int(settings.cache * 1_000_000)
        self.prefixes = PrefixCache(self.target, limit)
        self.metrics.cached_bytes.set_function(lambda: self.prefixes.nbytes)
        self.pool = DrafterPool(
            loaded,
            settings.drafter,
            settings.isolation,
            settings.matrix,
            self.metrics.count_save,
            settings.reproducible,
            settings.offers,
        )
        self.metrics.drafters.set_function(lambda: len(self.pool))
        slots = batch_slots(self.target, self.pool.base, settings, limit)
        self.decoder = Decoder(self.target, self.pool.base, slots, settings.fast)
        self.metrics.generating.set_function(lambda: self.decoder.workers.running)
        self.metrics.waiting.set_function(lambda: self.decoder.workers.waiting)
        self.grammars = Grammars(loaded, settings.isolation, len(settings.keys), settings.grammar_seconds)
        self._jobs: dict[str, Job] = {}
        self._by_key: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.closing = self.warm = False
        self.created = int(time.time())

    @property
    def running(self) -> int:
        """Number of requests that run or wait."""
        return len(self._jobs)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for another model than the one that is served."""
        names = [self.settings.name, *self.settings.aliases]
        if name is not None and name not in names:
            message = f"model must be {' or '.join(map(repr, names))}, got {name!r}"
            raise ApiError(404, message, "model_not_found", "model")

    def check_chat(self) -> None:
        """Raise ApiError if there is no chat template."""
        if not getattr(self.loaded.tokenizer, "chat_template", None):
            message = (
                "the model has no chat template, so that it cannot take messages; use /v1/completions, or start the "
                "server with --chat-template"
            )
            raise ApiError(400, message, "no_chat_template", "messages")

    def create_job(
        self, key: Key | None, body: Request, prefix: str, drafter: str = "accelerated", local: bool = True
    ) -> Job:
        """Return a job for a request with that key, whose id begins with `prefix`. Its drafter is the server's own
        ("accelerated"), the same without knowledge (`"anew"`), none ("plain") or an offered one. `local`: it was made
        on this machine. It must be ended or cancelled. Raises ApiError for another drafter, too many jobs, or a server
        that is shutting down.
        """
        if body.speculation is not None and not body.speculation.enabled:
            drafter = "plain"
        self.pool.check(drafter)
        settings, name, retry = self.settings, key.name if key else "", {"Retry-After": "1"}
        with self._lock:
            if self.closing:
                raise ApiError(503, "the server is shutting down", "shutting_down", headers=retry)
            if settings.max_requests_per_key is not None and self._by_key[name] >= settings.max_requests_per_key:
                most = settings.max_requests_per_key
                message = f"this API key has {most} requests running or queued, its maximum; try again later"
                raise ApiError(429, message, "too_many_requests", headers=retry)
            if len(self._jobs) >= settings.max_requests:
                message = (
                    f"the server has {settings.max_requests} requests running or queued, its maximum; try again later"
                )
                raise ApiError(503, message, "overloaded", headers=retry)
            job = Job(self.decoder, None, name, prefix, settings.timeout, on_end=self._on_end)
            forwarded = settings.isolate_forwarded and not settings.keys and not local
            job.isolated = forwarded or settings.isolation is Isolation.per_request
            self._jobs[job.id] = job
            self._by_key[name] += 1
            self.metrics.running.set(len(self._jobs))
        if drafter == "accelerated":
            job.drafter = partial(self.pool.acquire, job.key, job.isolated)
        else:
            job.drafter = partial(self.pool.make, drafter)
        return job

    def _on_end(self, job: Job) -> None:
        with self._lock:
            del self._jobs[job.id]
            self._by_key[job.key] -= 1
            self.metrics.running.set(len(self._jobs))
            if job.outcome is not None:
                self.metrics.count_job(job)

    async def save_at_intervals(self) -> None:
        """Save what was learned every `save_every` seconds, until cancelled."""
        while True:
            await asyncio.sleep(self.settings.save_every)
            await asyncio.to_thread(self.pool.save, self.running > 0, self.decoder.between_steps)

    def end_all(self) -> None:
        """End all requests with an error, at the end of the grace period."""
        for job in list(self._jobs.values()):
            job.interrupt(ApiError(503, "the server is shutting down", "shutting_down", headers={"Retry-After": "1"}))

    def close(self) -> None:
        """End all requests and save; may be called again."""
        self.closing = True
        for job in list(self._jobs.values()):
            job.cancel()
        self.decoder.workers.close()
        self.grammars.close()
        self.pool.save()
        self.decoder.close()
