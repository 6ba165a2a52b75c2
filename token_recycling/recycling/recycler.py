"""Draft for one sequence, or for a batch of them, and learn from the verified logits (Luo et al., 2408.08696).

A `Recycler` belongs to one sequence: its index, its draft, and the recorder that appends it to the history of all
outputs. What sequences share is in the `NgramMatrix`. This module imports neither transformers nor torch nor an engine,
and learning depends only on tokens and logits, never on clocks or random numbers, so that all ranks of a
tensor-parallel engine learn the same. Cost per step: some ten microseconds per sequence, and its nodes (`growth`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .._util.topk import top_candidates
from ..costs import NO_COSTS, least_gain, paying_prefix
from . import copying
from .growth import CHILDREN, TEMPLATE_NODE, advance, new_sequence, new_tree
from .ngram_matrix import NgramMatrix, Options
from .suffix_index import BREAK, LONGEST, IndexArrays, SuffixIndex, masked

if TYPE_CHECKING:
    from ..grammar.state import State
    from ..grammar.statistics import Candidates, GrammarStatistics
    from ..trees.templates import Template

_NO_MASK = np.zeros(0, np.int32)
"""An empty mask: no candidates are looked up."""
_NO_TOKENS = np.zeros(0, np.int64)
_NO_OUTCOME, _NOT_READ, _NO_DRAFT, _NO_PARENT = 0, -1, -1, -1
"""Arguments of `advance` where there is nothing to count, to read, to draft, or a token to add."""
_PIECE = 32
"""Tokens per piece of a sequence. The last `LONGEST` are repeated at the start of the next piece, so that a match is of
the longest kind there.
"""
_LOWER = 0.9
"""Share of the gain that paid in the last batch from which on nodes are added at once."""


class Recycler:
    """Drafts for one sequence and learns from its verified steps."""

    def __init__(
        self,
        matrix: NgramMatrix,
        prompt: np.ndarray,
        nodes: int,
        *,
        suffix: bool = True,
        template: Template | None = None,
        chains: bool = False,
        corrected: bool = False,
        records_prompt: bool = False,
        learns: bool = True,
    ) -> None:
        """Start with the `prompt` (length,), integers; `nodes`: most drafted nodes.

        `suffix`: search the sequence itself. `template`: filled instead of growing a tree; it branches at most
        `CHILDREN` times per node. `corrected`: see `SEQUENCE`. `records_prompt`: record the end of the prompt too, so
        that its continuation is found again. `learns`: whether the sequence leaves a trace in the matrix.
        """
        self.matrix, self.nodes, self.learns = matrix, nodes, learns
        self.recorder = Recorder(matrix.history, prompt if records_prompt else None)
        self._searched = suffix
        self._length, self._last = len(prompt), int(prompt[-1])
        self.recorded = len(prompt)
        """Tokens given to the recorder, the prompt included."""
        self._read = 0
        """Tokens in the index."""
        self._index = SuffixIndex()
        self._sequence = new_sequence(nodes, 1 if chains else CHILDREN, corrected, learns)
        copying.begin(self._copying, len(prompt))
        self._template = np.zeros(0 if template is None else len(template), TEMPLATE_NODE)
        if template is not None:
            self._template["parent"], self._template["rank"] = template.parents, template.ranks
        self._tree = new_tree(nodes + 1)
        self._grown = 0
        """Nodes of the tree; 0 once its outcome was counted."""
        self._bound: tuple[tuple[IndexArrays, IndexArrays], tuple] | None = None
        """The indexes of the last call of `advance`, and the arguments that stay the same as long as these do."""

    def predict(self, tokens: Sequence[int] | np.ndarray, answered: int = 0) -> None:
        """Set the predicted output, tokens (n,), before the first draft: drafts copy from it first. `answered`: how
        many tokens of the prompt are output already.
        """
        if len(tokens):
            self._searched = True
            self._index.extend([*tokens, BREAK])
            copying.begin(self._copying, self._length - answered, len(tokens))

    @property
    def predicted(self) -> int:
        """How many tokens of the sequence its prediction contained, counting tokens read so far."""
        return copying.predicted(self._copying)

    @property
    def _copying(self) -> np.ndarray:
        """The state of copying, (1,) of `COPYING`."""
        return self._sequence["copying"]

    def continues(self, tokens: np.ndarray) -> bool:
        """Return whether a sequence (length,) continues what was read."""
        return self._length <= len(tokens) and bool(tokens[self._length - 1] == self._last)

    # Drafts

    def draft(self, tokens: np.ndarray, max_depth: int, costs: np.ndarray = NO_COSTS, ratio: float = 1.0) -> np.ndarray:
        """Return a draft after the sequence `tokens` (length,), integers: (n,) of `NODE`, in order of growth, which
        holds until the next one.

        No node is deeper than `max_depth`. `costs` (m,) float64: time of verifying 1, 2, ... nodes, in any unit; empty
        where every node pays. `ratio`: accepted / predicted tokens of earlier drafts, which scales the expected gain of
        a node.
        """
        paying, _ = self._draft_after(tokens, max_depth, costs=costs, ratio=ratio)
        return self._tree[:paying]

    def draft_within(
        self,
        tokens: np.ndarray,
        max_depth: int,
        state: State,
        grammar_statistics: GrammarStatistics,
        costs: np.ndarray = NO_COSTS,
        ratio: float = 1.0,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draft within a grammar, as `draft` does. Return the nodes, and the probability (n,) float32 of each being
        accepted if its parent is. `state`: the grammar's state at the end of the sequence.
        """
        from ..grammar.grow import grow

        self._draft_after(tokens, max_depth, least=math.inf, mask=state.mask)
        tree = self._tree

        def candidates(number: int) -> Candidates:
            node, known = tree[number], tree["known"][number]
            return [*zip(node["candidates"][:known].tolist(), node["probabilities"][:known].tolist(), strict=True)]

        def propose(parent: int, token: int, probability: float, after: State | None) -> Candidates:
            mask = _NO_MASK if after is None else after.mask
            self._advance(max_depth=max_depth, parent=parent, token=token, probability=probability, mask=mask)
            return [] if after is None else candidates(self._grown - 1)

        first, root = candidates(0), int(tree["token"][0])
        _, _, confidence = grow(state, first, root, propose, grammar_statistics, max_depth, self.nodes, costs, ratio)
        return tree[: len(confidence)], np.array(confidence, np.float32)

    def chain(self, nodes: int) -> list[int]:
        """Return the drafted tokens of a chain of that many nodes."""
        return self._tree["token"][1:nodes].tolist()

    def gains(self, nodes: int) -> np.ndarray:
        """Return the expected tokens (nodes - 1,) float32 of the first nodes of a draft, without that of the root."""
        return self._tree["value"][1:nodes].copy()

    @property
    def _gains(self) -> np.ndarray:
        """(n,) float32: expected tokens of each grown node, in order of growth."""
        return self._tree["value"][1 : self._grown]

    def _draft_after(
        self,
        tokens: np.ndarray,
        max_depth: int,
        least: float = 0.0,
        costs: np.ndarray = NO_COSTS,
        ratio: float = 1.0,
        mask: np.ndarray = _NO_MASK,
    ) -> tuple[int, float]:
        """Read the new tokens of a sequence (length,), which tell the outcome of the last draft, and draft; see
        `_advance`.
        """
        length = len(tokens)
        if length > self.recorded:
            self._record(tokens[self.recorded :].tolist(), False)
        written = tokens[self._read :].astype(np.int64)
        self._length, self._last = length, int(tokens[-1])
        outcome_of, self._grown = self._grown, 0
        indexed = self._reserve(len(written))
        return self._advance(written, outcome_of, indexed, max(max_depth, 0), least, costs, ratio, mask=mask)

    def _reserve(self, tokens: int) -> int:
        """Reserve memory in the index for that many tokens to be read; return how many are in it, or `_NOT_READ`."""
        indexed = self._read
        self._read += tokens
        if not self._searched:
            return _NOT_READ
        self._index.reserve(tokens)
        return indexed

    def _advance(
        self,
        written: np.ndarray = _NO_TOKENS,
        outcome_of: int = _NO_OUTCOME,
        indexed: int = _NOT_READ,
        max_depth: int = _NO_DRAFT,
        least: float = 0.0,
        costs: np.ndarray = NO_COSTS,
        ratio: float = 1.0,
        parent: int = _NO_PARENT,
        token: int = 0,
        probability: float = 0.0,
        mask: np.ndarray = _NO_MASK,
    ) -> tuple[int, float]:
        """Do what `growth.advance` does. Return how many nodes pay, and the gain of the best one that was not added."""
        indexes = self._index.arrays, self.matrix.history.arrays
        bound = self._bound
        if bound is None or bound[0][0] is not indexes[0] or bound[0][1] is not indexes[1]:
            bound = self._bound = indexes, self._arrays()
        paying, self._grown, gain = advance(
            *bound[1],
            written,
            outcome_of,
            indexed,
            self._grown,
            max_depth,
            least,
            costs,
            ratio,
            parent,
            token,
            probability,
            mask,
        )
        return paying, gain

    def _arrays(self) -> tuple:
        """Return the first arguments of `advance`."""
        matrix = self.matrix
        return (
            self._sequence,
            self._tree,
            self._template,
            *self._index.arrays,
            *matrix.rows,
            *matrix.history.arrays,
            matrix.calibration,
            matrix.outcomes,
            *matrix.workspace,
        )

    # Learning

    def observe(self, written: Sequence[int], ends: bool) -> None:
        """Record the accepted tokens of the last draft now instead of with the next one; `ends`: the sequence ends
        there.
        """
        outcome_of, self._grown = self._grown, 0
        reads = ends and bool(self._copying["place"][0] >= 0)
        if outcome_of or reads:
            indexed = self._reserve(len(written)) if reads else _NOT_READ
            self._advance(np.array(written, np.int64), outcome_of, indexed)
        self._record(written, ends)

    def forget_draft(self) -> None:
        """Discard the last draft, which was not verified."""
        self._grown = 0

    def ngrams(self, parents: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return the n-gram (n, orders) int64 at each node of a tree (n,) below the newest token of the sequence."""
        orders = self.matrix.orders
        ngrams = np.empty((len(parents), orders), np.int64)
        ngrams[:, 0] = tokens
        ngrams[0] = self._sequence["recent"][0, :orders]
        for place in range(1, orders):
            ngrams[1:, place] = ngrams[parents[1:], place - 1]
        return ngrams

    def _record(self, written: Sequence[int], ends: bool) -> None:
        if self.learns:
            self.recorder.add(written, ends)
        self.recorded += len(written)


def draft_together(
    recyclers: Sequence[Recycler],
    sequences: Sequence[np.ndarray],
    max_depths: Sequence[int],
    costs: np.ndarray = NO_COSTS,
    ratio: float = 1.0,
) -> list[int]:
    """Draft for the sequences (length,) of a batch; return how many nodes of each pay, the root included.

    Of all sequences the most valuable nodes are kept. `costs` (m,) float64: time of verifying 1, 2, ... nodes of all of
    them. See `Recycler.draft`.
    """
    n = len(recyclers)
    if n == 1:
        paying, _ = recyclers[0]._draft_after(sequences[0], max_depths[0], costs=costs, ratio=ratio)
        return [paying]
    matrix = recyclers[0].matrix
    least = _LOWER * matrix.least_gain if len(costs) else 0.0
    drafts = [
        recycler._draft_after(tokens, max_depth, least)
        for recycler, tokens, max_depth in zip(recyclers, sequences, max_depths, strict=True)
    ]
    if not len(costs):
        return [paying for paying, _ in drafts]
    next_gains = np.array([gain for _, gain in drafts])
    while True:
        gains = [recycler._gains for recycler in recyclers]
        sizes, values = [len(own) for own in gains], np.concatenate(gains)
        order = np.argsort(-values, kind="stable")
        expected = np.empty(1 + len(values))
        expected[0], expected[1:] = n / ratio, values[order]
        expected = expected.cumsum()
        least = least_gain(costs, n, expected)
        growing = np.flatnonzero(next_gains > least)
        if not len(growing):
            break
        for row in growing.tolist():
            _, next_gains[row] = recyclers[row]._advance(max_depth=max(max_depths[row], 0), least=least)
    if math.isfinite(least):
        matrix.least_gain = least
    owners = np.repeat(np.arange(n), sizes)[order[: paying_prefix(costs, n, expected)]]
    return (1 + np.bincount(owners, minlength=n)).tolist()


class Recorder:
    """Appends one sequence to the shared history piece by piece, so that concurrent sequences do not interleave. A
    piece repeats the end of the one before, unless that is the newest in the history. A continuation already in the
    history is not added again.
    """

    def __init__(self, history: SuffixIndex, before: np.ndarray | None = None, piece: int = _PIECE) -> None:
        """`before` (n,): tokens before the sequence, matched but never drafted. `piece`: tokens added at once."""
        self._history, self._piece, self._written_to = history, piece, -1
        self._tokens: list[int] = [] if before is None else masked(before[-LONGEST:]).tolist()
        """The end of the last piece, or of `before`, and the tokens since."""
        self._lead = len(self._tokens)

    def add(self, tokens: Iterable[int], ends: bool = False) -> None:
        """Add tokens; `ends`: the sequence ends with them."""
        self._tokens.extend(tokens)
        if len(self._tokens) - self._lead < (1 if ends else self._piece):
            return
        with self._history.writing:
            if self._history.holds(self._tokens):
                self._written_to = -1  # the next piece does not continue the end of the history
            else:
                alone = len(self._history) == self._written_to
                self._history.extend(self._tokens[self._lead :] if alone else [BREAK, *self._tokens])
                self._written_to = len(self._history)
        self._tokens = self._tokens[-LONGEST:]
        self._lead = len(self._tokens)


def warm_up() -> None:
    """Compile drafting and learning, before a request waits for them."""
    prompt, options = np.zeros(2, np.int64), Options(k=1, orders=1, history=LONGEST)
    recycler = Recycler(options.new_matrix(2), prompt, 1)
    recycler.predict(prompt)
    recycler.draft(prompt, 1, np.ones(1))  # the root alone: one more node may be added
    recycler.observe([0] * LONGEST, ends=True)
    ngrams = recycler.ngrams(np.array([-1, 0]), np.zeros(2, np.int64))
    recycler.matrix.learn(ngrams, *top_candidates(np.zeros((2, 2), np.float32), 1))
