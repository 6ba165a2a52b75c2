"""Reports on rows: tables, plots, one page."""

from __future__ import annotations

from ..._util.extras import lacking


def require_extra() -> None:
    """Raise ValueError where a library that reports need is missing."""
    if missing := lacking("bench", "pandas", "matplotlib", "jinja2"):
        raise ValueError(f"writing a report {missing}")
