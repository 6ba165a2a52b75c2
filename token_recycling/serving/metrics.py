"""Metrics of a server: counters in Prometheus' text format, and a log event for every response and every generation.
Neither contains any text of prompts or outputs.

Events go to the logger `token_recycling.serving.access` at level INFO, with their values in `fields`. For log
collectors, `log_json_lines` writes all log records as JSON lines, warnings and errors included.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..loop.stats import Stats

_ACCESS = logging.getLogger("token_recycling.serving.access")
_MAT = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 12, 16, 32)
_LATENCY = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
_SECONDS = tuple(step * 10**power for power in (-3, -2, -1, 0) for step in (1, 2, 5))


class FinishedJob(Protocol):
    """The attributes of a job that the metrics read."""

    id: str
    key: str
    stats: Stats
    fallback: str | None
    prompt_tokens: int
    cached_tokens: int
    waited: float
    first_token_seconds: float | None

    @property
    def outcome(self) -> str | None: ...

    @property
    def seconds(self) -> float: ...


class Metrics:
    """Counters of one server, safe to increment from any thread."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        counter = partial(Counter, namespace="token_recycling", registry=self._registry)
        gauge = partial(Gauge, namespace="token_recycling", registry=self._registry)
        self._requests = counter("requests", "Requests by path and status.", ["path", "status"])
        self._jobs = counter("generations", "Generations by outcome.", ["outcome"])
        self._fallbacks = counter("not_accelerated", "Generations decoded by transformers' own loop.")
        self._tokens = counter("generated_tokens", "Emitted tokens.")
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self._cached_tokens = counter("cached_tokens", "Prompt tokens found in the prefix cache.")
        self._steps = counter("steps", "Forward passes, prefill excluded.")
        self._drafted = counter("drafted_tokens", "Drafted tokens.")
        self._accepted = counter("accepted_tokens", "Accepted drafted tokens.")
        self._seconds = counter("seconds", "Seconds by phase.", ["phase"])
        self._saves = counter("matrix_saves", "Matrix saves, by outcome.", ["outcome"])
        self._mat = gauge("mean_accepted_tokens", "Mean accepted tokens per step since the start (MAT).")
        by_key = partial(Histogram, namespace="token_recycling", registry=self._registry, labelnames=["key"])
        self._mat_by_key = by_key(
            "generation_mat", "Mean accepted tokens per step of a generation (MAT).", buckets=_MAT
        )
        self._latency = by_key("request_latency_seconds", "Seconds from arrival to the last token.", buckets=_LATENCY)
        self._first = by_key(
            "time_to_first_token_seconds", "Seconds from arrival to the first token.", buckets=_LATENCY
        )
        self._per_token = by_key(
            "time_per_output_token_seconds", "Decode time per generated token, prefill excluded.", buckets=_SECONDS
        )
        self._step_by_key = by_key("step_seconds", "Mean seconds per step of a generation.", buckets=_SECONDS)
        self.running = gauge("requests_in_progress", "Running and queued requests.")
        self.generating = gauge("sequences_running", "Sequences being generated.")
        self.waiting = gauge("sequences_waiting", "Sequences waiting for a batch slot.")
        self.drafters = gauge("drafters", "Cached drafters, each with its matrix.")
        self.cached_bytes = gauge("cached_bytes", "Bytes of the prefix cache.")
        self._sums = [0, 0]

    def count_request(self, path: str, status: int, seconds: float) -> None:
        """Count a request that took `seconds` from arrival to the end of its response. `path` is the route's template,
        which contains no client data.
        """
        self._requests.labels(path, str(status)).inc()
        _log("answer", path=path, status=status, seconds=round(seconds, 4))

    def count_generation(self, job: FinishedJob) -> None:
        """Count the tokens and times of a job that has generated tokens. Not thread-safe."""
        self._count(job)
        self._observe(job)
        stats = job.stats
        _log(
            "generation",
            id=job.id,
            key=job.key,
            outcome=job.outcome,
            accelerated=job.fallback is None,
            prompt_tokens=job.prompt_tokens,
            cached_tokens=job.cached_tokens,
            tokens=stats.tokens,
            steps=stats.steps,
            mat=round(stats.mat, 3),
            drafted=stats.drafted,
            accepted=stats.accepted.total(),
            seconds=round(job.seconds, 4),
            wait_seconds=round(job.waited, 4),
            prefill_seconds=round(stats.prefill_seconds, 4),
            decode_seconds=round(stats.decode_seconds, 4),
        )

    def _count(self, job: FinishedJob) -> None:
        """Add a job to the totals."""
        stats = job.stats
        self._jobs.labels(job.outcome).inc()
        self._fallbacks.inc(job.fallback is not None)
        self._tokens.inc(stats.tokens)
        self._prompt_tokens.inc(job.prompt_tokens)
        self._cached_tokens.inc(job.cached_tokens)
        self._steps.inc(stats.steps)
        self._drafted.inc(stats.drafted)
        self._accepted.inc(stats.accepted.total())
        phases = {"wait": job.waited, "prefill": stats.prefill_seconds, **stats.seconds}
        for phase, spent in phases.items():
            self._seconds.labels(phase).inc(spent)
        self._sums = [self._sums[0] + stats.tokens, self._sums[1] + stats.steps]
        if self._sums[1]:
            self._mat.set(self._sums[0] / self._sums[1])

    def _observe(self, job: FinishedJob) -> None:
        """Add a job to the histograms of its key."""
        stats = job.stats
        self._latency.labels(job.key).observe(job.seconds)
        if job.first_token_seconds is not None:
            self._first.labels(job.key).observe(job.first_token_seconds)
        if stats.tokens_per_second:
            self._per_token.labels(job.key).observe(1 / stats.tokens_per_second)
        if stats.steps:
            self._mat_by_key.labels(job.key).observe(stats.mat)
            self._step_by_key.labels(job.key).observe(stats.decode_seconds / stats.steps)

    def count_save(self, good: bool) -> None:
        """Count a successful or failed save of the matrix."""
        self._saves.labels("good" if good else "failed").inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


def _log(event: str, **fields: Any) -> None:
    if _ACCESS.isEnabledFor(logging.INFO):
        _ACCESS.info(event, extra={"fields": fields})


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, event, and its fields or the traceback of its error."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_json_lines() -> None:
    """Write all log records of this process as JSON lines to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    for name in ("token_recycling", "transformers"):
        own = logging.getLogger(name)
        own.handlers.clear()
        own.propagate = True
    _ACCESS.setLevel(logging.INFO)
