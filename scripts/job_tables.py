"""Write the tables of speedups by job into docs/benchmarks.md, and the README's picture and table, from their rows.

    python scripts/job_tables.py

`make bench-quick RESULTS=docs/results/quick` measures the rows. A test fails if the pages are stale.
"""

from __future__ import annotations

import re
from pathlib import Path

from token_recycling.bench.summary import Comparison, read
from token_recycling.bench.tables import LOOPS, conditions, job_page, job_plot, looping_prompts, method_table

ROOT = Path(__file__).parent.parent
README, PAGE, PICTURE = ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "jobs.svg"
RESULTS = ROOT / "docs" / "results"
JOBS = RESULTS / "quick"
"""Rows of the picture, and of the tables by job."""
METHODS = {"float32": RESULTS / "float32", "bfloat16": RESULTS / "bfloat16"}
"""Rows of the table of methods, by run: a run of `JOBS` with all of them, or folders of their own."""
NAMES = {
    "recycling": "**`recycling`, the default**",
    "cold:recycling": "the same, drafter cold",
    "suffix": "suffix decoding",
    "prompt_lookup_hf:n=10": "prompt lookup of transformers",
    "prompt_lookup": "prompt lookup in this loop",
    "published": "Token Recycling as published, 80 nodes",
    "published:tree=static:8": "Token Recycling as published, 8 nodes",
    "lookahead": "Lookahead",
    "cold:lookahead:window=1,guesses=2,pool_from_prompt=true": "Lookahead, sized for a CPU",
    "assistant:model=models/draft": "draft model of 1M parameters",
    "plain": "this loop without drafts",
}
"""Methods of the README's table, as far as they were measured, in its words."""


def between(marks: str, page: str, text: str) -> str:
    """Return a page with the text between its marks."""
    found = re.compile(rf"(?<=<!-- {marks} -->\n).*?(?=<!-- end of {marks} -->)", re.S)
    assert found.search(page), f"the page has no <!-- {marks} -->"
    return found.sub(lambda _: f"\n{text}\n", page)


def short(markdown: str) -> str:
    """Return tables without the padding of their cells."""
    return re.sub(r"(:?)-{3,}(:?)", r"\1--\2", re.sub(r" {2,}", " ", markdown))


def with_tables(page: str) -> str:
    """Return docs/benchmarks.md with the tables of the rows and their caption."""
    _, _, text = short(str(job_page(read(JOBS)))).partition("\n\n")
    return between("jobs", page, re.sub(r"^## ", "#### ", text, flags=re.M))


def runs() -> dict[str, Comparison]:
    """Return the comparisons of the table of methods, by run."""
    return {name: read(folder, clock="processor").main[0] for name, folder in METHODS.items()}


def with_methods(page: str) -> str:
    """Return the README with the table of methods and its conditions."""
    compared = runs()
    table = method_table(compared, NAMES)
    assert table is not None
    (first, *_) = compared.values()
    left_out = len(looping_prompts(first))
    caption = f"{conditions(first)}; {left_out} whose output loops to {LOOPS:.0%} or more are left out."
    return between("methods", page, f"{short(table.markdown())}\n\n{caption}\n")


def picture() -> bytes:
    """Return the picture of the rows."""
    plot = job_plot(read(JOBS))
    assert plot is not None
    return plot.save(PICTURE.parent).read_bytes()


if __name__ == "__main__":
    for file, filled in ((PAGE, with_tables), (README, with_methods)):
        file.write_text(filled(file.read_text(encoding="utf-8")), encoding="utf-8")
    picture()
