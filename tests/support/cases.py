"""Test cases as parameters: some in every run; the others, which exercise the same code, nightly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest


def parameter(*values: Any, every_run: bool, id: str | None = None) -> Any:
    """Return one case, in every run or nightly."""
    return pytest.param(*values, id=id, marks=[] if every_run else [pytest.mark.nightly])


def paired(*values: Iterable[Any]) -> list[Any]:
    """Return all combinations of the arguments' values. Every run has the first values of all arguments, the second
    values and so on, with shorter lists repeated, so that each value occurs; the other combinations are nightly.
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
    """Return cases; every run has each `every`-th from the first on, or those for which `kept` is true.

    A tuple holds the values of several arguments, as in `pytest.mark.parametrize`.
    """
    return [
        parameter(
            *(one if isinstance(one, tuple) else (one,)),
            every_run=place % every == 0 if kept is None else kept(one),
            id=None if ids is None else ids(one),
        )
        for place, one in enumerate(cases)
    ]
