"""Tables of docs/drafters.md, generated from the drafters' classes; `nox -s tables` writes them."""

from __future__ import annotations

import re
from typing import Any

from support.pages_of_docs import ROOT

from token_recycling.drafters._listing import drafter
from token_recycling.drafters._registry import drafter_class

PAGE = ROOT / "docs" / "drafters.md"
_OPTIONS = re.compile(r"^<!-- options: (\w+)(?: beyond (\w+))? -->\n(?:\n?\|.*\n)*", re.M)


def listed(name: str) -> dict[str, Any]:
    """Return a drafter's summary and options."""
    return drafter(name, drafter_class(name))


def options(name: str, other: str | None = None) -> str:
    """Return a table of a drafter's options with defaults, after the comment that requests it. Options that an `other`
    drafter has too are omitted.
    """
    shared = [] if other is None else listed(other)["options"]
    comment = f"<!-- options: {name}{f' beyond {other}' if other else ''} -->"
    rows = [comment, "", "| option | meaning |", "|---|---|"]
    rows += [f"| {written(one)} | {one['summary']} |" for one in listed(name)["options"] if one not in shared]
    return "\n".join(rows) + "\n"


def written(option: dict[str, Any]) -> str:
    """Return an option with its default, in the syntax of a drafter specification."""
    default = option["default"]
    if default in ("", "required"):
        return f"`{option['name']}`" + (default and f" ({default})")
    return f"`{option['name']}={default}`"


def with_tables(page: str) -> str:
    """Return the text of the page with current tables."""
    return _OPTIONS.sub(lambda found: options(found[1], found[2]), page)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
