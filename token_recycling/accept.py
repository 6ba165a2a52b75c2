"""Which drafted nodes the target agrees with, and where the text ends.

Both walks emit exactly what plain decoding would: the drafted tokens on the accepted path and, at its end, the target's
own choice. A deterministic draft is verified without loss under sampling too: ONE token is drawn from the target's
processed distribution at every node visited, and the child that carries it is followed. Nothing is drawn for a node
that is not visited, nor after the end of the text, so a seeded run draws the same numbers as `model.generate`. Neither
touches the cache or the drafter.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .drafting import Draft, Step

Choose = Callable[[torch.Tensor], int]
"""Logits (vocabulary,) at the end of the path so far -> the next token."""
Append = Callable[[int], bool]
"""Puts a token at the end of the text; True if the text ends with it."""


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
        shape = draft.tree.on(draft.tokens.device)
        right = draft.tokens == choices[shape.parents]
        right[0] = True
        reached = (right | shape.hidden).all(dim=1)
        end = (shape.preference * reached).argmax(dim=0, keepdim=True)
        last, *chosen = torch.cat([end, choices]).tolist()
        path = draft.tree.lineages[last]
    emitted: list[int] = []
    finished = False
    for node in path:
        emitted.append(chosen[node])
        finished = append(chosen[node])
        if finished:
            break
    beyond = path[len(emitted)] if len(emitted) < len(path) else None
    return Step(draft, logits, list(path[: len(emitted)]), emitted, finished, beyond, row)


def accept_walk(draft: Draft, logits: torch.Tensor, append: Append, choose: Choose, row: int = 0) -> Step:
    """Follows the target's choices from the root as long as a child carries them.

    `choose` is called once for each emitted token, in order, after the tokens before it were appended, so that logits
    processors see the path of the node itself and random draws come in the order of plain decoding. Of children with
    one token the first is followed.
    """
    drafted = draft.tokens.tolist()
    accepted, emitted = [0], []
    while True:
        emitted.append(choose(logits[accepted[-1]]))
        finished = append(emitted[-1])
        following = next((child for child in draft.tree.children[accepted[-1]] if drafted[child] == emitted[-1]), None)
        if finished or following is None:
            return Step(draft, logits, accepted, emitted, finished, following, row)
        accepted.append(following)
