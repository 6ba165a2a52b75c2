"""Which drafted nodes the target agrees with, and where the text ends.

All walks emit what plain decoding would: the drafted tokens on the accepted path and, at its end, the target's own
choice. Nothing is drawn for a node that is not visited, nor after the end of the text. None of them touches the cache
or the drafter.

A deterministic draft is verified without loss under sampling too: ONE token is drawn from the target's processed
distribution at every node visited, and the child that carries it is followed. So a seeded run draws the same numbers as
`model.generate`. Tokens that the drafter has drawn itself, from a distribution of its own, are accepted by speculative
sampling (Leviathan et al., 2211.17192, Chen et al., 2302.01318), siblings one after another without replacement
(recursive rejection sampling, Jeon et al., 2402.14160): the same distribution of texts, other draws. Cost per drawn
node visited: a few passes over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from .drafting import Draft, Step

Choose = Callable[[torch.Tensor], int]
"""Logits (vocabulary,) at the end of the path so far -> the next token."""
Append = Callable[[int], bool]
"""Puts a token at the end of the text; True if the text ends with it."""


class Sampler(Protocol):
    """How a sampled text chooses: logits (vocabulary,) at the end of the path so far -> the next token, or the
    distribution (vocabulary,) that it would be drawn from. Each node is asked for one of the two, once.
    """

    def __call__(self, logits: torch.Tensor, /) -> int: ...

    def distribution(self, logits: torch.Tensor, /) -> torch.Tensor: ...


def accept_greedy(
    draft: Draft, logits: torch.Tensor, append: Append, choose: Choose | None = None, row: int = 0
) -> Step:
    """The longest path on which every token is the target's greedy choice at its parent (Token Recycling, section 3.3).

    `logits` is (n, vocabulary). Among paths of equal length the one whose end comes first wins. All nodes are judged at
    once, so that the device is waited for once and `choose` is not asked. `row` says which text of a batch it is.
    """
    choices = logits.argmax(dim=-1)
    if len(draft.tree) == 1:
        path, chosen = (0,), choices.tolist()
    else:
        shape = draft.tree.on(logits.device)
        right = draft.tokens.to(logits.device) == choices[shape.parents]
        right[0] = True
        reached = (right | shape.hidden).all(dim=1)
        end = (shape.preference * reached).argmax(dim=0, keepdim=True)
        last, *chosen = torch.cat([end, choices]).tolist()
        path = draft.tree.lineages[last]
    return emitted(draft, logits, path, [chosen[node] for node in path], append, row)


def emitted(
    draft: Draft,
    logits: torch.Tensor,
    path: Sequence[int],
    tokens: Sequence[int],
    append: Append,
    row: int = 0,
    candidates: tuple[np.ndarray, np.ndarray] | None = None,
) -> Step:
    """The step that emits `tokens`, one for each node of the accepted `path`, as far as the text goes on."""
    said, finished = 0, False
    while said < len(path) and not finished:
        finished = append(tokens[said])
        said += 1
    beyond = path[said] if said < len(path) else None
    return Step(draft, logits, list(path[:said]), list(tokens[:said]), finished, beyond, row, candidates=candidates)


def accept_walk(draft: Draft, logits: torch.Tensor, append: Append, choose: Choose, row: int = 0) -> Step:
    """Follows the target's choices from the root as long as a child carries them.

    `choose` is called once for each emitted token, in order, after the tokens before it were appended, so that logits
    processors see the path of the node itself and random draws come in the order of plain decoding. Of children with
    one token the first is followed.
    """
    drafted = draft.tokens.tolist()

    def step(node: int) -> tuple[int, int | None]:
        return _followed(draft.tree.children[node], drafted, choose(logits[node]))

    return _walk(draft, logits, append, step, row)


def accept_drawn(draft: Draft, logits: torch.Tensor, append: Append, sampler: Sampler, row: int = 0) -> Step:
    """The walk of a sampled text whose draft may hold tokens that were drawn at random (`Draft.drawn_from`).

    At each node the drawn children are tried in their order; if none is accepted, one token is drawn from what is left
    of the target's distribution, and a child that was not drawn is followed if it carries it. Without drawn children
    this is `accept_walk`, draw for draw.
    """
    drawn_from = draft.drawn_from
    if not drawn_from:
        return accept_walk(draft, logits, append, sampler, row)
    drafted = draft.tokens.tolist()

    def step(node: int) -> tuple[int, int | None]:
        children = draft.tree.children[node]
        drawn = [child for child in children if child in drawn_from]
        if not drawn:
            return _followed(children, drafted, sampler(logits[node]))
        tokens, sources = [drafted[child] for child in drawn], [drawn_from[child] for child in drawn]
        accepted, left = accept_siblings(sampler.distribution(logits[node]), tokens, sources)
        if accepted is not None:
            return tokens[accepted], drawn[accepted]
        others = [child for child in children if child not in drawn_from]
        return _followed(others, drafted, int(torch.multinomial(left, num_samples=1)))

    return _walk(draft, logits, append, step, row)


def accept_siblings(
    target: torch.Tensor, tokens: Sequence[int], drawn_from: Sequence[torch.Tensor]
) -> tuple[int | None, torch.Tensor]:
    """The place of the first accepted one of `tokens`, or None, and what is then left of the `target` distribution.

    All distributions are (vocabulary,). `tokens[i]` was drawn from `drawn_from[i]` without the tokens before it. With p
    what is left so far and q the latter, renormalised, it is accepted with probability min(1, p/q); else p becomes
    max(0, p - q), renormalised. Whatever is drawn in the end, accepted or from what is left, has the target's
    distribution. Raises ValueError for a token that could not have been drawn.
    """
    left = target
    for place, token in enumerate(tokens):
        source = drawn_from[place].to(dtype=left.dtype, device=left.device, copy=True)
        source[list(tokens[:place])] = 0
        source /= source.sum()
        if not source[token] > 0:
            raise ValueError(
                f"expected tokens drawn without replacement from the distributions given, got token {token} "
                "with probability 0; see Draft.drawn_from"
            )
        excess = (left - source).clamp_(min=0)
        total = excess.sum()
        # Without any excess both are the same but for rounding, and what was drawn from one was drawn from the other.
        if not total > 0 or bool(torch.rand((), device=left.device) * source[token] < left[token]):
            return place, left
        left = excess / total
    return None, left


def _followed(children: Sequence[int], drafted: Sequence[int], token: int) -> tuple[int, int | None]:
    """The token, and the first of the children that carries it."""
    return token, next((child for child in children if drafted[child] == token), None)


def _walk(
    draft: Draft, logits: torch.Tensor, append: Append, step: Callable[[int], tuple[int, int | None]], row: int
) -> Step:
    """From the root on: `step` gives the token after a node and the child that carries it."""
    accepted, emitted = [0], []
    while True:
        token, following = step(accepted[-1])
        emitted.append(token)
        finished = append(token)
        if finished or following is None:
            return Step(draft, logits, accepted, emitted, finished, following, row)
        accepted.append(following)
