"""Compiles the loops of drafting before they are needed: one tiny call of each, with arrays of the types that decoding
passes. Called where a text begins, so that no step waits for it. Cost: see `compiled`; the second time nothing.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from .._util.topk import top_candidates
from ..costs.budget import NO_COSTS
from ..trees.templates import chain
from .best_first import GrowingTree, Limits, TemplateArrays, count_chosen, fill, grow
from .ngram_matrix import NgramMatrix
from .ngrams import ngrams_below
from .occurrences import LONGEST, Occurrences, Recorder
from .suffix_automaton import SuffixAutomaton


@cache
def warm_up(device: torch.device, *, fills: bool, remembers: bool, favours: bool) -> None:
    """What trees of candidates need that a target on `device` gives: `fills` templates or grows best first, and
    learns, where rows remember or favour.
    """
    matrix = NgramMatrix(2, k=1, orders=1, past=1)
    ids, probabilities = top_candidates(torch.zeros(2, 2, device=device), 1)
    tokens = np.zeros(2, np.int64)
    matrix.foresees(tokens[:, None], tokens)
    matrix.learn(tokens[:, None], ids, probabilities, remembers=remembers / 2, favours=favours / 2)
    Recorder(matrix.past).add([0] * LONGEST, ends=True)
    sources = matrix.sources(Occurrences(tokens))
    growing, root = GrowingTree.empty(2, 1, 1), np.zeros(LONGEST, np.int64)
    if fills:
        nodes = fill(growing, root, sources, TemplateArrays.of(chain(1)), 1)
    else:
        nodes = grow(growing, root, sources, Limits(NO_COSTS, 1, 1))
    count_chosen(growing, nodes, tokens, matrix.calibration)
    ngrams_below(growing.recent[:1], np.zeros(1, np.int64), tokens[:1])


@cache
def warm_up_suffix() -> None:
    """What is needed where the suffix alone drafts."""
    SuffixAutomaton([0, 0]).branch(1)
