"""Write the tables of speedups by job into docs/benchmarks.md, and the README's picture, from docs/results/quick.

    python scripts/job_tables.py

`make bench-quick RESULTS=docs/results/quick` measures the rows and makes the same. A test fails if these are stale.
"""

from __future__ import annotations

import re
from pathlib import Path

from token_recycling.bench.summary import read
from token_recycling.bench.tables import job_page, job_plot

ROOT = Path(__file__).parent.parent
PAGE, PICTURE, ROWS = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "jobs.svg", ROOT / "docs" / "results" / "quick"
_TABLES = re.compile(r"(?<=<!-- jobs -->\n).*?(?=<!-- end of jobs -->)", re.S)


def tables() -> str:
    """Return the tables and their caption below headings of the page, without the padding of cells."""
    _, _, text = str(job_page(read(ROWS))).partition("\n\n")
    text = re.sub(r"(:?)-{3,}(:?)", r"\1--\2", re.sub(r" {2,}", " ", text))
    return re.sub(r"^## ", "#### ", text, flags=re.M)


def with_tables(page: str) -> str:
    """Return the page with the tables of the rows."""
    return _TABLES.sub(lambda _: f"\n{tables()}\n", page)


def picture() -> bytes:
    """Return the picture of the rows."""
    plot = job_plot(read(ROWS))
    assert plot is not None
    return plot.save(PICTURE.parent).read_bytes()


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    picture()
