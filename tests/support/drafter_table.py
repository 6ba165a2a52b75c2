"""The tables of docs/drafters.md, made from the drafters' classes; `make drafter-table` writes them."""

from __future__ import annotations

import re
from typing import Any

from support.pages_of_docs import ROOT

from token_recycling.drafters._listing import drafter
from token_recycling.drafters._registry import drafter_class, own_names

PAGE = ROOT / "docs" / "drafters.md"
_OVERVIEW = re.compile(r"^\| drafter \|.*\n(?:\|.*\n)+", re.M)
_OPTIONS = re.compile(r"^<!-- options: (\w+) -->\n(?:\n?\|.*\n)*", re.M)


def listed(name: str) -> dict[str, Any]:
    """A drafter's summary and options."""
    return drafter(name, drafter_class(name))


def overview() -> str:
    """One row for each drafter of the package: its name, its summary, its required options."""
    rows = ["| drafter | | needs |", "|---|---|---|"]
    for name in own_names():
        needs = ", ".join(f"`{one['name']}`" for one in listed(name)["options"] if one["default"] == "required")
        rows.append(f"| [{name}](#{name}) | {listed(name)['summary']} | {needs} |")
    return "\n".join(rows) + "\n"


def options(name: str) -> str:
    """A table of a drafter's options, with defaults, below the comment that asks for it."""
    rows = [f"<!-- options: {name} -->", "", "| option | default | meaning |", "|---|---|---|"]
    rows += [f"| `{one['name']}` | {one['default']} | {one['summary']} |" for one in listed(name)["options"]]
    return "\n".join(rows) + "\n"


def with_tables(page: str) -> str:
    """The text of the page with the tables as they should be."""
    page = _OVERVIEW.sub(lambda _: overview(), page, count=1)
    return _OPTIONS.sub(lambda found: options(found[1]), page)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
