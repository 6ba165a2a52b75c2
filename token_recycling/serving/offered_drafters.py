"""Drafters that a request for steps may name instead of the server's own: made for that request, with nothing learned.

The operator lists them (`--offer`), each with its options, as `recycling:tree=16`. Where the operator is the only user
(`free_options`), a request may change options too: numbers, switches and words of a fixed set, but no free text, which
may name files and models.

Cost per request: a copy of a drafter that has learned nothing, microseconds.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

from .._util.options import check_known, from_text, kinds_of, options_of, written_options
from ..drafters import _listing as listing
from ..drafters._base import Drafter
from ..drafters._registry import make_drafter
from .errors import ApiError


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
            written, kinds = written_options(spec, chosen.removeprefix(_prefix(spec))), settable(base)
            check_known(base.name, written, kinds)
            changed = {name: from_text(base.name, name, text, kinds[name]) for name, text in written.items()}
            return dataclasses.replace(base, **changed)
        except (ValueError, TypeError) as error:
            raise _refused(str(error)) from error

    def described(self) -> list[dict[str, Any]]:
        """As plain values: the spec of each, its summary, and the options that a request may change."""
        return [{"spec": spec, **_described(drafter, self._free_options)} for spec, drafter in self._drafters.items()]


def settable(drafter: Drafter) -> dict[str, Any]:
    """The options of a drafter that a request may change, by name, each with the type that its values then have: the
    words of a `Literal`, or a switch, or numbers.
    """
    hints, found = typing.get_type_hints(type(drafter)), {}
    for name in options_of(type(drafter)):
        kinds = kinds_of(hints[name])
        closed = [kind for kind in kinds if typing.get_origin(kind) is typing.Literal]
        closed += [kind for kind in (bool, int, float) if kind in kinds]
        if closed:
            found[name] = closed[0]
    return found


def _described(drafter: Drafter, free: bool) -> dict[str, Any]:
    listed, kinds, options = listing.drafter(drafter.name, type(drafter)), settable(drafter), []
    for option in listed["options"] if free else ():
        name = option["name"]
        if name in kinds:
            kind, default = kinds[name], str(getattr(drafter, name))
            words = ["true", "false"] if kind is bool else [str(word) for word in typing.get_args(kind)]
            about = {"name": name, "kind": "choice" if typing.get_args(kind) else kind.__name__}
            about |= {"choices": words or None, "default": default.lower() if kind is bool else default}
            options.append({**about, "summary": option["summary"]})
    return {"summary": listed["summary"], "options": options}


def _prefix(spec: str) -> str:
    """What a spec with further options begins with."""
    return f"{spec}," if ":" in spec else f"{spec}:"


def _refused(message: str) -> ApiError:
    return ApiError(400, message, "invalid_drafter", "drafter")
