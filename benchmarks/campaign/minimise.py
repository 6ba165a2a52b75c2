"""Makes a failing case smaller, one change after another, as long as it fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import fields, replace

from . import dimensions as dim
from .case import Call, Case, DrafterChoice
from .run import Result, run

_TRIES = 3
"""Runs of a case with threads, which may fail now and then."""


def minimised(case: Case, result: Result, seconds: float = 20.0) -> tuple[Case, Result]:
    """The smallest case found in the time that fails like `result`, and how it does."""
    deadline = time.monotonic() + seconds
    tried = {case}
    going = True
    while going:
        going = False
        for candidate in smaller(case):
            if time.monotonic() > deadline:
                return case, result
            if candidate in tried:
                continue
            tried.add(candidate)
            found = _alike(candidate, result)
            if found is not None:
                case, result, going = candidate, found, True
                break
    return case, result


def _alike(case: Case, result: Result) -> Result | None:
    for _ in range(_TRIES if case.threads else 1):
        found = run(case)
        if found.kind == result.kind:
            return found
    return None


def smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less, those that lose much first."""
    for place in range(len(case.calls) if len(case.calls) > 1 else 0):
        calls = [*case.calls[:place], *case.calls[place + 1 :]]
        yield replace(case, calls=(replace(calls[0], continues=False), *calls[1:]))
    for field in fields(case):
        if field.name != "calls" and getattr(case, field.name) != field.default:
            yield replace(case, **{field.name: field.default})
    for drafter in _simpler(case.drafter):
        yield replace(case, drafter=drafter)
    for place, call in enumerate(case.calls):
        for one in _shorter(call):
            yield replace(case, calls=(*case.calls[:place], one, *case.calls[place + 1 :]))


def _simpler(drafter: DrafterChoice) -> Iterator[DrafterChoice]:
    yield from drafter.parts
    if len(drafter.parts) > 2:
        for place in range(len(drafter.parts)):
            yield replace(drafter, parts=drafter.parts[:place] + drafter.parts[place + 1 :])
    for place, part in enumerate(drafter.parts):
        for one in (DrafterChoice(), DrafterChoice("suffix", ()), *_simpler(part)):
            yield replace(drafter, parts=(*drafter.parts[:place], one, *drafter.parts[place + 1 :]))
    needed = {name for required in dim.REQUIRED.get(drafter.name, []) for name in required} | {"seed"}
    for option in drafter.options:
        if option[0] not in needed:
            yield replace(drafter, options=tuple(one for one in drafter.options if one != option))


def _shorter(call: Call) -> Iterator[Call]:
    for option in call.options:
        yield replace(call, options=tuple(one for one in call.options if one != option))
    for field in ("event", "choice", "continues", "masked", "spare"):
        default = Call.__dataclass_fields__[field].default
        if getattr(call, field) != default:
            yield replace(call, **{field: default})
    for place in range(len(call.rows) if len(call.rows) > 1 and not call.continues else 0):
        yield replace(call, rows=call.rows[:place] + call.rows[place + 1 :])
    for new in (1, call.new // 2, call.new - 1):
        if 0 < new < call.new:
            yield replace(call, new=new)
    for rows in (
        [row[len(row) // 2 :] for row in call.rows],
        [row[: len(row) - len(row) // 2] for row in call.rows],
        [row[1:] or row for row in call.rows],
        [(1,) * len(row) for row in call.rows],
    ):
        yield replace(call, rows=tuple(rows))
