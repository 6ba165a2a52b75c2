"""The table of drafters in docs/drafters.md, made from their classes; `make drafter-table` writes it."""

from __future__ import annotations

import re

from support.pages_of_docs import ROOT

from token_recycling.drafters._listing import drafter
from token_recycling.drafters._registry import drafter_class, own_names

PAGE = ROOT / "docs" / "drafters.md"
_TABLE = re.compile(r"^\| drafter \|.*\n(?:\|.*\n)+", re.M)


def table() -> str:
    """One row for each drafter of the package: its name, linked if it has a page, its summary, its required options."""
    rows = ["| drafter | | needs |", "|---|---|---|"]
    for name in own_names():
        found = drafter(name, drafter_class(name))
        needs = ", ".join(f"`{option['name']}`" for option in found["options"] if option["default"] == "required")
        page = PAGE.parent / "drafters" / f"{name}.md"
        shown = f"[{name}](drafters/{name}.md)" if page.exists() else f"`{name}`"
        rows.append(f"| {shown} | {found['summary']} | {needs} |")
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    """The text of the page with the table as it should be."""
    return _TABLE.sub(lambda _: table(), page, count=1)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
