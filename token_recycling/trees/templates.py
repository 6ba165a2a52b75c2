"""Tree templates: the paper's, chains, trees grown from the measured acceptance of ranks, and user-supplied ones.

`paper`, `chain` and `static` build each template once: every call returns the same object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from .best_first import best_first
from .draft import Array, Tree, branch

RankPath = tuple[int, ...]
"""A node as the ranks along its path: `(0, 2)` is the third candidate after the best candidate."""
_NO_PATH: RankPath = ()
_MOST = 10_000
"""Maximum nodes of a tree: its mask has n squared entries."""


class Template(Tree):
    """A fixed tree shape, filled with candidates to make a draft."""

    def __init__(self, parents: Array, ranks: Array) -> None:
        """`parents` (n,) as in `Draft`; `ranks` (n,) of each node among the candidates after its parent, 0 being the
        best. Raises ValueError for arrays that form no tree.
        """
        super().__init__(parents)
        self.ranks = np.asarray(ranks, np.int64)
        """(n,) int64."""
        if len(self) != len(self.ranks):
            raise ValueError(f"parents and ranks must have equal lengths, got {len(self)} and {len(self.ranks)}")

    def __repr__(self) -> str:
        layers = np.bincount(self.depths)[1:]
        return f"Template({len(self) - 1} nodes + root, layers {' '.join(map(str, layers)) or '-'})"

    @classmethod
    def from_paths(cls, paths: Iterable[RankPath]) -> Template:
        """Return a template from rank paths, kept in the given order within each layer; the root may be omitted. Raises
        ValueError for a path without its parent, a duplicate path, or a negative rank.
        """
        index: dict[RankPath, int] = {(): 0}
        parents, ranks = [-1], [0]
        for path in sorted((path for path in paths if path), key=len):
            if path in index:
                raise ValueError(f"paths must be unique, got {path} twice")
            if path[:-1] not in index:
                raise ValueError(f"the parent {path[:-1]} of path {path} is missing; add it")
            if path[-1] < 0:
                raise ValueError(f"ranks must be >= 0, got path {path}")
            index[path] = len(parents)
            parents.append(index[path[:-1]])
            ranks.append(path[-1])
        return cls(np.array(parents), np.array(ranks))

    @property
    def breadth(self) -> int:
        """Number of candidates that a drafter must provide after each token: the highest rank plus one."""
        return int(self.ranks[1:].max(initial=-1)) + 1

    def cut(self, depth: int) -> Template:
        """Return the template without nodes deeper than `depth`."""
        nodes = int(np.searchsorted(self.depths, depth, side="right"))
        return self if nodes == len(self) else Template(self.parents[:nodes], self.ranks[:nodes])

    def _repr_html_(self) -> str:
        """Render every node with its rank in a notebook."""
        from .._util import display

        return display.tree(self.parents.tolist(), ["root", *map(str, self.ranks[1:])])._repr_html_()


@cache
def chain(length: int) -> Template:
    """Return a single branch: `length` nodes after the root, each the best candidate of the preceding one."""
    if length < 1:
        raise ValueError(f"chain length must be >= 1, got {length}; for plain decoding use the drafter 'plain'")
    return Template(branch(1 + length), np.zeros(1 + length))


_PAPER = """
0 1 2 3 4 5 6 7
00 01 02 03 04 05 06 07 10 11 12 13 20 21 22 30 31 40 50 60 70
000 001 002 003 004 005 006 007 010 011 012 020 021 030 040 050 060 070 100 101 110 200 300 400 500
0000 0001 0002 0003 0004 0010 0011 0020 0030 0040 0100 0200 1000 2000 3000
00000 00001 00002 00010 00020 00100 01000 10000
000000 000001 000100
"""


@cache
def paper() -> Template:
    """Return the static tree of Token Recycling (appendix 8.1): 80 nodes and the root in 6 layers."""
    return parse_paths(_PAPER)


def parse_paths(text: str) -> Template:
    """Return a template from words: one digit per rank (`012`), or ranks separated by points (`0.12.1`, `12.`)."""
    paths = []
    for word in text.split():
        parts = [part for part in word.split(".") if part] if "." in word else list(word)
        if not parts or not all(part.isascii() and part.isdigit() for part in parts):
            raise ValueError(f"{word!r} is not a rank path; write paths such as '0 1 00 01' or '0.12'")
        paths.append(tuple(map(int, parts)))
    if not paths:
        raise ValueError("a template must have a rank path, got none")
    return Template.from_paths(paths)


def grow(rank_acceptance: Sequence[float], nodes: int, max_depth: int = 16) -> Template:
    """Return the tree of `nodes` drafted nodes with the most expected accepted tokens, if a candidate of rank r is
    correct with probability `rank_acceptance[r]` everywhere: the static optimum of Sequoia (2402.12374, section 4.1)
    without its bound on breadth. `Stats.acceptance_by_rank` measures `rank_acceptance`.
    """
    if nodes < 1:
        raise ValueError(f"nodes of a tree must be >= 1, got {nodes}; for plain decoding use the drafter 'plain'")
    if not rank_acceptance or not all(0 <= p <= 1 for p in rank_acceptance):
        raise ValueError(f"acceptance of ranks must be from 0 to 1, got {list(rank_acceptance)}")
    return tree_of(islice(best_paths([rank_acceptance] * max_depth), nodes))


def best_paths(acceptance: Sequence[Sequence[float]]) -> Iterator[tuple[float, RankPath]]:
    """Yield rank paths with their products in decreasing order, each after its prefixes. The candidate of rank r at
    depth d is assumed correct with probability `acceptance[d - 1][r]`.

    The first n are the tree of n nodes with the most expected accepted tokens: the sum of their products.
    """
    ranked = [sorted(range(len(probabilities)), key=lambda rank: -probabilities[rank]) for probabilities in acceptance]
    newest = 1.0, (1.0, _NO_PATH, 0)

    def below(above: float, path: RankPath, place: int) -> Iterator[tuple[float, tuple[float, RankPath, int]]]:
        """Yield the child of rank `place` by probability: its value and its candidate."""
        if len(path) < len(ranked) and place < len(ranked[len(path)]):
            rank = ranked[len(path)][place]
            yield above * acceptance[len(path)][rank], (above, (*path, rank), place)

    def children(node: int) -> Iterator[tuple[float, tuple[float, RankPath, int]]]:
        """Yield the next sibling of the newest node and its best child: no remaining candidate is better than both."""
        value, (above, path, place) = newest
        if node:
            yield from below(above, path[:-1], place + 1)
        yield from below(value, path, 0)

    for _, value, candidate in best_first(children):
        newest = value, candidate
        yield value, candidate[1]


def tree_of(paths: Iterable[tuple[float, RankPath]]) -> Template:
    """Return the tree of paths from `best_paths`."""
    return Template.from_paths(sorted((path for _, path in paths), key=lambda path: (len(path), path)))


RANK_ACCEPTANCE = (0.709, 0.069, 0.035, 0.017, 0.013, 0.012, 0.010, 0.004)
"""`Stats.acceptance_by_rank` of the shipped target on the shipped prompts, with the paper's tree."""


@cache
def static(nodes: int) -> Template:
    """Return a tree of `nodes` drafted nodes, grown once from the measured acceptance of ranks."""
    return grow(RANK_ACCEPTANCE, nodes)


def template_from(spec: str | int | Template) -> Template | None:
    """Return the template named by an option; None for `auto` or a number, where trees are grown at each step.

    Options: `paper`; `chain:N`; `static:N`, N nodes by the measured acceptance of ranks; rank paths (`"0 1 00"`); the
    path of a text file with rank paths. Raises ValueError.
    """
    if isinstance(spec, Template):
        return spec
    text = str(spec).strip()
    if text == "paper":
        return paper()
    if text == "auto":
        return None
    kind, _, number = text.rpartition(":")
    counted = number.isascii() and number.isdigit() and (kind in ("chain", "static") or not (kind or number[0] == "0"))
    if counted and int(number[:9]) > _MOST:
        raise ValueError(f"nodes of a tree must be <= {_MOST}, got {text[:40]}")
    if number.isascii() and number.isdigit() and kind in ("chain", "static"):
        return (chain if kind == "chain" else static)(int(number))
    if isinstance(spec, int) or (text.isascii() and text.isdigit() and text[0] != "0"):
        if int(text) < 1:
            raise ValueError(f"nodes of a tree must be >= 1, got {text}; for plain decoding use the drafter 'plain'")
        return None
    try:
        is_text = all(part.isdigit() for part in text.replace(".", " ").split())
        return parse_paths(text if is_text or not Path(text).is_file() else Path(text).read_text())
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{text!r} is not a tree ({error}); use auto, a number of nodes, paper, chain:N, static:N, rank paths such "
            "as '0 1 00', or a file of them"
        ) from None


def nodes_of(spec: str | int | Template, template: Template | None) -> int | Literal["auto"] | None:
    """Return `DrafterTraits.nodes`, the number of nodes to verify, for an option that names this template."""
    if template is not None:
        return None
    return "auto" if spec == "auto" else int(str(spec))


def size_description(spec: str | int | Template, template: Template | None) -> str:
    """Return a description of the drafts, for an option that names this template."""
    if template is not None:
        return str(template)
    return f"{spec} nodes, best first" if str(spec).isdigit() else "sized by cost"
