"""Candidates after a place in the sequence or the draft: all sources, interpolated and calibrated.

Sources are the rows of the last one to four tokens (`ngrams`); continuations of earlier occurrences of these tokens, in
this sequence and in the history (`suffix_index`); and the target's candidates one position earlier. The candidates that
lost there are likely to come next (LogitSpec, 2507.01449), and so are their own continuations.

They are interpolated as in an n-gram model (Jelinek and Mercer 1980): each source takes a fixed share from all before
it; that of a sequence rises with the length of the match. The mixture is then calibrated (`calibration`). Cost: about
two microseconds per place, in compiled code.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._util.compiled import compiled_inline, compiled_part
from .calibration import MATCHES, RANKS, calibrated, cell_of, match_kind, new_calibration
from .copying import HYPOTHESES, Copying, candidate, weight
from .copying import KINDS as COPIED
from .ngrams import FULL, Rows, find_row
from .suffix_index import FOUND, LONGEST, IndexArrays, find_matches, token_at

_SHORTEST_WEIGHT, _LONGER_WEIGHT = np.float32(0.8), np.float32(0.4)
"""Weight of the shortest known n-gram, and of each longer one against the shorter ones."""
_MATCH_WEIGHTS = np.array([0.0, 0.1, 0.15, 0.25, 0.35, 0.5, 0.6, 0.8], np.float32)
"""Weight of the continuations in a sequence, by the kind of the longest match (`calibration.match_kind`)."""
_PLACE_WEIGHTS = np.array([0.0, 1.0, 4.0, 10.0, 25.0, 80.0, 300.0, 1000.0], np.float32)
"""Weight of one occurrence among all in a sequence, by the kind of its match."""
_BESIDE_WEIGHT, _AFTER_WEIGHT = np.float32(0.1), np.float32(0.3)
"""Weight of the candidates that lost to the newest token, and of their continuations."""
_BESIDE, _AFTER = 4, 4
"""How many of these candidates have their continuations looked up, and how many continuations each adds."""
_LONG = 3
"""Length of the context from which on a row also covers these continuations."""
_PAST_KINDS = 4
_MATCHED = MATCHES * _PAST_KINDS
_CERTAIN = np.float32(1 - 1e-6)
"""Upper bound of a probability, so that a node gains less than a whole token."""
_LONG_MATCH = 6
"""Kind of match from which on it tells more than whether copying continues there."""
_KINDS = _MATCHED + COPIED
"""Kinds of candidates, by the matches that support them; those copied without a long match, by their kind of copy."""


class Mixture(NamedTuple):
    """Buffers for the candidates after one place; c at most."""

    orders: int  # longest context of a row
    recent: np.ndarray  # (LONGEST,) int64: the tokens before the place, newest first, then -1
    alternative: np.ndarray  # (orders,) int64: an n-gram with another newest token, for look-ups
    tokens: np.ndarray  # (c,) int64: the candidates, without duplicates
    shares: np.ndarray  # (c,) float32: of the mixture
    matches: np.ndarray  # (2, c) int64: kinds of the longest matches in this sequence and in the history
    copied: np.ndarray  # (c,) int64: kinds of copies, -1 for none
    cells: np.ndarray  # (c,) int64: kinds, as the calibration has them
    probabilities: np.ndarray  # (c,) float32: calibrated probabilities
    places: np.ndarray  # (FOUND,) int64: places of continuations
    lengths: np.ndarray  # (FOUND,) int64: length of the match there
    longest: (
        np.ndarray
    )  # (2, 2) int64: in this sequence and in the history, length and newest place of the longest match

    @classmethod
    def empty(cls, orders: int, k: int) -> Mixture:
        most = (orders + 1) * k + _BESIDE * _AFTER + 2 * FOUND + k + HYPOTHESES
        ints, floats = (lambda n: np.zeros(n, np.int64)), (lambda n: np.zeros(n, np.float32))
        return cls(
            orders,
            recent=ints(LONGEST),
            alternative=ints(orders),
            tokens=ints(most),
            shares=floats(most),
            matches=np.zeros((2, most), np.int64),
            copied=ints(most),
            cells=ints(most),
            probabilities=floats(most),
            places=ints(FOUND),
            lengths=ints(FOUND),
            longest=np.zeros((2, 2), np.int64),
        )


class Sources(NamedTuple):
    """Where candidates come from."""

    rows: Rows
    sequence: IndexArrays  # of the sequence so far; empty where it is not searched
    history: IndexArrays  # of the earlier outputs; may be empty
    calibration: np.ndarray  # `mixture_calibration`
    copying: Copying  # state of edit-aware copying
    mixture: Mixture  # workspace


def mixture_calibration() -> np.ndarray:
    """(cells, 2) float32: see `calibration.new_calibration`."""
    return new_calibration(_KINDS)


@compiled_inline
def mix(sources: Sources, places: np.ndarray, node: int) -> int:
    """Find the candidates after `mixture.recent` and their probabilities; return their number. `places` (nodes,
    HYPOTHESES, 4): where copying may continue after each node.
    """
    mixture, rows, shares = sources.mixture, sources.rows, sources.mixture.shares
    found, known = _mix_alternatives(mixture, rows), False
    for order in range(1, mixture.orders + 1):
        row = find_row(rows, mixture.recent, order)
        if row < 0:
            continue
        weight, known = _LONGER_WEIGHT if known else _SHORTEST_WEIGHT, True
        _fade(mixture, found, weight)
        found = _mix_row(mixture, found, rows, row, weight, rows.candidates.shape[1], np.int64(-1))
    found = _mix_sequence(mixture, found, sources.history, np.int64(1))
    found = _mix_sequence(mixture, found, sources.sequence, np.int64(0))
    found = _mix_copied(sources, found, places, node)
    for place in range(found):
        rank = 0
        for other in range(found):
            if rank == RANKS - 1:
                break
            rank += shares[other] > shares[place] or (shares[other] == shares[place] and other < place)
        history = mixture.matches[1, place]
        history_kind = 0 if history == 0 else 1 if history < 3 else 2 if history < 6 else 3
        kind = mixture.matches[0, place] * _PAST_KINDS + history_kind
        if mixture.copied[place] >= 0 and mixture.matches[0, place] < _LONG_MATCH:
            kind = _MATCHED + mixture.copied[place]
        mixture.cells[place] = cell_of(shares[place], rank, kind, _KINDS)
        probability = calibrated(sources.calibration, mixture.cells[place], shares[place])
        mixture.probabilities[place] = min(probability, _CERTAIN)
    return found


@compiled_part
def _mix_alternatives(mixture: Mixture, rows: Rows) -> int:
    """Add the target's candidates one position earlier, as the first ones; return their number."""
    recent, alternative, found = mixture.recent, mixture.alternative, np.int64(0)
    for place in range(mixture.orders):
        alternative[place] = recent[place + 1]
    row = _longest_row(rows, alternative, mixture.orders, 1)
    if row < 0:
        return found
    found = _mix_row(mixture, found, rows, row, _BESIDE_WEIGHT, rows.candidates.shape[1], recent[0])
    for place in range(1, mixture.orders):
        alternative[place] = recent[place]
    for rank in range(min(_BESIDE, rows.candidates.shape[1])):
        alternative[0] = rows.candidates[row, rank]
        if alternative[0] == recent[0] or not rows.shares[row, rank]:
            continue
        after = _longest_row(rows, alternative, mixture.orders, _LONG)
        if after >= 0:
            weight = _AFTER_WEIGHT * np.float32(rows.shares[row, rank]) / np.float32(FULL)
            found = _mix_row(mixture, found, rows, after, weight, _AFTER, np.int64(-1))
    return found


@compiled_part
def _longest_row(rows: Rows, ngram: np.ndarray, orders: int, least: int) -> int:
    """Return the row of the longest context of an n-gram with at least `least` tokens, or -1."""
    for order in range(orders, least - 1, -1):
        row = find_row(rows, ngram, order)
        if row >= 0:
            return row
    return -1


@compiled_part
def _mix_row(mixture: Mixture, found: int, rows: Rows, row: int, weight: float, most: int, but: int) -> int:
    """Add the first `most` candidates of a row, except the token `but`; return the number of candidates."""
    for rank in range(min(most, rows.candidates.shape[1])):
        if not rows.shares[row, rank]:
            break
        token = np.int64(rows.candidates[row, rank])
        if token != but:
            share = weight * np.float32(rows.shares[row, rank]) / np.float32(FULL)
            found = max(found, _add(mixture, found, token, share) + 1)
    return found


@compiled_part
def _mix_sequence(mixture: Mixture, found: int, sequence: IndexArrays, which: int) -> int:
    """Add continuations in a sequence; return the number of candidates."""
    places, total = find_matches(sequence, mixture.recent, mixture.places, mixture.lengths), np.float32(0)
    mixture.longest[which, 0] = 0
    for one in range(places):
        total += _PLACE_WEIGHTS[match_kind(mixture.lengths[one])]
        if mixture.lengths[one] > mixture.longest[which, 0]:
            mixture.longest[which, 0], mixture.longest[which, 1] = mixture.lengths[one], mixture.places[one]
    weight = _MATCH_WEIGHTS[match_kind(mixture.longest[which, 0])]
    _fade(mixture, found, weight)
    for one in range(places):
        kind = match_kind(mixture.lengths[one])
        share = weight * _PLACE_WEIGHTS[kind] / total
        place = _add(mixture, found, token_at(sequence, mixture.places[one]), share)
        mixture.matches[which, place] = max(mixture.matches[which, place], kind)
        found = max(found, place + 1)
    return found


@compiled_part
def _mix_copied(sources: Sources, found: int, places: np.ndarray, node: int) -> int:
    """Add tokens to be copied; return the number of candidates."""
    mixture = sources.mixture
    most, total = np.float32(0), np.float32(0)
    for row in range(HYPOTHESES):
        token, kind = candidate(sources.copying, sources.sequence, places, node, row)
        if token >= 0:
            most, total = max(most, weight(kind)), total + weight(kind)
    if total <= 0:
        return found
    _fade(mixture, found, most)
    for row in range(HYPOTHESES):
        token, kind = candidate(sources.copying, sources.sequence, places, node, row)
        if token >= 0:
            place = _add(mixture, found, token, most * weight(kind) / total)
            if mixture.copied[place] < 0:
                mixture.copied[place] = kind
            found = max(found, place + 1)
    return found


@compiled_part
def _fade(mixture: Mixture, found: int, weight: float) -> None:
    """Scale the candidates down for a source of that weight."""
    for place in range(found):
        mixture.shares[place] *= 1 - weight


@compiled_part
def _add(mixture: Mixture, found: int, token: int, share: float) -> int:
    """Add to the share of a candidate, which may be new; return its place."""
    for place in range(found):
        if mixture.tokens[place] == token:
            mixture.shares[place] += share
            return place
    mixture.tokens[found], mixture.shares[found] = token, share
    mixture.matches[0, found] = mixture.matches[1, found] = 0
    mixture.copied[found] = -1
    return found
