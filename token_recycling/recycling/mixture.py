"""Candidates after a position of the sequence or a node of the draft: all sources, interpolated and calibrated.

Sources are the rows of the last one to four tokens (`ngrams`); continuations of earlier occurrences of these tokens, in
this sequence and in the history (`suffix_index`); and the target's candidates one position earlier. Candidates that
lost there are likely to come next (LogitSpec, 2507.01449), and so are their continuations.

Sources are interpolated as in an n-gram model (Jelinek and Mercer 1980): each takes a fixed share from all preceding
ones; the share of a sequence increases with the length of the match. The mixture is then calibrated (`calibration`).
Cost: about two microseconds per position, in compiled code.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._util.compiled import Record, compiled_inline, compiled_part
from .calibration import MATCHES, RANKS, calibrated, cell_of, match_kind, new_calibration
from .copying import HYPOTHESES, token_to_copy, weight
from .copying import KINDS as COPIED
from .ngrams import FULL, Rows, find_row
from .suffix_index import FOUND, LONGEST, MATCH, IndexArrays, find_matches, token_at

_SHORTEST_WEIGHT, _LONGER_WEIGHT = np.float32(0.8), np.float32(0.4)
"""Weight of the shortest known n-gram, and of each longer one relative to the shorter ones."""
_MATCH_WEIGHTS = np.array([[0.0, 0.1, 0.15, 0.25, 0.35, 0.5, 0.6, 0.8, longest] for longest in (0.8, 0.95)], np.float32)
"""Weight of continuations in this sequence and in the history, by the kind of the longest match
(`calibration.match_kind`). A sequence is often an edit of its own content; the history often has the same sequence.
"""
_PLACE_WEIGHTS = np.array([0.0, 1.0, 4.0, 10.0, 25.0, 80.0, 300.0, 1000.0, 4000.0], np.float32)
"""Weight of one occurrence relative to all others in a sequence, by the kind of its match."""
_BESIDE_WEIGHT, _AFTER_WEIGHT = np.float32(0.1), np.float32(0.3)
"""Weight of the candidates that lost to the newest token, and of their continuations."""
_BESIDE, _AFTER = 4, 4
"""Number of these candidates whose continuations are looked up, and number of continuations that each adds."""
_LONG = 3
"""Minimum context length of the rows used for these continuations."""
_PAST_KINDS = 5
"""Kinds of matches in the history: none; of 1 and 2 tokens, 3 to 7, 8 to 31; longer."""
_MATCHED = MATCHES * _PAST_KINDS
_CERTAIN = np.float32(1 - 1e-6)
"""Upper bound of a probability, so that a node gains less than a whole token."""
_LONG_MATCH = 6
"""Kind of match from which the match predicts better than the state of copying."""
_KINDS = _MATCHED + COPIED
"""Kinds of candidates: by their matches, or, for copied candidates without a long match, by the kind of copy."""


_CANDIDATE = np.dtype(
    [
        ("token", np.int64),
        ("share", np.float32),  # in the mixture
        ("probability", np.float32),  # calibrated
        ("cell", np.int64),  # bin of the calibration
        ("matches", np.int64, (2,)),  # kinds of the longest matches in this sequence and in the history
        ("copied", np.int64),  # kind of copy, -1 for none
    ],
    align=True,
)


class Mixture(NamedTuple):
    """Workspace for the candidates after one position; at most c."""

    candidates: np.ndarray  # (c,) of `_CANDIDATE`, without duplicates
    recent: np.ndarray  # (LONGEST,) int64: the tokens up to the position, newest first, then -1
    alternative: np.ndarray  # (longest context of a row,) int64: an n-gram with another newest token, for look-ups
    matches: np.ndarray  # (FOUND,) of `MATCH`: places of continuations
    longest: np.ndarray  # (2,) of `MATCH`: the newest of the longest matches in this sequence and in the history

    @classmethod
    def empty(cls, orders: int, k: int) -> Mixture:
        most = (orders + 1) * k + _BESIDE * _AFTER + 2 * FOUND + k + HYPOTHESES
        return cls(
            np.zeros(most, _CANDIDATE),
            np.zeros(LONGEST, np.int64),
            np.zeros(orders, np.int64),
            np.zeros(FOUND, MATCH),
            np.zeros(2, MATCH),
        )


class Sources(NamedTuple):
    """Sources of candidates."""

    rows: Rows
    sequence: IndexArrays  # of the sequence so far; empty where it is not searched
    history: IndexArrays  # of earlier outputs; may be empty
    calibration: np.ndarray  # `mixture_calibration`
    copying: Record  # state of edit-aware copying
    mixture: Mixture


def mixture_calibration() -> np.ndarray:
    """Return a calibration (cells, 2) float32: see `calibration.new_calibration`."""
    return new_calibration(_KINDS)


@compiled_inline
def mix(sources: Sources, node: Record) -> int:
    """Compute candidates after `mixture.recent`, the position of `node`, with probabilities; return their number."""
    mixture, rows, candidates = sources.mixture, sources.rows, sources.mixture.candidates
    size, longer = _mix_alternatives(mixture, rows), False
    for order in range(1, len(mixture.alternative) + 1):
        row = find_row(rows, mixture.recent, order)
        if row < 0:
            continue
        weight, longer = _LONGER_WEIGHT if longer else _SHORTEST_WEIGHT, True
        _fade(mixture, size, weight)
        size = _mix_row(mixture, size, rows, row, weight, rows.candidates.shape[1], np.int64(-1))
    size = _mix_sequence(mixture, size, sources.history, np.int64(1))
    size = _mix_sequence(mixture, size, sources.sequence, np.int64(0))
    size = _mix_copied(sources, size, node)
    for place in range(size):
        candidate, rank = candidates[place], 0
        for other in range(size):
            if rank == RANKS - 1:
                break
            share = candidates[other].share
            rank += share > candidate.share or (share == candidate.share and other < place)
        kind = candidate.matches[0] * _PAST_KINDS + _past_kind(candidate.matches[1])
        if candidate.copied >= 0 and candidate.matches[0] < _LONG_MATCH:
            kind = _MATCHED + candidate.copied
        candidate.cell = cell_of(candidate.share, rank, kind, _KINDS)
        probability = calibrated(sources.calibration, candidate.cell, candidate.share)
        candidate.probability = min(probability, _CERTAIN)
    return size


@compiled_part
def _past_kind(kind: int) -> int:
    """Return the coarser kind of a match in the history."""
    return kind if kind == 0 else 1 if kind < 3 else 2 if kind < 6 else 3 if kind < MATCHES - 1 else 4


@compiled_part
def _mix_alternatives(mixture: Mixture, rows: Rows) -> int:
    """Add the target's candidates one position earlier, before all others; return their number."""
    recent, alternative, size = mixture.recent, mixture.alternative, np.int64(0)
    orders = len(alternative)
    for place in range(orders):
        alternative[place] = recent[place + 1]
    row = _longest_row(rows, alternative, orders, 1)
    if row < 0:
        return size
    size = _mix_row(mixture, size, rows, row, _BESIDE_WEIGHT, rows.candidates.shape[1], recent[0])
    for place in range(1, orders):
        alternative[place] = recent[place]
    for rank in range(min(_BESIDE, rows.candidates.shape[1])):
        alternative[0] = rows.candidates[row, rank]
        if alternative[0] == recent[0] or not rows.shares[row, rank]:
            continue
        after = _longest_row(rows, alternative, orders, _LONG)
        if after >= 0:
            weight = _AFTER_WEIGHT * np.float32(rows.shares[row, rank]) / np.float32(FULL)
            size = _mix_row(mixture, size, rows, after, weight, _AFTER, np.int64(-1))
    return size


@compiled_part
def _longest_row(rows: Rows, ngram: np.ndarray, orders: int, least: int) -> int:
    """Return the row of the longest context of an n-gram with at least `least` tokens, or -1."""
    for order in range(orders, least - 1, -1):
        row = find_row(rows, ngram, order)
        if row >= 0:
            return row
    return -1


@compiled_part
def _mix_row(mixture: Mixture, size: int, rows: Rows, row: int, weight: float, most: int, but: int) -> int:
    """Add the first `most` candidates of a row, except the token `but`; return the number of candidates."""
    for rank in range(min(most, rows.candidates.shape[1])):
        if not rows.shares[row, rank]:
            break
        token = np.int64(rows.candidates[row, rank])
        if token != but:
            share = weight * np.float32(rows.shares[row, rank]) / np.float32(FULL)
            size = max(size, _add(mixture, size, token, share) + 1)
    return size


@compiled_part
def _mix_sequence(mixture: Mixture, size: int, sequence: IndexArrays, which: int) -> int:
    """Add continuations in a sequence; return the number of candidates."""
    matches, longest = mixture.matches, mixture.longest[which]
    count, total = find_matches(sequence, mixture.recent, matches), np.float32(0)
    longest.length = 0
    for number in range(count):
        total += _PLACE_WEIGHTS[match_kind(matches[number].length)]
        if matches[number].length > longest.length:
            longest.place, longest.length = matches[number].place, matches[number].length
    weight = _MATCH_WEIGHTS[which, match_kind(longest.length)]
    _fade(mixture, size, weight)
    for number in range(count):
        kind = match_kind(matches[number].length)
        share = weight * _PLACE_WEIGHTS[kind] / total
        place = _add(mixture, size, token_at(sequence, matches[number].place), share)
        candidate = mixture.candidates[place]
        candidate.matches[which] = max(candidate.matches[which], kind)
        size = max(size, place + 1)
    return size


@compiled_part
def _mix_copied(sources: Sources, size: int, node: Record) -> int:
    """Add tokens to be copied; return the number of candidates."""
    mixture = sources.mixture
    most, total = np.float32(0), np.float32(0)
    for row in range(HYPOTHESES):
        token, kind = token_to_copy(sources.copying, sources.sequence, node.copies[row])
        if token >= 0:
            most, total = max(most, weight(kind)), total + weight(kind)
    if total <= 0:
        return size
    _fade(mixture, size, most)
    for row in range(HYPOTHESES):
        token, kind = token_to_copy(sources.copying, sources.sequence, node.copies[row])
        if token >= 0:
            place = _add(mixture, size, token, most * weight(kind) / total)
            if mixture.candidates[place].copied < 0:
                mixture.candidates[place].copied = kind
            size = max(size, place + 1)
    return size


@compiled_part
def _fade(mixture: Mixture, size: int, weight: float) -> None:
    """Scale all candidates down for a source of weight `weight`."""
    for place in range(size):
        mixture.candidates[place].share *= 1 - weight


@compiled_part
def _add(mixture: Mixture, size: int, token: int, share: float) -> int:
    """Increase the share of a candidate, adding it if new; return its place."""
    candidates = mixture.candidates
    for place in range(size):
        if candidates[place].token == token:
            candidates[place].share += share
            return place
    new = candidates[size]
    new.token, new.share, new.copied = token, share, -1
    new.matches[0] = new.matches[1] = 0
    return size
