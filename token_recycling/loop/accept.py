"""Acceptance: find the drafted nodes that the target agrees with, and the end of the sequence.

Both implementations emit the tokens of plain decoding: the drafted tokens on the accepted path and, after its end, the
target's own choice. `TreeSteps` judges all nodes at once with tensor operations (`longest_path`) and reads from the
device once; `accept_walk` follows the target's choices node by node, for every kind of token selection. Both accept the
longest path; of several paths with the same tokens, the one whose end has the lowest index. Neither touches the cache
or the drafter.

A deterministic draft is also verified losslessly under sampling: one token is sampled from the target's distribution at
every visited node, and the children with that token are followed, so a seeded run equals `model.generate`. Tokens that
the drafter itself sampled are accepted by speculative sampling (Leviathan et al., 2211.17192, Chen et al., 2302.01318),
siblings one after another without replacement (recursive rejection sampling, Jeon et al., 2402.14160): a few passes
over the vocabulary each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from .._util.topk import as_candidates, packed_candidates
from ..trees.draft import Draft, Step
from .request import IMPOSSIBLE, TokenSelector

if TYPE_CHECKING:
    from ..trees.packed import PackedTrees

Append = Callable[[int], bool]
"""Appends a token to the sequence; returns whether the sequence ends with it."""


class LongestPath(NamedTuple):
    """Accepted paths of b sequences, on the device, padded to the greatest possible length of a path."""

    number: torch.Tensor  # (b, 1) int64: accepted nodes, root included = number of emitted tokens
    path: torch.Tensor  # (b, longest) int64: the accepted nodes, then zeros
    tokens: torch.Tensor  # (b, longest) int64: the emitted tokens, then unspecified padding


def longest_path(trees: PackedTrees, choices: torch.Tensor, longest: int) -> LongestPath:
    """Return the longest path of each tree on which every token is the choice (b, n) int64 at its parent (Token
    Recycling, section 3.3), with static shapes. Of paths of equal length, the one whose end has the lowest index wins.
    """
    batch, n = choices.shape
    nodes = torch.arange(n, device=choices.device).expand(batch, -1)
    right = (trees.tokens == choices.gather(1, trees.parents)) | (nodes == 0)
    reached = (right[:, None] | ~trees.ancestors).all(dim=2)
    preference = trees.depths * n + (n - 1 - nodes)
    end = torch.where(reached, preference, -1).argmax(dim=1, keepdim=True)
    lineage = trees.ancestors.gather(1, end[:, :, None].expand(-1, -1, n))[:, 0]
    # One extra slot, for the nodes that are not on the path.
    places = torch.where(lineage, trees.depths, longest)
    path = torch.zeros(batch, longest + 1, dtype=nodes.dtype, device=nodes.device).scatter(1, places, nodes)
    path = path[:, :longest]
    return LongestPath(trees.depths.gather(1, end) + 1, path, choices.gather(1, path))


class TreeSteps:
    """Steps of sequences whose choice at every node is known on the device. All nodes are judged at once; a single copy
    transfers the accepted paths to the host, and optionally the k most probable tokens after every node.
    """

    def __init__(
        self, drafts: Sequence[Draft], logits: torch.Tensor, trees: PackedTrees, choices: torch.Tensor, k: int = 0
    ) -> None:
        """`logits` (b, n, vocabulary) and `choices` (b, n) int64 belong to the nodes of `trees`, the packed form of
        `drafts`. A choice of `IMPOSSIBLE` fails its sequence if the node is reached.
        """
        self._drafts, self._logits, self._k = drafts, logits, k
        self._longest = max(draft.depth for draft in drafts) + 1
        paths = torch.cat(longest_path(trees, choices, self._longest), dim=1).to(torch.int32)
        parts = [paths, *packed_candidates(logits, k)] if k else [paths]
        parts.append(logits[:, 0, :1].float().view(torch.int32))
        numbers = torch.cat([part.reshape(len(logits), -1) for part in parts], dim=1)
        self._numbers = numbers.cpu().numpy()

    @property
    def first_logits(self) -> np.ndarray:
        """(b,) float32: the first logit after each root."""
        return self._numbers[:, -1:].view(np.float32)[:, 0]

    def step(self, row: int, append: Append, path: list[int] | None = None) -> Step:
        """Return the step of one sequence. `path` receives the accepted nodes, the root first; only those so far if
        `append` raises or no token is possible after one of them.
        """
        path = [] if path is None else path
        draft, logits, (number, *_) = self._drafts[row], self._logits[row], self._numbers[row]
        own, end = len(draft), 1 + 2 * self._longest
        nodes, tokens = self._numbers[row, 1:end].reshape(2, self._longest)[:, :number].tolist()
        emitted: list[int] = []
        finished = False
        while len(path) < len(nodes) and not finished:
            token = tokens[len(path)]
            if token == IMPOSSIBLE:
                raise RuntimeError("probabilities to sample from must be finite, got inf or nan in the target's scores")
            path.append(nodes[len(path)])
            emitted.append(token)
            finished = append(token)
        beyond = None
        if len(path) < len(nodes):  # among paths with the same tokens, a shorter one may have a lower index
            path[:] = draft.lineages[draft.carrying(emitted[:-1])[0]]
            beyond = draft.carrying(emitted)[0]
        candidates = None
        if self._k:
            candidates = as_candidates(self._numbers[row, end:-1], len(logits), self._k, own)
        return Step(draft, logits[:own], path, emitted, finished, beyond, row, candidates)


def accept_walk(
    draft: Draft,
    logits: torch.Tensor,
    append: Append,
    selector: TokenSelector,
    row: int = 0,
    path: list[int] | None = None,
) -> Step:
    """Follow the target's choices from the root as long as a child has the chosen token.

    `selector`, or its `distribution`, is called once per emitted token, after the preceding tokens were appended: so
    processors see the path, and random numbers are consumed in the order of plain decoding. Sampled children
    (`Draft.sampled_from`) are tried in order; if none is accepted, the token is sampled from the residual of the
    target's distribution. `path` receives the accepted nodes, the root first; only those so far if `append` or
    `selector` raises.
    """
    path = [] if path is None else path
    drafted, parents, children = draft.tokens.tolist(), draft.parents.tolist(), draft.children
    sampled_from = draft.sampled_from or {}
    nodes, emitted = [0], []  # several nodes where siblings have equal tokens
    while True:
        node = nodes[0]
        if path and parents[node] != path[-1]:  # the path continues below another node with the same tokens
            path[:] = draft.lineages[parents[node]]
        path.append(node)
        sampled = [child for child in children[node] if child in sampled_from] if sampled_from else []
        if sampled:
            sources = [sampled_from[child] for child in sampled]
            accepted, left = accept_siblings(
                selector.distribution(logits[node]), [drafted[child] for child in sampled], sources, selector.generator
            )
            if accepted is None:
                token = int(torch.multinomial(left, num_samples=1, generator=selector.generator))
            else:
                token = drafted[sampled[accepted]]
        else:
            token = selector(logits[node])
        emitted.append(token)
        finished = append(token)
        following = [child for node in nodes for child in children[node] if drafted[child] == token]
        if finished or not following:
            return Step(draft, logits, path, emitted, finished, min(following, default=None), row)
        nodes = sorted(following)


def accept_siblings(
    target: torch.Tensor,
    tokens: Sequence[int],
    sampled_from: Sequence[torch.Tensor],
    generator: torch.Generator | None = None,
) -> tuple[int | None, torch.Tensor]:
    """Return the index of the first accepted token, or None, and the residual of the `target` distribution then.

    All distributions are (vocabulary,). `tokens[i]` was sampled from `sampled_from[i]` without the tokens before it.
    With p the residual and q that distribution, renormalized, the token is accepted with probability min(1, p/q);
    otherwise p becomes max(0, p - q), renormalized. Raises ValueError for a token that could not have been sampled.
    """
    left = target
    for index, token in enumerate(tokens):
        source = sampled_from[index].to(dtype=left.dtype, device=left.device, copy=True)
        source[list(tokens[:index])] = 0
        source /= source.sum()
        if not source[token] > 0:
            raise ValueError(
                f"sampled tokens must be possible in Draft.sampled_from, without replacement, got token {token} with "
                "probability 0"
            )
        excess = (left - source).clamp_(min=0)
        total = excess.sum()
        # Without excess the two distributions are equal up to rounding.
        if not total > 0:
            return index, left
        if bool(torch.rand((), device=left.device, generator=generator) * source[token] < left[token]):
            return index, left
        left = excess / total
    return None, left
