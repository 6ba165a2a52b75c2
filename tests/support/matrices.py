"""Matrices with given rows, and trees grown from them."""

from __future__ import annotations

import numpy as np
import pytest

from token_recycling import Template
from token_recycling.costs import NO_COSTS
from token_recycling.recycling.ngram_matrix import NgramMatrix
from token_recycling.recycling.ngrams import ABSENT
from token_recycling.recycling.recycler import Recycler

DEEP = 99


def learn(matrix: NgramMatrix, *rows: tuple[list[int], dict[int, float]]) -> None:
    """Learn rows, each from the tokens of a text so far (newest last) and the candidates after it."""
    ngrams = np.full((len(rows), matrix.orders), ABSENT, np.int64)
    for place, (tokens, _) in enumerate(rows):
        newest_first = tokens[::-1][: matrix.orders]
        ngrams[place, : len(newest_first)] = newest_first
    candidates = np.array([list(found) for _, found in rows], np.int32)
    shares = np.array([list(found.values()) for _, found in rows], np.float32)
    matrix.learn(ngrams, candidates, shares)


class Grower:
    """A matrix, a text and the last grown tree."""

    growing: np.ndarray

    def __init__(self, matrix: NgramMatrix, text: list[int], suffix: bool = False) -> None:
        self.matrix, self.tokens = matrix, np.array(text)
        self._suffix = suffix

    def grow(
        self, nodes: int, depth: int = DEEP, costs: np.ndarray = NO_COSTS, template: Template | None = None
    ) -> int:
        recycler = Recycler(self.matrix, self.tokens, nodes, suffix=self._suffix, template=template)
        self._recycler, self.growing = recycler, recycler.draft(self.tokens, depth, costs)
        return len(self.growing)

    def grow_for(self, costs: list[float], depth: int = DEEP) -> int:
        return self.grow(len(costs) - 1, depth, np.array(costs, np.float64))

    def fill(self, paths: str, depth: int = DEEP) -> int:
        tree = Template.from_paths(tuple(map(int, path)) for path in paths.split())
        return self.grow(len(tree) - 1, depth, template=tree)

    def paths(self, nodes: int) -> list[tuple[int, ...]]:
        """Return the tokens from the root, exclusive, to each node."""
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, nodes):
            paths.append((*paths[self.growing["parent"][node]], int(self.growing["token"][node])))
        return paths[1:]

    def count(self, chosen: list[int] | np.ndarray) -> None:
        """Record the tokens that the target chose after the root of the last grown tree."""
        self._recycler.observe(list(chosen), ends=True)

    def children(self, node: int = 0) -> dict[int, float]:
        """Return the candidates after a node with their estimated probabilities."""
        count = self.growing["count"][node]
        columns = (self.growing[name][node, :count] for name in ("candidates", "probabilities"))
        return {int(token): float(probability) for token, probability in zip(*columns, strict=True)}


def matrix_of(
    rows: dict[tuple[int, ...], dict[int, float]], vocab_size: int = 40, orders: int = 1, history: int = 0
) -> NgramMatrix:
    """Return a matrix with exactly these rows: contexts (newest token last) and their candidates."""
    k = max(map(len, rows.values()), default=1)
    matrix = NgramMatrix(vocab_size, k, orders, memory=0.1, history=history)
    for context, row in sorted(rows.items(), key=lambda item: -len(item[0])):
        # A row with fewer candidates is padded with ids of probability 0.
        spare = [token for token in range(vocab_size) if token not in row][: k - len(row)]
        newest_first = np.full((1, orders), ABSENT, np.int64)
        newest_first[0, : len(context)] = context[::-1]
        ids, shares = [*row, *spare], [*row.values(), *[0.0] * len(spare)]
        matrix.learn(newest_first, np.array([ids], np.int32), np.array([shares], np.float32))
    return matrix


def close(row: dict[int, float], wanted: dict[int, float]) -> None:
    assert list(row) == list(wanted)
    assert list(row.values()) == pytest.approx(list(wanted.values()), abs=1e-4)
