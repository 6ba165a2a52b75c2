"""A draft model that is a table: probabilities depend only on the last token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from token_recycling.drafters._shared.graph import Graph, Rules, grow
from token_recycling.trees.draft import Budget

Table = dict[int, dict[int, float]]

FORK = {0: {1: 0.6, 2: 0.4}, 1: {3: 0.9, 4: 0.1}, 2: {3: 0.7, 5: 0.3}, 3: {6: 0.8, 7: 0.2}}
"""0 -> 1 or 2, both -> 3 -> 6 or 7: the two branches meet."""


class TableReader:
    """A `Reader` that takes logits from a table and records its inputs."""

    def __init__(self, table: Table, size: int = 10) -> None:
        self.rows = torch.full((size, size), 1e-9)
        for token, following in table.items():
            for other, probability in following.items():
                self.rows[token, other] = probability
        self.layers: list[list[int]] = []
        self.parents: list[list[int]] = []

    def read(self, text: torch.Tensor) -> torch.Tensor:
        return self.rows[text[-1:]].log()

    def read_layer(self, parents: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        self.layers.append(list(tokens))
        self.parents.append(list(parents))
        return self.rows[list(tokens)].log()


def grown(table: Table, rules: Rules, text: Sequence[int] = (0,), **more: object) -> tuple[Graph, TableReader]:
    reader = TableReader(table)
    budget, vocabulary = more.pop("budget", Budget()), more.pop("vocabulary", 10)
    return grow(reader, torch.tensor(text), rules, budget, vocabulary, **more), reader
