"""Drafters and methods as a user writes them: `NAME:OPTION=VALUE,...`.

What stands in parentheses belongs together: a value may hold commas and more options there.
"""

from __future__ import annotations

import re


def split(text: str, sign: str) -> list[str]:
    """The pieces of `text` between the places where `sign`, one character, stands in no parentheses; raises ValueError
    for parentheses without their other half.
    """
    pieces, open_at = [""], 0
    for character in text:
        open_at += (character == "(") - (character == ")")
        if open_at < 0:
            break
        if character == sign and not open_at:
            pieces.append("")
        else:
            pieces[-1] += character
    if open_at:
        raise ValueError(f"expected as many '(' as ')', each before its ')', got {text!r}")
    return pieces


def options(name: str, text: str, unnamed: str = "") -> dict[str, str]:
    """The options written after `name`, as text; raises ValueError.

    `unnamed` is the option whose name may be left out, empty if there is none.
    """
    written = {}
    for piece in filter(None, split(text, ",")):
        option, *values = split(piece, "=")
        if values and not option.isidentifier():
            raise ValueError(
                f"expected NAME=VALUE among the options of {name!r}, got {piece!r}; "
                "options of a part of it stand in parentheses"
            )
        if not values and unnamed and unnamed not in written:
            option, values = unnamed, [piece]
        if not values:
            raise ValueError(f"expected options as NAME=VALUE after {name!r}, got {piece!r}")
        if option in written:
            raise ValueError(f"expected every option of {name} once, got {option} twice")
        written[option] = "=".join(values)
    return written


def call(text: str) -> tuple[str, str]:
    """The name and the options of `NAME` or `NAME(OPTIONS)`; raises ValueError."""
    found = re.fullmatch(r"([^():,=]+)(?:\((.*)\))?", text.strip(), re.DOTALL)
    if found is None:
        raise ValueError(f"expected NAME or NAME(OPTION=VALUE,...), got {text!r}")
    return found[1], found[2] or ""
