"""Compile the functions of drafting before a request waits for them."""

from __future__ import annotations

import numpy as np

from .._util.topk import top_candidates
from .growth import put
from .options import Options
from .recycler import Recycler
from .suffix_index import LONGEST


def warm_up(tokens: type[np.integer]) -> None:
    """Compile drafting and learning for sequences of `tokens` of that type."""
    small = Options(k=1, orders=1, history=LONGEST)
    recycler, ids = Recycler(small.new_matrix(2), small, 1), np.zeros(2, tokens)
    sequence = recycler.begin(ids)
    recycler.predict(sequence, ids.tolist())
    recycler.draft_one(sequence, ids, 1, np.ones(1))  # the root alone: one more node may be added
    put(recycler._sequences.arrays, sequence.slot, recycler.matrix.sources(), 0, 0, 1.0, np.zeros(0, np.int32))
    recycler.observe(sequence, [0] * LONGEST, ends=True)
    ngrams = recycler.ngrams(sequence, np.array([-1, 0]), np.zeros(2, np.int64))
    recycler.learn(ngrams, *top_candidates(np.zeros((2, 2), np.float32), 1))
