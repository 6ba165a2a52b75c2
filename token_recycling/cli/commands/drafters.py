"""`token-recycling drafters`: what there is to choose from."""

from __future__ import annotations

from rich.console import Console

from .. import console
from ..options import Json


def drafters(as_json: Json = False) -> None:
    """Lists the drafters and their options, as --drafter NAME:OPTION=VALUE,... takes them."""
    with console.working("looking for drafters"):
        from ...drafters import _listing as listing

        found = listing.drafters()
    if as_json:
        console.print_json({"drafters": found})
    else:
        console.print_drafters(Console(), found)
