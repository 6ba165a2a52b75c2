"""The report of a benchmark, made of its rows: Markdown with plots."""

from __future__ import annotations

from ..._util.extras import lacking


def missing_libraries() -> str | None:
    """What to install where a library that reports need is missing, as the end of a sentence; else None."""
    return lacking("bench", "pandas", "tabulate", "scipy", "matplotlib")


def require_extra() -> None:
    """Raise ValueError where a library that reports need is missing."""
    if missing := missing_libraries():
        raise ValueError(f"writing a report {missing}")
