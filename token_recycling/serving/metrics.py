"""What a server has done since it started, in the text format of Prometheus."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .job import Job

_MAT = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 12, 16, 32)
_SECONDS = tuple(step * 10**power for power in (-3, -2, -1, 0) for step in (1, 2, 5))


class Metrics:
    """Counters of one server, safe to increment from any thread."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        counter = partial(Counter, namespace="token_recycling", registry=self._registry)
        gauge = partial(Gauge, namespace="token_recycling", registry=self._registry)
        self._requests = counter("requests", "Requests by path and status.", ["path", "status"])
        self._jobs = counter("generations", "Generations by how they ended.", ["outcome"])
        self._fallbacks = counter("not_accelerated", "Generations left to transformers' own decoding.")
        self._tokens = counter("generated_tokens", "Emitted tokens.")
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self._steps = counter("steps", "Forward passes after the prompts'.")
        self._drafted = counter("drafted_tokens", "Drafted tokens.")
        self._accepted = counter("accepted_tokens", "Drafted tokens that were accepted.")
        self._seconds = counter("seconds", "Seconds by phase.", ["phase"])
        self._saves = counter("matrix_saves", "Savings of a matrix, by whether they succeeded.", ["outcome"])
        self._mat = gauge("mean_accepted_tokens", "Tokens a step since the start (MAT).")
        by_key = partial(Histogram, namespace="token_recycling", registry=self._registry, labelnames=["key"])
        self._mat_by_key = by_key("generation_mat", "Tokens a step of a generation (MAT).", buckets=_MAT)
        self._step_by_key = by_key("step_seconds", "Mean seconds of a step of a generation.", buckets=_SECONDS)
        self.running = gauge("requests_in_progress", "Requests that run or wait.")
        self.generating = gauge("texts_running", "Texts that are generated.")
        self.waiting = gauge("texts_waiting", "Texts that wait for their turn.")
        self.drafters = gauge("drafters", "Drafters, each with its matrix, that are kept.")
        self._sums = [0, 0]

    def count_request(self, path: str, status: int) -> None:
        """One more answer."""
        self._requests.labels(path, str(status)).inc()

    def count_job(self, job: Job) -> None:
        """What a generation that has ended has cost and generated. Calls must not overlap."""
        stats = job.stats
        self._jobs.labels(job.outcome).inc()
        self._fallbacks.inc(job.fallback is not None)
        self._tokens.inc(stats.tokens)
        self._prompt_tokens.inc(stats.prompt_tokens)
        self._steps.inc(stats.steps)
        self._drafted.inc(stats.drafted)
        self._accepted.inc(stats.accepted.total())
        for phase, seconds in {"wait": job.waited, "prefill": stats.prefill_seconds, **stats.seconds}.items():
            self._seconds.labels(phase).inc(seconds)
        self._sums = [self._sums[0] + stats.tokens, self._sums[1] + stats.steps]
        if self._sums[1]:
            self._mat.set(self._sums[0] / self._sums[1])
        if stats.steps:
            self._mat_by_key.labels(job.key).observe(stats.mat)
            self._step_by_key.labels(job.key).observe(stats.decode_seconds / stats.steps)

    def count_save(self, good: bool) -> None:
        """A matrix was saved, or saving it failed."""
        self._saves.labels("good" if good else "failed").inc()

    def text(self) -> bytes:
        """All metrics, for an answer."""
        return generate_latest(self._registry)
