"""Write the README's table of speedups by job from the rows in docs/results/quick.

    python scripts/readme_table.py

`make bench-quick RESULTS=docs/results/quick` measures the rows and makes the same table. A test fails if it is stale.
"""

from __future__ import annotations

import re
from pathlib import Path

from token_recycling.bench.report.jobs import page
from token_recycling.bench.report.summary import read

ROOT = Path(__file__).parent.parent
README, ROWS = ROOT / "README.md", ROOT / "docs" / "results" / "quick"
_TABLE = re.compile(r"(?<=<!-- jobs -->\n).*?(?=<!-- end -->)", re.S)


def table() -> str:
    """Return the table and its caption, without the padding of cells."""
    _, _, text = str(page(read(ROWS))).partition("\n\n")
    return re.sub(r"(:?)-{3,}(:?)", r"\1--\2", re.sub(r" {2,}", " ", text))


def with_table(readme: str) -> str:
    """Return the README with the table of the rows."""
    return _TABLE.sub(lambda _: f"\n{table()}\n", readme)


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
