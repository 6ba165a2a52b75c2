"""Postprocessing of the answers of transformers' handlers.

Statistics of drafting are added to the usage block; the stop string and what follows it is cut off, as in OpenAI's
API; errors in a stream get OpenAI's form; streams of completions end with `[DONE]`. Nothing but OpenAI's format is
relied on. Cost: every event of a stream is parsed and serialized again, some 20 microseconds.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from .errors import error_body
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


class StopTrimmer:
    """Cuts a text that comes in pieces before the first stop string."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop, self._held, self._stopped = stop, "", False

    def push(self, piece: str) -> str:
        """The text that is safe to send with this piece; an end that may begin a stop string is held back."""
        if self._stopped:
            return ""
        self._held += piece
        places = [place for place in map(self._held.find, self._stop) if place >= 0]
        if places:
            safe, self._held, self._stopped = self._held[: min(places)], "", True
            return safe
        cut = len(self._held) - max((_overlap(self._held, stop) for stop in self._stop), default=0)
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


def complete_answer(answer: dict[str, Any], job: Job) -> dict[str, Any]:
    """An answer that is not streamed, postprocessed in place."""
    for choice in answer.get("choices", ()):
        for holder, name in ((choice, "text"), (choice.get("message", {}), "content")):
            if holder.get(name):
                text = StopTrimmer(job.stop)
                holder[name] = text.push(holder[name]) + text.flush()
    if "usage" in answer:
        answer["usage"]["speculation"] = speculation(job)
    return answer


async def stream_events(source: AsyncGenerator[str], job: Job, done: bool) -> AsyncGenerator[str]:
    """The server-sent events of a stream, postprocessed; with `done` they end with `[DONE]`."""
    text = StopTrimmer(job.stop)
    try:
        async for chunk in source:
            for event in filter(None, chunk.split("\n\n")):
                yield _event(event, job, text)
        if done:
            yield "data: [DONE]\n\n"
    finally:
        job.cancel()
        await source.aclose()


def _event(event: str, job: Job, text: StopTrimmer) -> str:
    data = json.loads(event.removeprefix("data: "))
    if isinstance(data.get("error"), str):
        data = error_body(500, data["error"], "generation_failed")
    for choice in data.get("choices", ()):
        _trim(choice, text)
    for holder in (data, data.get("response") or {}):
        if holder.get("usage"):
            holder["usage"]["speculation"] = speculation(job)
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def _trim(choice: dict[str, Any], text: StopTrimmer) -> None:
    holder, name = (choice["delta"], "content") if "delta" in choice else (choice, "text")
    if holder.get(name):
        holder[name] = text.push(holder[name])
    if choice.get("finish_reason") is not None:
        rest = text.flush()
        if rest:
            holder[name] = (holder.get(name) or "") + rest
