"""What answers have beside the text of the model: the usage block, with statistics of drafting.

The answers of transformers' handler of responses are parsed and serialized again for it, some 20 microseconds an event;
nothing but OpenAI's format is relied on.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

from .job import Job


def speculation(job: Job) -> dict[str, Any]:
    """The field `speculation` of the usage block."""
    stats = job.stats
    return {
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


def usage(job: Job, tokens: int) -> dict[str, Any]:
    """The usage block of an answer of so many tokens."""
    return {
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": job.prompt_tokens + tokens,
        "speculation": speculation(job),
    }


def complete_answer(answer: dict[str, Any], job: Job) -> dict[str, Any]:
    """An answer of transformers' handler that is not streamed, with the statistics, in place."""
    if "usage" in answer:
        answer["usage"]["speculation"] = speculation(job)
    return answer


async def stream_events(source: AsyncGenerator[str], job: Job) -> AsyncGenerator[str]:
    """The server-sent events of a stream of transformers' handler, postprocessed."""
    try:
        async for chunk in source:
            for event in filter(None, chunk.split("\n\n")):
                yield _event(event, job)
    finally:
        job.cancel()
        await source.aclose()


def _event(event: str, job: Job) -> str:
    data = json.loads(event.removeprefix("data: "))
    for holder in (data, data.get("response") or {}):
        if holder.get("usage"):
            holder["usage"]["speculation"] = speculation(job)
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
