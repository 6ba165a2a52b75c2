"""The usage block of an answer, with statistics of drafting."""

from __future__ import annotations

from typing import Any

from .job import Job


def usage(job: Job, tokens: int) -> dict[str, Any]:
    """The usage block of an answer of so many tokens."""
    stats = job.stats
    speculation = {
        "drafter": stats.drafter,
        "accelerated": job.fallback is None,
        "steps": stats.steps,
        "mat": round(stats.mat, 4),
        "drafted_tokens": stats.drafted,
        "accepted_tokens": stats.accepted.total(),
        "tokens_per_second": round(stats.tokens_per_second, 2),
        "wait_seconds": round(job.waited, 6),
        "prefill_seconds": round(stats.prefill_seconds, 6),
        "decode_seconds": round(stats.decode_seconds, 6),
        **({} if job.fallback is None else {"not_accelerated_because": job.fallback}),
    }
    return {
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": job.prompt_tokens + tokens,
        "speculation": speculation,
    }
