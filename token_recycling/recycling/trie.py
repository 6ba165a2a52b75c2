"""Drafted branches with a common beginning, merged into a tree: of two nodes with the same token after the same parent
one is enough. Cost: one dictionary entry a node, in Python.
"""

from __future__ import annotations

from ..trees.tree import Tree


class Trie:
    """A tree of tokens that grows in order of depth below a root, node 0."""

    def __init__(self, root: int) -> None:
        """`root` is the root's token."""
        self.parents, self.tokens = [-1], [root]
        """Of every node."""
        self._ranks = [0]
        self._children: dict[tuple[int, int], int] = {}
        self._degrees = [0]

    def add(self, parent: int, token: int) -> int:
        """The child of `parent` that carries `token`, which may be new; nodes are added in order of depth."""
        known = self._children.get((parent, token))
        if known is not None:
            return known
        node = self._children[parent, token] = len(self.parents)
        self.parents.append(parent)
        self._ranks.append(self._degrees[parent])
        self.tokens.append(token)
        self._degrees[parent] += 1
        self._degrees.append(0)
        return node

    def tree(self) -> Tree:
        """The shape of what was added; `tokens` are those of its nodes."""
        return Tree(tuple(self.parents), tuple(self._ranks))
