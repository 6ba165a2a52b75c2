"""The drafts of all requests of a step: chains that grow together in one compiled call (`candidates.forest`).

How many tokens a pass should verify follows from how long passes take: between two calls, so that scheduling, sampling
and this package's own work count too, by the number of tokens (`costs.online`).

Cost per step: some twenty microseconds, a few a request, and what `forest` says of tokens.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ..costs.budget import NO_COSTS
from ..costs.online import OnlineCurve
from .best_first import CHILDREN
from .forest import Asked, Forest, draft
from .ngrams import ngrams_at
from .occurrences import Recorder
from .recycler import Recycler

_OURS = "token_recycling"
_PIECE = 16
"""So many tokens of a text are added to the past at once."""
_PASS = 0.01
"""Seconds of a pass over one token, as long as nothing is known."""


class _Request:
    """What belongs to one request, kept on the engine's own record of it, with which it goes."""

    def __init__(self, forest: Forest) -> None:
        self.slot = forest.take()
        self.read = self.last = -1
        """How many tokens were read, and the last of them."""
        self.recorder: Recorder
        self.recorded = 0
        weakref.finalize(self, forest.give_back, self.slot)


class Batches:
    """Drafts for the requests of one replica, all at once."""

    def __init__(self, recycler: Recycler, most: int) -> None:
        """`most`: tokens of the largest pass that drafts are part of."""
        options = recycler.options
        self.recycler = recycler
        self.forest = Forest(recycler.nodes, options.orders, options.k, options.suffix)
        seed = _PASS * (1 + options.token_cost * np.arange(most))
        self.passes = OnlineCurve(seed) if options.token_cost else None
        """What passes take; None where every token is to be drafted."""
        self._tokens, self._began = 0, 0.0

    def passed(self, tokens: int) -> None:
        """The pass that is over had so many tokens, of requests that were drafted for alone; 0 if of others too."""
        self._tokens = tokens

    def draft(
        self, records: Sequence[Any], tokens: np.ndarray, rows: np.ndarray, lengths: np.ndarray, rooms: np.ndarray
    ) -> list[list[int]]:
        """A chain for each of n requests, which may be empty, of `rooms` (n,) tokens at most.

        `records` are the engine's, on which state is kept. The texts lie in `rows` (n,) of `tokens` (rows, longest)
        int32 and have `lengths` (n,). All int64.
        """
        now = time.perf_counter()
        if self._tokens and self.passes is not None:
            self.passes.took(self._tokens, now - self._began)
        self._tokens, self._began = 0, now
        requests = [
            self._request_of(record, tokens[row, :length])
            for record, row, length in zip(records, rows.tolist(), lengths.tolist(), strict=True)
        ]
        slots, counts = np.array([request.slot for request in requests], np.int64), np.empty(len(requests), np.int64)
        self.forest.reserve(slots, lengths)
        matrix, options = self.recycler.matrix, self.recycler.options
        asked = Asked(tokens, rows, slots, lengths, rooms, options.learns)
        costs = NO_COSTS if self.passes is None else self.passes.seconds
        draft(self.forest.arrays, asked, matrix.rows, matrix.past.arrays, matrix.calibration, costs, counts)
        if options.learns:
            for request, row, room in zip(requests, rows.tolist(), rooms.tolist(), strict=True):
                if request.read - request.recorded >= _PIECE or room <= 0:
                    request.recorder.add(tokens[row, request.recorded : request.read].tolist(), ends=True)
                    request.recorded = request.read
        drafted = self.forest.arrays.growing.tokens
        return [
            drafted[slot, 1 : count + 1].tolist() for slot, count in zip(slots.tolist(), counts.tolist(), strict=True)
        ]

    def _request_of(self, record: Any, text: np.ndarray) -> _Request:
        """The state of a request, whose text (length,) is to be read; one that is not a continuation is read anew."""
        request: _Request | None = getattr(record, _OURS, None)
        if request is None:
            request = _Request(self.forest)
            setattr(record, _OURS, request)
        if not 0 < request.read <= len(text) or text[request.read - 1] != request.last:
            self.forest.clear(request.slot)
            request.recorder, request.recorded = Recorder(self.recycler.matrix.past, text), len(text)
        request.read, request.last = len(text), int(text[-1])
        return request

    @classmethod
    def warm_up(cls, recycler: Recycler) -> None:
        """Compiles what a step needs, so that no request waits for it."""
        batches, record = cls(recycler.small(), 64), SimpleNamespace()
        tokens, one = np.zeros((1, 2 * _PIECE), np.int32), np.ones(1, np.int64)
        for length in (3, 5, 2 * _PIECE):
            batches.draft([record], tokens, 0 * one, length * one, one)
        batches.recycler.learn(ngrams_at(tokens, 3 * one, one, recycler.options.orders), torch.zeros(1, CHILDREN))
