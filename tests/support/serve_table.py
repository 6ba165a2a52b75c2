"""The table of the options of `serve` in docs/serving.md, made from the command; `nox -s tables` writes it."""

from __future__ import annotations

import re

import typer
from support.pages_of_docs import ROOT

from token_recycling.cli.app import app

PAGE = ROOT / "docs" / "serving.md"
_TABLE = re.compile(r"^<!-- options of serve -->\n(?:\n?\|.*\n)*", re.M)
_SHARED = {"drafter", "dtype", "device", "device_map", "threads", "prepack"}
"""Options of other commands too."""


def table() -> str:
    """The table, below the comment that asks for it."""
    command = typer.main.get_command(app).commands["serve"]
    rows = ["<!-- options of serve -->", "", "| option | default | meaning |", "|---|---|---|"]
    for option in command.params:
        if option.name in _SHARED or not option.opts[0].startswith("-"):
            continue
        default = "" if option.default in (None, (), []) else option.default
        if option.is_flag:
            default = "off"
        elif isinstance(default, float):
            default = f"{default:g}"
        help_ = option.help.replace("|", "\\|")
        rows.append(f"| `{option.opts[0]}` | {getattr(default, 'value', default)} | {help_} |")
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    """The text of the page with the table as it should be."""
    return _TABLE.sub(lambda found: table(), page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
