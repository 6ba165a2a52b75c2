"""Chains that follow a long match are copied from there, without mixing all that is known at every token.

Where the last 16 tokens or more stood before, and what followed there is also what the mixture holds likely, the tokens
after it are as likely: each is the one candidate, of the same kind and with the same chance as the first. Where the
match is at its end, the mixture is asked again.

Cost: some tens of nanoseconds a copied token; a mixed one takes some microseconds.
"""

from __future__ import annotations

import numpy as np

from .._util.compiled import compiled_part
from .best_first import GrowingTree, attach, consider
from .mixture import Sources
from .occurrences import token_at

_LEAST, _SURE = 16, 0.8
"""Tokens of a match that is copied, and how likely its first token is."""
TEXT, PAST, NOTHING = 0, 1, -1
"""What a chain is copied from."""


@compiled_part
def begin(growing: GrowingTree, node: int, copied: np.ndarray, sources: Sources) -> None:
    """Sees whether the likeliest candidate after a node that has just been considered begins a copy. `copied` (2,)
    int64: what the chain is copied from, and the number there of its last candidate.
    """
    copied[0] = NOTHING
    if not growing.known[node] or growing.chances[node, 0] < _SURE:
        return
    longest, likeliest = growing.mixture.longest, growing.candidates[node, 0]
    for origin in (TEXT, PAST):
        place = longest[origin, 1]
        if longest[origin, 0] >= _LEAST and _token(sources, origin, place) == likeliest:
            copied[0], copied[1] = origin, place
            return


@compiled_part
def extend(growing: GrowingTree, node: int, copied: np.ndarray, sources: Sources) -> None:
    """Makes the likeliest candidate of a chain's last node its newest, `node`, and finds what may follow that."""
    last = node - 1
    attach(growing, node, last, np.int64(0))
    if copied[0] != NOTHING:
        place = copied[1] + 1
        token = _token(sources, copied[0], place)
        if token >= 0:
            copied[1] = place
            growing.candidates[node, 0], growing.cells[node, 0] = token, growing.cells[last, 0]
            growing.chances[node, 0] = growing.chances[last, 0]
            growing.known[node], growing.drafted[node] = 1, 0
            return
    consider(growing, node, sources)
    begin(growing, node, copied, sources)


@compiled_part
def _token(sources: Sources, origin: int, place: int) -> int:
    return token_at(sources.text, place) if origin == TEXT else token_at(sources.past, place)
