"""REST: retrieval-based speculative decoding (He et al., 2311.08252) from a datastore of past text.

The longest suffix of the context in the datastore is found, 16 tokens down to 2; of up to 5,000 continuations of 10
tokens, the 64 most frequent prefixes are the tree (sections 3.2 and 3.3): the prefixes of a frequent one are at least
as frequent. If more places share the last three tokens, the newest are read.

Cost per step: some microseconds, and 3 ms more where all 5,000 continuations are read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ...model.remembered import remembered
from ...model.tree_model import TreeModel
from ...recycling.suffix_index import warm_up
from ...trees.draft import Context, Draft, DraftBuilder
from .._base import Drafter, check_at_least
from .datastore import Datastore, DatastoreError, tokenizer_of

_LEAST = 2
"""Shortest match; below it nothing is drafted."""


@dataclass
class Rest(Drafter):
    """Drafts the most frequent continuations of the last tokens in a datastore of past text."""

    datastore: str | Path
    """File made by `token-recycling datastore build`."""
    nodes: int = 64
    """Maximum number of drafted nodes: the most frequent prefixes."""
    num_tokens: int = 10
    """Tokens of a continuation, and so the depth of a tree."""
    max_matching_ngram_size: int = 16
    """Longest n-gram to look up; shorter ones follow where it has no match."""
    max_matches: int = 5000
    """Maximum number of continuations counted."""

    def __post_init__(self) -> None:
        check_at_least(1, self, "nodes", "num_tokens", "max_matches")
        if self.max_matching_ngram_size < _LEAST:
            raise ValueError(f"max_matching_ngram_size must be >= {_LEAST}, got {self.max_matching_ngram_size}")
        self._store = Datastore(self.datastore)
        self._checked = False
        """Whether the last target's tokenizer is known to be the datastore's."""

    def fork(self) -> Rest:
        """Open the datastore again: it is read-only and not copied into memory."""
        return replace(self)

    def warm_up(self, device: torch.device) -> None:
        warm_up()

    def fit(self, target: TreeModel) -> None:
        store = self._store
        if store.vocab_size > target.embedded:
            raise DatastoreError(
                f"{store.path}: ids must be below {target.embedded}, the target's vocabulary, got "
                f"{store.vocab_size - 1}; build a datastore with --model of this target"
            )
        theirs = remembered(target.model, "tokenizer", lambda: tokenizer_of(target.model), values_matter=False)
        self._checked = bool(store.tokenizer and theirs)
        if self._checked and store.tokenizer != theirs:
            raise DatastoreError(
                f"{store.path}: its tokenizer must be the target's, {theirs}, got {store.tokenizer}; "
                "build a datastore with --model of this target"
            )

    def start(self, prompt: torch.Tensor, target: TreeModel) -> Rest:
        self.warm_up(target.device)
        self.fit(target)
        return self

    def draft(self, context: Context) -> Draft:
        recent, length = (
            context.tokens[-self.max_matching_ngram_size :].cpu().numpy(),
            min(self.num_tokens, context.remaining),
        )
        found = self._store.continuations(recent, _LEAST, length, self.max_matches)
        if not len(found):
            return Draft.chain(context.root)
        draft = DraftBuilder(int(recent[-1]))
        nodes: dict[tuple[int, ...], int] = {(): 0}
        counts = {(): len(found), **frequent_prefixes(found, self.nodes)}
        for prefix in list(counts)[1:]:
            share = counts[prefix] / counts[prefix[:-1]]
            nodes[prefix] = draft.add(nodes[prefix[:-1]], prefix[-1], share)
        return draft.draft()

    def describe(self) -> str:
        unsure = "" if self._checked else ", its tokenizer not checked"
        return f"rest: at most {self.nodes} nodes from {self._store.path.name} of {len(self._store):,} tokens{unsure}"


def frequent_prefixes(continuations: np.ndarray, most: int) -> dict[tuple[int, ...], int]:
    """Return the `most` most frequent prefixes of `continuations` (m, length) with their counts, shorter ones first,
    then the more frequent.

    The continuations must be sorted, so that equal prefixes are adjacent. A negative token ends a continuation. Of
    equally frequent prefixes the shorter ones are taken.
    """
    m, length = continuations.shape
    new = np.ones((length, m), dtype=bool)
    np.logical_or.accumulate(continuations[1:] != continuations[:-1], axis=1, out=new[:, 1:].T)
    # Prefixes are numbered by depth, then by the first row that has them: each is a run of rows.
    starts = np.flatnonzero(new)
    counts = np.diff(starts, append=length * m)
    kept = np.logical_and.accumulate(continuations >= 0, axis=1).T.reshape(-1)[starts]
    starts, counts = starts[kept], counts[kept]
    order = starts - counts * (length * m)
    if len(order) > most:
        best = np.argpartition(order, most)[:most]
        starts, counts, order = starts[best], counts[best], order[best]
    best = np.lexsort((order, starts // m))
    return {
        tuple(continuations[start % m, : start // m + 1].tolist()): count
        for start, count in zip(starts[best].tolist(), counts[best].tolist(), strict=True)
    }
