"""The report of a benchmark, made of its rows: Markdown with plots."""

from __future__ import annotations

from ..._util.extras import lacking

LIBRARIES = "pandas", "tabulate", "scipy", "matplotlib"
"""Of the extra `bench`."""


def require_extra() -> None:
    """Raise ValueError where a library that reports need is missing."""
    if missing := lacking("bench", *LIBRARIES):
        raise ValueError(f"writing a report {missing}")
