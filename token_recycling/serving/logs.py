"""What the server logs of its work: an event for every answer and every generation, without a word of what was said.

They are on the logger `token_recycling.serving.access` at level INFO, with their figures in `fields`. As JSON lines,
one object each, they are for a collector of logs, warnings and errors among them.
"""

from __future__ import annotations

import json
import logging
from datetime import datetime, timezone
from typing import Any

from .job import Job

_ACCESS = logging.getLogger("token_recycling.serving.access")


def log_answer(path: str, status: int, seconds: float) -> None:
    """One more answer, `seconds` after its request came. `path` is the route's, not what a client made of it."""
    _log("answer", path=path, status=status, seconds=round(seconds, 4))


def log_generation(job: Job) -> None:
    """A generation has ended."""
    stats = job.stats
    _log(
        "generation",
        id=job.id,
        key=job.key,
        outcome=job.outcome,
        accelerated=job.fallback is None,
        prompt_tokens=stats.prompt_tokens,
        tokens=stats.tokens,
        steps=stats.steps,
        mat=round(stats.mat, 3),
        drafted=stats.drafted,
        accepted=stats.accepted.total(),
        wait_seconds=round(job.waited, 4),
        prefill_seconds=round(stats.prefill_seconds, 4),
        decode_seconds=round(stats.decode_seconds, 4),
    )


def _log(event: str, **fields: Any) -> None:
    if _ACCESS.isEnabledFor(logging.INFO):
        _ACCESS.info(event, extra={"fields": fields})


class JsonLines(logging.Formatter):
    """A record as one JSON object: time, level, logger, event, and its fields or the trace of its error."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_json_lines() -> None:
    """From now on everything that this process logs is such a line, on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    for name in ("token_recycling", "transformers"):
        own = logging.getLogger(name)
        own.handlers.clear()
        own.propagate = True
    _ACCESS.setLevel(logging.INFO)
