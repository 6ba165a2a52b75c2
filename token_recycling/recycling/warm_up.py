"""Compiles what drafting takes before a text waits for it."""

from __future__ import annotations

import numpy as np

from .._util.topk import top_candidates
from .growth import put
from .options import Options
from .recycler import Recycler
from .suffix_index import LONGEST


def warm_up(tokens: type[np.integer]) -> None:
    """Compile what drafting and learning take, for texts of `tokens` of that type."""
    small = Options(k=1, orders=1, past=LONGEST)
    recycler, ids = Recycler(small.new_matrix(2), small, 1), np.zeros(2, tokens)
    text = recycler.begin(ids)
    recycler.predict(text, ids.tolist())
    recycler.draft_one(text, ids, 1, np.ones(1))  # the root alone: there is room for one more
    put(recycler._texts.arrays, text.slot, recycler.matrix.sources(), 0, 0, 1.0, np.zeros(0, np.int32))
    recycler.observe(text, [0] * LONGEST, ends=True)
    ngrams = recycler.ngrams(text, np.array([-1, 0]), np.zeros(2, np.int64))
    recycler.learn(ngrams, *top_candidates(np.zeros((2, 2), np.float32), 1))
