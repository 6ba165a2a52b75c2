"""What is added to, and taken from, the answers of transformers' handlers on their way out.

Statistics of drafting are added to the usage block; the stop string and what follows it is taken away, as in OpenAI's
API; errors in a stream get OpenAI's form; streams of completions end with `[DONE]`. Only the form of the answers is
relied on, which is OpenAI's. Cost: an event of a stream is parsed and written again, some 20 microseconds.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from .errors import error_body
from .job import Job


def speculation(job: Job) -> dict[str, Any]:
    """What the usage block says about drafting."""
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


class Trimmed:
    """A text that comes in pieces, without a stop string and what follows it."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop, self._held, self._over = stop, "", False

    def push(self, piece: str) -> str:
        """What may be shown with this piece: an end that a stop string could begin with is held back."""
        if self._over or not self._stop:
            return "" if self._over else piece
        self._held += piece
        places = [place for place in (self._held.find(one) for one in self._stop) if place >= 0]
        if places:
            shown, self._held, self._over = self._held[: min(places)], "", True
            return shown
        kept = max((_overlap(self._held, one) for one in self._stop), default=0)
        cut = len(self._held) - kept
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


def complete(answer: dict[str, Any], job: Job) -> dict[str, Any]:
    """A whole answer."""
    for choice in answer.get("choices", ()):
        for holder, name in ((choice, "text"), (choice.get("message", {}), "content")):
            if holder.get(name):
                text = Trimmed(job.stop)
                holder[name] = text.push(holder[name]) + text.flush()
    if "usage" in answer:
        answer["usage"]["speculation"] = speculation(job)
    return answer


async def events(source: AsyncIterator[str], job: Job, done: bool) -> AsyncIterator[str]:
    """The events of a stream; `done` if they end with `[DONE]`."""
    text = Trimmed(job.stop)
    try:
        async for some in source:
            for event in filter(None, some.split("\n\n")):
                yield _event(event, job, text)
        if done:
            yield "data: [DONE]\n\n"
    finally:
        job.cancel()
        await source.aclose()  # type: ignore[attr-defined]


def _event(event: str, job: Job, text: Trimmed) -> str:
    data = json.loads(event.removeprefix("data: "))
    if isinstance(data.get("error"), str):
        data = error_body(500, data["error"], "generation_failed")
    for choice in data.get("choices", ()):
        _trim(choice, text)
    for holder in (data, data.get("response") or {}):
        if holder.get("usage"):
            holder["usage"]["speculation"] = speculation(job)
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def _trim(choice: dict[str, Any], text: Trimmed) -> None:
    holder, name = (choice["delta"], "content") if "delta" in choice else (choice, "text")
    if holder.get(name):
        holder[name] = text.push(holder[name])
    if choice.get("finish_reason") is not None:
        rest = text.flush()
        if rest:
            holder[name] = (holder.get(name) or "") + rest
