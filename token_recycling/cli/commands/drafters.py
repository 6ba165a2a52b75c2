"""`token-recycling drafters`: all drafters with their options."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

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
    """List the drafters and their options, as --drafter NAME:OPTION=VALUE,... takes them."""
    for name in names or ():
        check_name(name)
    with console.working("looking for drafters"):
        from ...drafters import _listing as listing

        found = listing.drafters(names)
    if as_json:
        console.print_json({"drafters": found})
    else:
        console.print_drafters(Console(), found)
