"""Drafters that a request for steps may name instead of the server's own: made for that request, with nothing learned.

The operator says which (`--offer`), each with its options, as `recycling:tree=16`. Where the one who asks is the one
who serves (`free`), a request may change options too: numbers, switches and words of a fixed set, but no texts, since
these name files and models.

Cost per request: a copy of a drafter that has learned nothing, microseconds.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from .. import listing
from ..drafter import Drafter
from ..registry import make_drafter, written_options
from .errors import ApiError

DEFAULT = ("recycling", "published", "suffix", "prompt_lookup", "lookahead")
"""Offered where nobody says."""


class Offers:
    """The drafters that are offered, by their texts."""

    def __init__(self, offered: Sequence[str], free: bool = False) -> None:
        """Raises ValueError for a drafter that cannot be made. `free`: requests may change options."""
        self._made = {spec: make_drafter(spec) for spec in offered}
        self._free = free

    def make(self, asked: str) -> Drafter:
        """The drafter that a request names, anew: as it is offered, or with other options; raises ApiError."""
        if asked in self._made:
            return self._made[asked].fork()
        spec = max((spec for spec in self._made if asked.startswith(_open(spec))), key=len, default=None)
        if spec is None:
            names = ", ".join(("accelerated", "plain", *self._made))
            raise _refused(f"expected a drafter of {names}, got {asked!r}")
        if not self._free:
            raise _refused(f"expected {spec!r} as it is, got {asked!r}: this server leaves no options to requests")
        base: Any = self._made[spec]
        try:
            written = written_options(spec, asked.removeprefix(_open(spec)))
            known = settable(base)
            return dataclasses.replace(base, **{name: _value(known, name, text) for name, text in written.items()})
        except (ValueError, TypeError) as error:
            raise _refused(str(error)) from error

    def described(self) -> list[dict[str, Any]]:
        """As plain values, the text of each, what it does, and the options that a request may change."""
        return [
            {
                "spec": spec,
                "summary": listing.drafter(made.name, type(made))["summary"],
                "options": list(settable(made).values()) if self._free else [],
            }
            for spec, made in self._made.items()
        ]


def settable(made: Drafter) -> dict[str, dict[str, Any]]:
    """The options of a drafter that a request may change, by name, with the values that `made` has as defaults."""
    hints, found = typing.get_type_hints(type(made)), {}
    for option in listing.drafter(made.name, type(made))["options"]:
        name = option["name"]
        kind, choices = _kind(hints[name])
        if kind is not None:
            default = str(getattr(made, name))
            default = default.lower() if kind == "bool" else default
            about = {"name": name, "kind": kind, "choices": choices, "default": default}
            found[name] = {**about, "summary": option["summary"]}
    return found


def _kind(hint: Any) -> tuple[str | None, list[str] | None]:
    """How values of a type are written: int, float, bool or choice, and the words there are; None for texts alone."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    for kind in kinds:
        if typing.get_origin(kind) is typing.Literal:
            return "choice", [str(word) for word in typing.get_args(kind)]
    if bool in kinds:
        return "bool", ["true", "false"]
    return next((kind.__name__ for kind in (int, float) if kind in kinds), None), None


def _value(known: dict[str, dict[str, Any]], name: str, text: str) -> Any:
    """What a request sets that option to; raises ValueError if it may not."""
    option = known.get(name)
    if option is None:
        raise ValueError(f"expected an option of {', '.join(known) or '(there is none)'}, got {name!r}")
    if option["choices"] is not None and text not in option["choices"]:
        raise ValueError(f"expected {' or '.join(option['choices'])} for {name}, got {text!r}")
    read: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": "true".__eq__, "choice": str}
    try:
        return read[option["kind"]](text)
    except ValueError:
        expected = "a whole number" if option["kind"] == "int" else "a number"
        raise ValueError(f"expected {expected} for {name}, got {text!r}") from None


def _open(spec: str) -> str:
    """What a text with further options begins with."""
    return f"{spec}," if ":" in spec else f"{spec}:"


def _refused(message: str) -> ApiError:
    return ApiError(400, message, "invalid_drafter", "drafter")
