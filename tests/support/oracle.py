"""A drafter that knows the output in advance: tests of the later parts of a step need accepted nodes on any tree."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from support.architectures import VOCABULARY

import token_recycling as tr
from token_recycling.drafters._base import SequenceDrafter
from token_recycling.model.target import Target
from token_recycling.trees import templates

TREES = {
    "the paper's": templates.paper(),
    "a chain": templates.chain(4),
    "a random tree": tr.Template(
        (-1, 0, 0, 0, 2, 1, 1, 3, 4, 5, 4, 9, 9, 10), (0, 0, 1, 2, 0, 0, 1, 0, 0, 0, 1, 0, 1, 0)
    ),
}


@dataclass
class Oracle(tr.Drafter):
    """Draft random trees with the true output on a random branch, up to a random depth, and random tokens elsewhere, so
    that accepted nodes are scattered.
    """

    wanted: Sequence[torch.Tensor]
    """Outputs of plain `generate`, prompts included."""

    def start(self, prompt: torch.Tensor, target: Target) -> OracleSequence:
        wanted = next(text for text in self.wanted if text[: len(prompt)].equal(prompt.cpu()))
        return OracleSequence(self, wanted, random.Random(len(prompt)))


class OracleSequence(SequenceDrafter):
    """Drafter state of a sequence with known output."""

    def __init__(self, drafter: Oracle, wanted: torch.Tensor, draws: random.Random) -> None:
        super().__init__(drafter)
        self.wanted, self.random = wanted, draws

    def draft(self, context: tr.Context) -> tr.Draft:
        tree = self.random.choice(list(TREES.values()))
        tokens = torch.tensor([int(context.root), *self.random.choices(range(VOCABULARY), k=len(tree) - 1)])
        branch = self.random.choice([node for node, below in enumerate(tree.children) if not below])
        known = self.wanted[len(context.tokens) :][: self.random.randint(0, tree.depth)]
        for node, token in zip(tree.lineages[branch][1:], known, strict=False):
            tokens[node] = token
        return tr.Draft(tokens, tree.parents)

    def observe(self, step: tr.Step) -> None:
        self.drafter.observe(step)
