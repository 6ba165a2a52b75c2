"""The candidates that a model computes anyway: the k most probable tokens after every node, with their probabilities.

On a CPU one compiled loop finds the largest logit of every group of 64, and the normalizer; the k largest logits are in
the k groups with the largest maximum. This takes less than half of the time of `topk` and `logsumexp`. Other devices
search the groups too, and copy only the k candidates to the host.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .compiled import compiled, compiled_part

if TYPE_CHECKING:
    import torch

_GROUP = 64
_LOG2E = np.float32(1.4426950408889634)
_HALF, _ONE, _LOWEST = np.float32(0.5), np.float32(1), np.float32(-126)
_FIRST = np.zeros(1, np.int64)
"""Index of the only row."""
_SERIES = tuple(np.float32(c) for c in (0.693147, 0.2402265, 0.0555041, 0.0096181))
"""2 to the power of x from -1/2 to 1/2 is 1 + c x + c x^2 + ..., to one part in 10,000."""


def top_candidates(
    logits: torch.Tensor | np.ndarray, k: int, rows: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the k most probable tokens of each row of logits (m, vocabulary), or only of `rows` (n,) int64, best
    first, and their probabilities: (n, k) int32 and (n, k) float32, on a CPU to one part in 1,000. Of equal logits the
    lower id comes first.
    """
    if not isinstance(logits, np.ndarray):
        import torch

        if logits.device.type != "cpu":
            return _top_on_device(logits, k, rows)
        logits = logits.detach()
        if logits.dtype == torch.float32:
            logits = logits.numpy()
    rows = np.arange(len(logits)) if rows is None else rows
    ids, probabilities = np.empty((len(rows), k), np.int32), np.empty((len(rows), k), np.float32)
    work = _Workspace.empty(logits.shape[1], k)
    if isinstance(logits, np.ndarray):
        _top(np.ascontiguousarray(logits, np.float32), rows, ids, probabilities, work)
        return ids, probabilities
    for place, row in enumerate(rows.tolist()):  # converts only rows that are read, while they are in the CPU cache
        converted = logits[row : row + 1].float().numpy()
        _top(converted, _FIRST, ids[place : place + 1], probabilities[place : place + 1], work)
    return ids, probabilities


def _top_on_device(logits: torch.Tensor, k: int, rows: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    import torch

    if rows is not None:
        logits = logits[torch.from_numpy(rows).to(logits.device)]
    ids, shares = packed_candidates(logits, k)
    return as_candidates(torch.stack([ids, shares]).cpu().numpy(), len(logits), k)


def packed_candidates(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k most probable tokens after each row of logits (..., vocabulary) and the bits of their probabilities,
    both (..., k) int32, so that they can be sent to the host with other numbers. For devices; nothing waits.
    """
    import torch

    flat = logits.flatten(0, -2)
    values, ids = grouped_topk(flat, k)
    shares = (values.float() - flat.float().logsumexp(dim=-1, keepdim=True)).exp()
    shape = (*logits.shape[:-1], k)
    return ids.to(torch.int32).view(shape), shares.view(torch.int32).view(shape)


def as_candidates(numbers: np.ndarray, n: int, k: int, rows: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the first `rows` of the n rows of `packed_candidates`, from contiguous int32 numbers: ids (rows, k) int32
    and probabilities (rows, k) float32.
    """
    ids, shares = np.ascontiguousarray(numbers.reshape(2, n, k)[:, :rows])
    return ids, shares.view(np.float32)


def grouped_topk(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest of each row of logits (n, vocabulary), descending, and their ids: (n, k) both. Equal logits
    may come in any order.

    As on a CPU, only the groups with the largest maximum are sorted: the vocabulary is read once. Every shape is static
    and nothing waits for the device.
    """
    import torch

    n, vocab_size = logits.shape
    groups = vocab_size // _GROUP
    if groups <= k:
        whole = logits.topk(k, dim=-1)
        return whole.values, whole.indices
    grouped = logits.narrow(1, 0, groups * _GROUP).reshape(n, groups, _GROUP)
    chosen = grouped.amax(dim=2).topk(k, dim=-1).indices
    within = torch.arange(_GROUP, device=logits.device)
    ids = (chosen.unsqueeze(2) * _GROUP + within).flatten(1)
    rest = torch.arange(groups * _GROUP, vocab_size, device=logits.device).expand(n, -1)
    ids = torch.cat([ids, rest], dim=1)
    values, places = logits.gather(1, ids).topk(k, dim=-1)
    return values, ids.gather(1, places)


@compiled_part
def _insert(best: np.ndarray, places: np.ndarray, row: int, value: float, place: int) -> None:
    """Insert a value larger than the last of `best` (k,), descending, after equal values, and its place into the same
    column of `places` (n, k).
    """
    at = len(best) - 1
    while at > 0 and value > best[at - 1]:
        best[at], places[row, at] = best[at - 1], places[row, at - 1]
        at -= 1
    best[at], places[row, at] = value, place


@compiled_part
def exceeded(logits: np.ndarray, row: int, least: float) -> bool:
    """Return whether a row of logits (n, vocabulary) has a value larger than `least`."""
    groups = logits.shape[1] // _GROUP
    for group in range(groups):
        larger = 0
        for place in range(_GROUP):  # without an early exit the loop is vectorized
            larger += logits[row, group * _GROUP + place] > least
        if larger:
            return True
    larger = 0
    for place in range(groups * _GROUP, logits.shape[1]):
        larger += logits[row, place] > least
    return larger > 0


class _Workspace(NamedTuple):
    """Arrays of one search, allocated outside compiled code, which compiles faster without allocations. All searches of
    a size share them: compiled code is not interrupted.
    """

    peaks: np.ndarray  # (whole groups,) float32: their largest logits
    highest: np.ndarray  # (k,) float32: the largest of these
    groups: np.ndarray  # (1, k) int32: their groups
    best: np.ndarray  # (k,) float32: the largest logits
    part: np.ndarray  # (_GROUP,) float32
    powers: np.ndarray  # (_GROUP,) int32
    scales: np.ndarray  # (_GROUP,) float32: the same memory

    @classmethod
    @cache
    def empty(cls, vocab_size: int, k: int) -> _Workspace:
        powers = np.empty(_GROUP, np.int32)
        highest, best = np.empty((2, k), np.float32)
        return cls(
            np.empty(vocab_size // _GROUP, np.float32),
            highest,
            np.empty((1, k), np.int32),
            best,
            np.empty(_GROUP, np.float32),
            powers,
            powers.view(np.float32),
        )


@compiled_part(fastmath={"reassoc", "contract", "nsz", "nnan"})
def _survey(logits: np.ndarray, row: int, work: _Workspace) -> float:
    """Fill in the largest logit of every whole group of one row; return the logarithm of the sum of exponentials.

    The exponential is written out, since a loop with a function call is not vectorized.
    """
    peaks, part, powers, scales = work.peaks, work.part, work.powers, work.scales
    highest = np.float32(-np.inf)
    for group in range(len(peaks)):
        peak = logits[row, group * _GROUP]
        for place in range(1, _GROUP):
            peak = max(peak, logits[row, group * _GROUP + place])
        peaks[group] = peak
        highest = max(highest, peak)
    rest = range(len(peaks) * _GROUP, logits.shape[1])
    for place in rest:
        highest = max(highest, logits[row, place])
    total = np.float32(0)
    for group in range(len(peaks)):
        for place in range(_GROUP):
            exponent = max((logits[row, group * _GROUP + place] - highest) * _LOG2E, _LOWEST)
            whole = np.int32(exponent - _HALF)  # rounds to nearest, since exponents are negative
            x = exponent - np.float32(whole)
            part[place] = _ONE + x * (_SERIES[0] + x * (_SERIES[1] + x * (_SERIES[2] + x * _SERIES[3])))
            powers[place] = (whole + np.int32(127)) << np.int32(23)
        for place in range(_GROUP):
            total += part[place] * scales[place]
    for place in rest:
        total += np.exp(logits[row, place] - highest)
    return highest + np.log(total)


@compiled(allocates=False)
def _top(logits: np.ndarray, rows: np.ndarray, ids: np.ndarray, probabilities: np.ndarray, work: _Workspace) -> None:
    vocab_size, k, groups = logits.shape[1], ids.shape[1], len(work.peaks)
    peaks, highest, best = work.peaks, work.highest, work.best
    for node in range(len(rows)):
        row = rows[node]
        normalizer = _survey(logits, row, work)
        for place in range(k):
            highest[place], best[place], ids[node, place] = -np.inf, -np.inf, 0
        for group in range(groups):
            if peaks[group] > highest[k - 1]:
                _insert(highest, work.groups, 0, peaks[group], group)
        for group in range(groups + 1):
            if group < groups and peaks[group] < highest[k - 1]:
                continue
            for token in range(group * _GROUP, min((group + 1) * _GROUP, vocab_size)):
                if logits[row, token] > best[k - 1]:
                    _insert(best, ids, node, logits[row, token], token)
        for place in range(k):
            probabilities[node, place] = np.exp(best[place] - normalizer)
