"""`token-recycling drafters`: list all drafters with their options."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...drafters._registry import check_name
from .. import console
from ..options import Json, completed_drafters


def drafters(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAMES]...", autocompletion=completed_drafters, help="Drafters to list; default all of them."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the drafters and their options, for use as --drafter NAME:OPTION=VALUE,..."""
    for name in names or ():
        check_name(name)
    with console.working("looking for drafters"):
        from ...drafters import _listing as listing

        listed = listing.drafters(names)
    if as_json:
        console.print_json({"drafters": listed})
    else:
        _print(Console(), listed)


def _print(out: Console, drafters: Iterable[dict[str, Any]]) -> None:
    """Print every drafter with a table of its options."""
    for drafter in drafters:
        out.print(Text.assemble((drafter["name"], "bold"), f"  {drafter['summary']}"), soft_wrap=True)
        if drafter["options"]:
            table = Table("option", "type", "default", "what it does")
            for option in drafter["options"]:
                table.add_row(*(Text(option[column]) for column in ("name", "type", "default", "summary")))
            out.print(table)
