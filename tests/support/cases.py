"""Cases of a test as parameters: some in every run, the others nightly, since they share the code under test."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest


def parameter(*values: Any, every_run: bool, id: str | None = None) -> Any:
    """One case, in every run or nightly."""
    return pytest.param(*values, id=id, marks=[] if every_run else [pytest.mark.nightly])


def paired(*values: Iterable[Any]) -> list[Any]:
    """All combinations of values of several arguments, of which every run has the first values of all, the second ones
    and so on; shorter lists begin again, so that each value is among them.
    """
    lists = [list(one) for one in values]
    every_run = {tuple(place % len(one) for one in lists) for place in range(max(map(len, lists)))}
    return [
        parameter(*(one[place] for one, place in zip(lists, places, strict=True)), every_run=places in every_run)
        for places in product(*(range(len(one)) for one in lists))
    ]


def thinned(
    cases: Iterable[Any],
    every: int = 3,
    kept: Callable[[Any], bool] | None = None,
    ids: Callable[[Any], str] | None = None,
) -> list[Any]:
    """Cases, of which every run has each `every`-th from the first on, or those that `kept` says.

    A tuple has the values of several arguments, as in `pytest.mark.parametrize`.
    """
    return [
        parameter(
            *(one if isinstance(one, tuple) else (one,)),
            every_run=place % every == 0 if kept is None else kept(one),
            id=None if ids is None else ids(one),
        )
        for place, one in enumerate(cases)
    ]
