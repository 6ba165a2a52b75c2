"""Lookahead decoding (Fu et al., 2402.02057): the target guesses later tokens by Jacobi iteration while it decodes.

A window of W columns and N - 1 levels contains guesses at future tokens: column i of level l is the guess of the l-th
iteration for the position i + l after the root. Every step computes a new level from the last one, collects one n-gram
per column, and drops the oldest level; the window moves on by one position. A pool keeps, for each token, the G most
recent n-grams that start with it; those of the newest token are verified in the same forward pass.

The published mask is a tree. A cell attends to the sequence, to level 0 up to its own column, and to its column up to
its own level. So its parent is the cell of the preceding level and position; for a cell of level 0, the cell to its
left, column 0 of level 0 being the root. An n-gram of the pool is a branch of the root. A window cell may be accepted
like any node, if its path is what the target emits.

Cost per step: W (N - 1) - 1 + G (N - 1) nodes, 55 with the published sizes, fewer where branches coincide.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from ..model.target import Target
from ..trees.draft import Context, Draft, DraftBuilder, Step
from ._base import Drafter, DrafterTraits, SequenceDrafter, check_at_least

Ngram = tuple[int, ...]
_MOST_NODES = 1024
"""Maximum nodes of a draft: mask and logits take memory for each."""


@dataclass
class Lookahead(Drafter):
    """Drafts n-grams collected from the target's own guesses at later positions."""

    window: int = 7
    """W: positions guessed in parallel."""
    ngram_size: int = 5
    """N: tokens of an n-gram, of which N - 1 are drafted; the window has N - 1 levels."""
    guesses: int = 7
    """G: n-grams kept per token, and drafted after it."""
    pool_from_prompt: bool = False
    """Add the n-grams of prompt and output to the pool."""

    def __post_init__(self) -> None:
        check_at_least(1, self, "window", "guesses")
        check_at_least(2, self, "ngram_size")
        nodes = (self.window + self.guesses) * (self.ngram_size - 1)
        if nodes > _MOST_NODES:
            raise ValueError(f"(window + guesses) * (ngram_size - 1) must be <= {_MOST_NODES} nodes, got {nodes}")

    @property
    def traits(self) -> DrafterTraits:
        return DrafterTraits(on_host=True, reproducible=True)

    def start(self, prompt: torch.Tensor, target: Target) -> LookaheadSequence:
        return LookaheadSequence(self, prompt.tolist())

    def describe(self) -> str:
        more = ", plus those of the sequence" if self.pool_from_prompt else ""
        return f"lookahead: window {self.window}, n-grams of {self.ngram_size}, at most {self.guesses} guesses{more}"


class LookaheadSequence(SequenceDrafter):
    """The window and the pool of one sequence."""

    drafter: Lookahead

    def __init__(self, drafter: Lookahead, prompt: list[int]) -> None:
        super().__init__(drafter)
        # Level 0 starts with prompt tokens sampled by a separate generator: drafts are the same in every run, and no
        # random number of the output is consumed.
        columns = drafter.window + drafter.ngram_size - 3
        self.pool = Pool(drafter.guesses)
        self._window = Window(drafter.ngram_size, random.Random(0).choices(prompt, k=columns))
        self._learned = 0
        """Start of the first n-gram of the sequence that is not in the pool yet."""
        self._draft: Draft | None = None

    def draft(self, context: Context) -> Draft:
        if self.drafter.pool_from_prompt:
            size = self.drafter.ngram_size
            self.pool.learn(context.tokens[self._learned :].tolist(), size)
            self._learned = max(self._learned, len(context.tokens) - size + 1)
        root = int(context.root)
        grown = DraftBuilder(root)
        self._window.add_guesses(grown, self.pool.guesses(root))
        self._draft = replace(grown.draft(), needed=frozenset(self._window.newest))
        return self._draft

    def observe(self, step: Step) -> None:
        draft, self._draft = self._draft, None
        if draft is None or step.finished:
            return
        places, newest = draft.places_in(step.draft), self._window.newest
        nodes = [place for place in (places[node] for node in newest) if place is not None]
        # Cut at the length limit, or dropped by a fused drafter.
        if len(nodes) < len(newest):
            return
        for gram in self._window.advance(_choices(step.logits, nodes)):
            self.pool.add(gram)


def _choices(logits: torch.Tensor, nodes: list[int]) -> list[int]:
    """Return the argmax of the logits at each of `nodes`."""
    own = logits[nodes]  # on a CPU numpy takes a tenth of torch's time
    choices: list[int] = (own.float().numpy() if own.device.type == "cpu" else own).argmax(-1).tolist()
    return choices


class Pool:
    """The n-grams seen most recently after each token: at most `most`, without the token itself."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._grams: dict[int, dict[Ngram, None]] = {}

    def add(self, gram: Ngram) -> None:
        """Add `gram`, its first token included; a full pool drops the least recently seen one."""
        grams = self._grams.setdefault(gram[0], {})
        grams.pop(gram[1:], None)
        grams[gram[1:]] = None
        if len(grams) > self.most:
            del grams[next(iter(grams))]

    def learn(self, tokens: list[int], size: int) -> None:
        """Add all n-grams of `size` tokens of a sequence."""
        for end in range(size, len(tokens) + 1):
            self.add(tuple(tokens[end - size : end]))

    def guesses(self, token: int) -> list[Ngram]:
        """Return the n-grams after `token`, most recently seen first."""
        return list(reversed(self._grams.get(token, {})))


class Window:
    """The last N - 1 Jacobi iterations, and the draft nodes of their cells."""

    def __init__(self, ngram_size: int, first: Iterable[int]) -> None:
        """`first`: guesses at the tokens after the root, columns + ngram_size - 3 of them.

        Until all levels exist, no n-gram is complete and no level is dropped. So level 0 is initially longer by as many
        tokens, since the window moves by one position per step.
        """
        self.levels = [[0, *first]]
        """Tokens by level and column; the first token is the root."""
        self._full = ngram_size - 1
        self.newest: list[int] = []
        """Nodes of the newest level, by column."""

    def add_guesses(self, draft: DraftBuilder, guesses: Sequence[Ngram]) -> None:
        """Add all guesses, those of the pool first, as children of their predecessors."""
        self.levels[0][0] = draft.tokens[0]
        ends, above = [0] * len(guesses), [[0] * len(level) for level in self.levels]
        columns, deepest = len(self.levels[0]), len(self.levels[0]) + len(self.levels) - 2
        for depth in range(1, max([deepest, *map(len, guesses)]) + 1):
            for place, guess in enumerate(guesses):
                if depth <= len(guess):
                    ends[place] = draft.add(ends[place], guess[depth - 1])
            for level in range(max(0, depth - columns + 1), min(depth + 1, len(self.levels))):
                column = depth - level
                parent = above[level - 1][column] if level else above[0][column - 1]
                above[level][column] = draft.add(parent, self.levels[level][column])
        self.newest = above[-1]

    def advance(self, choices: list[int]) -> list[Ngram]:
        """Append the target's choices after the newest level as the next level; return the completed n-grams."""
        if len(self.levels) < self._full:
            self.levels = [level[1:] for level in [*self.levels, choices]]
            return []
        grams = list(zip(*self.levels, choices, strict=True))
        self.levels = [*self.levels[1:], choices]
        return grams
