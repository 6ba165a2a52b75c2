"""Best-first growth of a tree whose nodes are discovered during growth (Sequoia, 2402.12374, section 4.1; EAGLE-2).

If a node's value is the product of the probabilities along its path, the first n nodes are the tree of n nodes with the
most expected accepted tokens. Static trees, unrolled graphs and trees within a grammar grow by this function; the
compiled code of `recycling.recycler` does the same on arrays. Cost: a heap entry per candidate.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import TypeVar

T = TypeVar("T")


def best_first(children: Callable[[int], Iterable[tuple[float, T]]]) -> Iterator[tuple[int, float, T]]:
    """Yield the parent, value and candidate of each node, the most valuable candidate first, ties in order of
    insertion.

    Nodes are numbered in this order; the root is 0. `children(node)` returns the values and candidates after a node; it
    is called once, after the caller has consumed that node.
    """
    waiting: list[tuple[float, int, int, T]] = []
    order = count()
    for node in count():
        for value, candidate in children(node):
            heapq.heappush(waiting, (-value, next(order), node, candidate))
        if not waiting:
            return
        less, _, parent, best = heapq.heappop(waiting)
        yield parent, -less, best
