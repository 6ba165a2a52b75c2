"""The tables of docs/drafters.md, made from the drafters' classes; `nox -s tables` writes them."""

from __future__ import annotations

import re
from typing import Any

from support.pages_of_docs import ROOT

from token_recycling.drafters._listing import drafter
from token_recycling.drafters._registry import drafter_class

PAGE = ROOT / "docs" / "drafters.md"
_OPTIONS = re.compile(r"^<!-- options: (\w+)(?: beyond (\w+))? -->\n(?:\n?\|.*\n)*", re.M)


def listed(name: str) -> dict[str, Any]:
    """A drafter's summary and options."""
    return drafter(name, drafter_class(name))


def options(name: str, other: str | None = None) -> str:
    """A table of a drafter's options, with defaults, below the comment that asks for it; without those that an `other`
    drafter has too.
    """
    shared = [] if other is None else listed(other)["options"]
    comment = f"<!-- options: {name}{f' beyond {other}' if other else ''} -->"
    rows = [comment, "", "| option | meaning |", "|---|---|"]
    rows += [f"| {written(one)} | {one['summary']} |" for one in listed(name)["options"] if one not in shared]
    return "\n".join(rows) + "\n"


def written(option: dict[str, Any]) -> str:
    """An option with its default, as it is written after the name of a drafter."""
    default = option["default"]
    if default in ("", "required"):
        return f"`{option['name']}`" + (default and f" ({default})")
    return f"`{option['name']}={default}`"


def with_tables(page: str) -> str:
    """The text of the page with the tables as they should be."""
    return _OPTIONS.sub(lambda found: options(found[1], found[2]), page)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
