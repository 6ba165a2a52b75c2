"""Write the README's table of speedups by job from the rows in docs/results/quick.

    python scripts/readme_table.py

`make bench-quick RESULTS=docs/results/quick` measures the rows. A test fails if the table is stale.
"""

from __future__ import annotations

import re
from pathlib import Path

from token_recycling.bench.report import arithmetic
from token_recycling.bench.report.summary import Comparison, read

ROOT = Path(__file__).parent.parent
README, ROWS = ROOT / "README.md", ROOT / "docs" / "results" / "quick"
_TABLE = re.compile(r"(?<=<!-- jobs -->\n).*?(?=<!-- end -->)", re.S)
LOOKUP, PLAIN, COLD, WARM = "prompt_lookup_hf:n=10", "plain", "cold:recycling", "recycling"
_INVALID = "JSON by schema", "tool calls"
"""Where outputs of transformers' prompt lookup break the grammar, so that their speed means nothing."""
_PREPACKED = "chat"


def cells(found: Comparison, category: str) -> list[str]:
    """Speedups of prompt lookup, cold and warm."""
    of = found.by_category["speedup"]
    lookup = "invalid" if category in _INVALID else f"{of[category, LOOKUP]:.2f}"
    return [lookup, f"{of[category, COLD]:.2f}", f"{of[category, WARM]:.2f}"]


def table() -> str:
    """Markdown: one line per job, float32 and bfloat16 next to each other."""
    runs = {one.run: one for one in read(ROWS).main}
    both = runs["float32"], runs["bfloat16"]
    lines = [
        "| speedup over `generate` | float32: lookup | cold | warm | bfloat16: lookup | cold | warm |",
        "|---|---|---|---|---|---|---|",
    ]
    for category in both[0].categories:
        lines.append(_line(category, [cell for one in both for cell in cells(one, category)]))
        last = [arithmetic.last_turns(one.rows, str(one.baseline)) for one in both]
        if (category, WARM) in last[0]:
            figures = [f"{one[category, method]:.2f}" for one in last for method in (LOOKUP, COLD, WARM)]
            lines.append(_line("its time to first token, last turn", figures))
    between = []
    for one in both:
        between.append("")
        for method in (COLD, WARM):
            low, high = arithmetic.interval(one.pairs_of(method))
            between.append(f"**{one.figures['speedup'][method]:.2f}** ({low:.2f} to {high:.2f})")
    lines.append(_line("all, with 95% CI", between))
    plain = [f"{one.by_category['speedup'][_PREPACKED, PLAIN]:.2f}" for one in both]
    lines.append(_line("prepacked weights alone, no drafts (chat)", ["", plain[0], "", "", plain[1], ""]))
    return "\n".join(lines)


def _line(head: str, figures: list[str]) -> str:
    return f"| {head} | {' | '.join(figures)} |"


def with_table(page: str) -> str:
    """The README with the table as it should be."""
    return _TABLE.sub(lambda _: f"\n{table()}\n\n", page)


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
