"""What a server has done since it started, in the text format of Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from .job import Job

_PREFIX = "token_recycling"


class Metrics:
    """Counters of one server, safe to increment from any thread."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests by path and status.", "path", "status")
        self._jobs = self._counter("generations", "Generations by how they ended.", "outcome")
        self._fallbacks = self._counter("not_accelerated", "Generations left to transformers' own decoding.")
        self._tokens = self._counter("generated_tokens", "Emitted tokens.")
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self._steps = self._counter("steps", "Forward passes after the prompts'.")
        self._drafted = self._counter("drafted_tokens", "Drafted tokens.")
        self._accepted = self._counter("accepted_tokens", "Drafted tokens that were accepted.")
        self._seconds = self._counter("seconds", "Seconds by phase.", "phase")
        self._saves = self._counter("matrix_saves", "Savings of a matrix, by whether they succeeded.", "outcome")
        self._mat = self._gauge("mean_accepted_tokens", "Tokens a step since the start (MAT).")
        self.running = self._gauge("requests_in_progress", "Requests that run or wait.")
        self.drafters = self._gauge("drafters", "Drafters, each with its matrix, that are kept.")
        self._sums = [0, 0]

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{_PREFIX}_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"{_PREFIX}_{name}", text, registry=self._registry)

    def count_request(self, path: str, status: int) -> None:
        """One more answer."""
        self._requests.labels(path, str(status)).inc()

    def count_job(self, job: Job) -> None:
        """What a request has cost and generated. Calls must not overlap."""
        if job.outcome is None:
            return
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

    def count_save(self, good: bool) -> None:
        """A matrix was saved, or saving it failed."""
        self._saves.labels("good" if good else "failed").inc()

    def text(self) -> bytes:
        """All metrics, for an answer."""
        return generate_latest(self._registry)
