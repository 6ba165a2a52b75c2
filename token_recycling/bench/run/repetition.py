"""How much of an output repeats itself. Loops flatter every method that drafts by looking back, so they are counted.

Small models decoded greedily fall into repeating a line or a phrase. A *looping stretch* is one that repeats itself
exactly with a fixed period, three times or more and over twelve tokens or more; its first round is text, what follows
is loop. The share of repeated 4-grams counts near repetition too, as in ordinary code and prose.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LONGEST_PERIOD = 64
ROUNDS = 3
SHORTEST_STRETCH = 12


def repeated_4grams(outputs: Sequence[Sequence[int]]) -> float | None:
    """Return the share of 4-grams that occurred before in the same output; None where all outputs are too short."""
    total = repeated = 0
    for output in outputs:
        grams = list(zip(output, output[1:], output[2:], output[3:], strict=False))
        total += len(grams)
        repeated += len(grams) - len(set(grams))
    return repeated / total if total else None


def looping(tokens: Sequence[int]) -> list[bool]:
    """Return for each token whether it lies in a looping stretch, without its first round."""
    text, loops = np.asarray(tokens), np.zeros(len(tokens), dtype=bool)
    for period in range(1, min(LONGEST_PERIOD, len(text) // ROUNDS) + 1):
        same = np.concatenate([[False], text[period:] == text[:-period], [False]])
        borders = np.flatnonzero(same[1:] != same[:-1])
        for first, last in zip(borders[::2], borders[1::2], strict=True):
            # The tokens from first + period to before last + period equal those one period earlier.
            if last - first + period >= max(ROUNDS * period, SHORTEST_STRETCH):
                loops[first + period : last + period] = True
    return loops.tolist()


def in_loops(tokens: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
    """Return tokens and steps of all steps with at least half of their tokens in looping stretches.

    `lengths` are the tokens of every step, in order; whole steps are counted, so that the MAT of the others is defined.
    """
    assert sum(lengths) == len(tokens)
    loops, place, loop_tokens, loop_steps = looping(tokens), 0, 0, 0
    for length in lengths:
        if 2 * sum(loops[place : place + length]) >= length:
            loop_tokens += length
            loop_steps += 1
        place += length
    return loop_tokens, loop_steps
