"""Drafters that a request for steps may name instead of the server's own: made for that request, with nothing learned.

The operator lists them (`--offer`), each with its options, as `recycling:tree=16`. Where the operator is the only user
(`free_options`), a request may change options too: numbers, switches and words of a fixed set, but no free text, which
may name files and models.

Cost per request: a copy of a drafter that has learned nothing, microseconds.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from ..drafters import _listing as listing
from ..drafters._base import Drafter
from ..drafters._registry import make_drafter, written_options
from .errors import ApiError

DEFAULT_OFFERS = ("recycling", "published", "suffix", "prompt_lookup", "lookahead")


class OfferedDrafters:
    """The drafters that requests may choose, by their specs."""

    def __init__(self, specs: Sequence[str], free_options: bool = False) -> None:
        """Raises ValueError for a drafter that cannot be made. `free_options`: requests may change options."""
        self._drafters = {spec: make_drafter(spec) for spec in specs}
        self._free_options = free_options

    def make(self, chosen: str) -> Drafter:
        """A new drafter as a request names it: as it is offered, or with other options; raises ApiError."""
        if chosen in self._drafters:
            return self._drafters[chosen].fork()
        spec = max((spec for spec in self._drafters if chosen.startswith(_prefix(spec))), key=len, default=None)
        if spec is None:
            names = ", ".join(("accelerated", "anew", "plain", *self._drafters))
            raise _refused(f"expected a drafter of {names}, got {chosen!r}")
        if not self._free_options:
            raise _refused(f"expected {spec!r} as it is, got {chosen!r}: this server leaves no options to requests")
        base: Any = self._drafters[spec]
        try:
            written = written_options(spec, chosen.removeprefix(_prefix(spec)))
            known = settable(base)
            return dataclasses.replace(base, **{name: _value(known, name, text) for name, text in written.items()})
        except (ValueError, TypeError) as error:
            raise _refused(str(error)) from error

    def described(self) -> list[dict[str, Any]]:
        """As plain values: the spec of each, its summary, and the options that a request may change."""
        return [
            {
                "spec": spec,
                "summary": listing.drafter(drafter.name, type(drafter))["summary"],
                "options": list(settable(drafter).values()) if self._free_options else [],
            }
            for spec, drafter in self._drafters.items()
        ]


def settable(drafter: Drafter) -> dict[str, dict[str, Any]]:
    """The options of a drafter that a request may change, by name; their defaults are the values in `drafter`."""
    hints, found = typing.get_type_hints(type(drafter)), {}
    for option in listing.drafter(drafter.name, type(drafter))["options"]:
        name = option["name"]
        kind, choices = _kind(hints[name])
        if kind is not None:
            default = str(getattr(drafter, name))
            default = default.lower() if kind == "bool" else default
            about = {"name": name, "kind": kind, "choices": choices, "default": default}
            found[name] = {**about, "summary": option["summary"]}
    return found


def _kind(hint: Any) -> tuple[str | None, list[str] | None]:
    """How values of a type are written: int, float, bool or choice, and the words of a choice; None for free text."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    for kind in kinds:
        if typing.get_origin(kind) is typing.Literal:
            return "choice", [str(word) for word in typing.get_args(kind)]
    if bool in kinds:
        return "bool", ["true", "false"]
    return next((kind.__name__ for kind in (int, float) if kind in kinds), None), None


def _value(known: dict[str, dict[str, Any]], name: str, text: str) -> Any:
    """The value that a request gives to that option; raises ValueError if it may not."""
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


def _prefix(spec: str) -> str:
    """What a spec with further options begins with."""
    return f"{spec}," if ":" in spec else f"{spec}:"


def _refused(message: str) -> ApiError:
    return ApiError(400, message, "invalid_drafter", "drafter")
