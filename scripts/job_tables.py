"""Write the tables of speedups by job into docs/benchmarks.md, and the README's picture and table, from their rows.

    python scripts/job_tables.py

`make bench-quick RESULTS=docs/results/quick` measures the rows. A test fails if the pages are stale.
"""

from __future__ import annotations

import re
from pathlib import Path

from token_recycling.bench.summary import read
from token_recycling.bench.tables import LOOPS, conditions, job_page, job_plot, looping_prompts, method_table

ROOT = Path(__file__).parent.parent
README, PAGE, PICTURE = ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "jobs.svg"
ROWS = ROOT / "docs" / "results" / "quick"
AGAIN = "same prompt again"
"""A job of which the table of methods has nothing: a drafter that has learned the output need not draft well."""
NAMES = {
    "recycling": "**`recycling`, the default**",
    "cold:recycling": "the same, drafter cold",
    "suffix": "suffix decoding",
    "prompt_lookup_hf:n=10": "prompt lookup of transformers",
    "published:tree=static:8": "Token Recycling as published, 8 nodes",
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
    _, _, text = short(str(job_page(read(ROWS)))).partition("\n\n")
    return between("jobs", page, re.sub(r"^## ", "#### ", text, flags=re.M))


def with_methods(page: str) -> str:
    """Return the README with the table of methods and its conditions."""
    runs = {comparison.run: comparison for comparison in read(ROWS).main}
    first = runs["float32"]
    table = method_table({"float32": first, **runs}, NAMES, without=[AGAIN])
    assert table is not None
    caption = conditions(first)
    if left_out := len(looping_prompts(first)):
        caption += f"; {left_out} whose output loops to {LOOPS:.0%} or more are left out"
    return between("methods", page, f"{short(table.markdown())}\n\n{caption}.\n")


def picture() -> bytes:
    """Return the picture of the rows."""
    plot = job_plot(read(ROWS))
    assert plot is not None
    return plot.save(PICTURE.parent).read_bytes()


if __name__ == "__main__":
    for file, filled in ((PAGE, with_tables), (README, with_methods)):
        file.write_text(filled(file.read_text(encoding="utf-8")), encoding="utf-8")
    picture()
