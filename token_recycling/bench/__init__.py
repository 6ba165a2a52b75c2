"""Benchmarks of decoding methods, and reports of the results.

data         questions, options of a run, scenario files
prompts      conversion of questions to token ids
methods      any drafter, and transformers' own decoding: each decodes a call
measure      workloads, and the loop over methods and items
session      one run: options become a plan, an estimate and rows
environment  hardware, versions and model, recorded in each row
store        rows and their folder
summary      figures from rows
tables       figures as tables
findings     interpretation of the figures, as text
report       the page, with `plots`
"""

from __future__ import annotations

from .._util.extras import lacking


def missing_libraries() -> str | None:
    """Return what to install if a library that reports need is missing, as the end of a sentence; else None."""
    return lacking("bench", "pandas", "tabulate", "scipy", "matplotlib")


def require_extra() -> None:
    """Raise ValueError if a library that reports need is missing."""
    if missing := missing_libraries():
        raise ValueError(f"writing a report {missing}")
