"""Compile the functions of drafting before a request waits for them."""

from __future__ import annotations

import numpy as np

from .._util.topk import top_candidates
from .options import Options
from .recycler import Recycler
from .suffix_index import LONGEST

_PROMPT = np.zeros(2, np.int64)


def warm_up() -> None:
    """Compile drafting and learning."""
    options = Options(k=1, orders=1, history=LONGEST)
    recycler = Recycler(options.new_matrix(2), _PROMPT, 1)
    recycler.predict(_PROMPT)
    recycler.draft(_PROMPT, 1, np.ones(1))  # the root alone: one more node may be added
    recycler.observe([0] * LONGEST, ends=True)
    ngrams = recycler.ngrams(np.array([-1, 0]), np.zeros(2, np.int64))
    recycler.matrix.learn(ngrams, *top_candidates(np.zeros((2, 2), np.float32), 1))
