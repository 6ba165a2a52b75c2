"""Trees over places that are foreseen at once: the candidates of a place stand below every candidate of the one before.

Section 2.1.1 of Medusa; drafts whose places do not depend on each other are all of this shape. Cost: some microseconds
a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import torch

from ...costs.budget import best_size
from ...trees.draft import Draft
from ...trees.templates import best_paths, tree_of
from ...trees.tree import Tree


def best_product(acceptance: Sequence[Sequence[float]], nodes: int, times: np.ndarray | None = None) -> Tree:
    """The best tree if the candidate of rank r at depth d is right with probability `acceptance[d - 1][r]`: of `nodes`
    nodes, or of as many as pay where `times` (most + 1,) are those of steps over 1, 2, ... nodes, drafting included.
    """
    paths = list(islice(best_paths(acceptance), nodes))
    if times is not None:
        paths = paths[: best_size([gain for gain, _ in paths], times)[0]]
    return tree_of(paths)


def product_draft(tree: Tree, root: torch.Tensor, candidates: np.ndarray, chances: np.ndarray) -> Draft:
    """`tree` below `root` (1,), filled with the candidates of each place (places, k) and their probabilities."""
    chosen = np.array(tree.depths[1:], int) - 1, np.array(tree.ranks[1:], int)
    following = torch.tensor(candidates[chosen], dtype=torch.long, device=root.device)
    return Draft(tree, torch.cat([root, following]), confidence=np.append(np.float32(1), chances[chosen]))
