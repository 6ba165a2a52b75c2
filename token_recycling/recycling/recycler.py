"""Draft for one sequence, and learn from the verified steps (Luo et al., 2408.08696).

A `Recycler` belongs to one sequence: its index, its draft, and the recorder that appends it to the history of all
outputs. State shared by sequences is in the `NgramMatrix`. One call of compiled code (`advance`) does all computation
of a sequence in a step: it counts which candidates of the last draft were right, reads the new tokens, and grows the
next draft, most valuable node first. A node's value is the product of the probabilities along its path: its expected
gain in tokens (Sequoia, 2402.12374, section 4.1; here at every step, as in EAGLE-2). Nodes are added until more would
not pay (`costs`). A chain is a tree with one child per node; a template is filled with the candidates of its ranks.

This module imports neither transformers nor torch nor an engine. Learning depends only on tokens and logits, never on
clocks or random numbers, so all ranks of a tensor-parallel engine learn the same. Cost per step: some ten microseconds
per sequence, and two per node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .._util.compiled import Record, compiled, compiled_inline, compiled_part
from .._util.topk import top_candidates
from ..costs import NO_COSTS, may_pay
from . import copying
from .calibration import OUTCOMES, corrected, corrections, count, count_chain
from .copying import COPY, COPYING, HYPOTHESES, begin_draft, continue_copies, find, follow
from .mixture import Mixture, Sources, mix
from .ngram_matrix import NgramMatrix, Options
from .ngrams import ABSENT, Rows
from .suffix_index import BREAK, LONGEST, IndexArrays, Recorder, SuffixIndex, append_one

if TYPE_CHECKING:
    from ..grammar.state import State
    from ..grammar.statistics import Candidates, GrammarStatistics
    from ..trees.templates import Template

_NO_MASK = np.zeros(0, np.int32)
"""An empty mask: no candidates are looked up."""
_NO_TOKENS = np.zeros(0, np.int64)
_NOT_READ, _NO_DRAFT, _NO_PARENT = -1, -1, -1
"""Arguments of `advance` for nothing to read, nothing to draft, and no token to add."""
CHILDREN = 16
"""Maximum candidates of one node."""
NODE = np.dtype(
    [
        ("token", np.int64),
        ("parent", np.int64),
        ("depth", np.int64),
        ("rank", np.int64),  # among the parent's candidates
        ("value", np.float32),  # probability that the node is accepted
        ("count", np.int64),  # number of candidates
        ("drafted", np.int64),  # number of them that became children
        ("candidates", np.int64, (CHILDREN,)),  # most probable first
        ("probabilities", np.float32, (CHILDREN,)),
        ("cells", np.int64, (CHILDREN,)),  # bins of the calibration
        ("copies", COPY, (HYPOTHESES,)),  # where copying may continue
    ],
    align=True,
)
"""A node in order of growth. Unlike those of a `Draft`, nodes have candidates: the next node is grown from them, and
after the step the right ones are counted.
"""
SEQUENCE = np.dtype(
    [
        ("recent", np.int64, (LONGEST,)),  # the last tokens, newest first
        ("outcomes", OUTCOMES),
        ("copying", COPYING),
        ("most_nodes", np.int64),  # without the root
        ("most_children", np.int64),  # per node; 1 for chains
        ("corrected", np.bool_),  # whether probabilities along chains are corrected
        ("counted", np.bool_),  # whether outcomes are counted in the calibration
    ],
    align=True,
)
"""State of a sequence from step to step, except its draft and index; and its drafting options."""
TEMPLATE_NODE = np.dtype([("parent", np.int64), ("rank", np.int64), ("node", np.int64)], align=True)
"""A node of a template, to be filled with the candidate of that rank; and the draft node that fills it, -1 if it was
left out.
"""


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
        """Start with the `prompt` (length,), integers; `nodes`: maximum drafted nodes.

        `suffix`: search the sequence itself. `template`: filled instead of growing a tree; it branches at most
        `CHILDREN` times per node. `corrected`: see `SEQUENCE`. `records_prompt`: also record the end of the prompt, so
        that its continuation is found again. `learns`: whether the sequence leaves a trace in the matrix.
        """
        self.matrix, self.nodes, self.learns = matrix, nodes, learns
        self.recorder = Recorder(matrix.history, prompt if records_prompt else None)
        self._searched = suffix
        self._length, self._last = len(prompt), int(prompt[-1])
        self.recorded = len(prompt)
        """Number of tokens passed to the recorder, the prompt included."""
        self._read = 0
        """Tokens of the sequence up to the last draft: those in the index."""
        self._written: list[int] = []
        """Tokens observed since then."""
        self._index, self._ahead = SuffixIndex(), 0
        """Index of the predicted output (`_ahead` tokens), then of the sequence."""
        self._sequence = sequence = np.zeros(1, SEQUENCE)
        sequence["copying"]["place"], sequence["copying"]["prompt"] = ABSENT, len(prompt)
        sequence["recent"] = ABSENT
        sequence["most_nodes"], sequence["most_children"] = nodes, 1 if chains else CHILDREN
        sequence["corrected"], sequence["counted"] = corrected, learns
        self._template = np.zeros(0 if template is None else len(template), TEMPLATE_NODE)
        if template is not None:
            self._template["parent"], self._template["rank"] = template.parents, template.ranks
        self._tree = np.zeros(nodes + 1, NODE)
        self._tree["copies"]["place"] = ABSENT
        self.grown = 0
        """Nodes of the draft, the root included; 0 once its outcome was counted."""
        self._bound: tuple[IndexArrays, IndexArrays, tuple] | None = None
        """The indexes of the last call of `advance`, and the arguments that stay valid as long as these do."""

    def predict(self, tokens: Sequence[int] | np.ndarray, answered: int = 0) -> None:
        """Set the predicted output, tokens (n,), before the first draft: drafts copy from it first. `answered`: number
        of tokens at the end of the prompt that are already output.
        """
        if len(tokens):
            self._searched, self._ahead = True, len(tokens) + 1
            self._index.extend([*tokens, BREAK])
            copying.predict(self._sequence["copying"], self._length - answered, len(tokens))

    @property
    def predicted(self) -> int:
        """Number of tokens read so far that were copied from the prediction."""
        return copying.predicted(self._sequence["copying"])

    def continues(self, tokens: np.ndarray) -> bool:
        """Return whether a sequence (length,) continues the tokens read so far."""
        return self._length <= len(tokens) and bool(tokens[self._length - 1] == self._last)

    # Drafts

    def draft(self, tokens: np.ndarray, max_depth: int, costs: np.ndarray = NO_COSTS, ratio: float = 1.0) -> np.ndarray:
        """Return a draft after the sequence `tokens` (length,), integers: (n,) of `NODE` in order of growth, valid
        until the next draft.

        No node is deeper than `max_depth`. `costs` (m,) float64: time of verifying 1, 2, ... nodes, in any unit; empty
        if every node pays. `ratio`: accepted / predicted tokens of earlier drafts, which scales the expected gain of a
        node.
        """
        paying, _ = self.grow(tokens, max_depth, costs=costs, ratio=ratio)
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
        """Draft within a grammar, as `draft` does. Return the nodes, and the acceptance probability (n,) float32 of
        each given an accepted parent. `state`: grammar state at the end of the sequence.
        """
        from ..grammar.grow import grow

        self.grow(tokens, max_depth, least=math.inf, mask=state.mask)
        tree = self._tree

        def candidates(number: int) -> Candidates:
            node, count = tree[number], tree["count"][number]
            return [*zip(node["candidates"][:count].tolist(), node["probabilities"][:count].tolist(), strict=True)]

        def propose(parent: int, token: int, probability: float, after: State | None) -> Candidates:
            mask = _NO_MASK if after is None else after.mask
            self._advance(max_depth=max_depth, parent=parent, token=token, probability=probability, mask=mask)
            return [] if after is None else candidates(self.grown - 1)

        first, root = candidates(0), int(tree["token"][0])
        _, _, confidence = grow(state, first, root, propose, grammar_statistics, max_depth, self.nodes, costs, ratio)
        return tree[: len(confidence)], np.array(confidence, np.float32)

    def chain(self, nodes: int) -> list[int]:
        """Return the drafted tokens of a chain with `nodes` nodes, the root included."""
        return self._tree["token"][1:nodes].tolist()

    def gains(self, nodes: int) -> np.ndarray:
        """Return the expected gains (nodes - 1,) float32 of the first nodes of a draft after the root."""
        return self._tree["value"][1:nodes].copy()

    def grow(
        self,
        tokens: np.ndarray,
        max_depth: int,
        least: float = 0.0,
        costs: np.ndarray = NO_COSTS,
        ratio: float = 1.0,
        mask: np.ndarray = _NO_MASK,
    ) -> tuple[int, float]:
        """Read the new tokens of a sequence (length,), which reveal the outcome of the last draft, and grow a draft of
        nodes that gain more than `least`. Return how many nodes pay, and the gain of the best candidate that was not
        added, 0 if none. See `draft`; `mask` restricts the candidates after the root, as in `advance`.
        """
        if len(tokens) > self.recorded:
            self.observe(tokens[self.recorded :].tolist(), ends=False)
        self._length, self._last, self._written = len(tokens), int(tokens[-1]), []
        written = tokens[self._read :].astype(np.int64)
        return self._advance(written, max(max_depth, 0), least, costs, ratio, mask=mask)

    def grow_further(self, max_depth: int, least: float) -> float:
        """Add the nodes that gain more than `least`; return the gain of the best candidate that was not added."""
        _, gain = self._advance(max_depth=max(max_depth, 0), least=least)
        return gain

    def _advance(
        self,
        written: np.ndarray | None = None,
        max_depth: int = _NO_DRAFT,
        least: float = 0.0,
        costs: np.ndarray = NO_COSTS,
        ratio: float = 1.0,
        parent: int = _NO_PARENT,
        token: int = 0,
        probability: float = 0.0,
        mask: np.ndarray = _NO_MASK,
    ) -> tuple[int, float]:
        """Call `advance` with the tokens `written` since the last draft, to count its outcome; they are indexed if the
        sequence is searched. Return how many nodes pay, and the gain of the best candidate that was not added.
        """
        outcome_of, indexed = 0, _NOT_READ
        if written is not None:
            outcome_of, self.grown = self.grown, 0
            indexed, self._read = self._read if self._searched else _NOT_READ, self._read + len(written)
            if self._searched and self._ahead + self._read > len(self._index.arrays.tokens):
                self._index.reserve(len(written))
        matrix, index = self.matrix, self._index.arrays
        history, bound = matrix.history.arrays, self._bound
        if bound is None or bound[0] is not index or bound[1] is not history:
            own, shared = (self._sequence, self._tree, self._template, *index), (*matrix.rows, *history)
            state = matrix.calibration, matrix.outcomes, *matrix.workspace
            bound = self._bound = index, history, (*own, *shared, *state)
        paying, self.grown, gain = advance(
            *bound[2],
            _NO_TOKENS if written is None else written,
            outcome_of,
            indexed,
            self.grown,
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

    # Learning

    def observe(self, written: Sequence[int], ends: bool) -> None:
        """Record the tokens of a step now instead of with the next draft; `ends`: the sequence ends there, so the
        tokens are also read.
        """
        if self.learns:
            self.recorder.add(written, ends)
        self.recorded += len(written)
        self._written += written
        if ends:
            self._advance(np.array(self._written, np.int64))
            self._written = []

    def forget_draft(self) -> None:
        """Discard the last draft, which was not verified."""
        self.grown = 0

    def ngrams(self, parents: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return the n-gram (n, orders) int64 at each node of a tree (n,) below the newest token of the sequence."""
        orders = self.matrix.orders
        ngrams = np.empty((len(parents), orders), np.int64)
        ngrams[:, 0] = tokens
        ngrams[0] = self._sequence["recent"][0, :orders]
        for place in range(1, orders):
            ngrams[1:, place] = ngrams[parents[1:], place - 1]
        return ngrams


@compiled(allocates=False)
def advance(
    sequences: np.ndarray, tree: np.ndarray, template: np.ndarray,
    index_tokens: np.ndarray, index_before: np.ndarray, index_newest: np.ndarray, index_added: np.ndarray,
    row_candidates: np.ndarray, row_shares: np.ndarray, row_keys: np.ndarray,
    history_tokens: np.ndarray, history_before: np.ndarray, history_newest: np.ndarray, history_added: np.ndarray,
    calibration: np.ndarray, outcomes: np.ndarray,
    mixed: np.ndarray, recent: np.ndarray, alternative: np.ndarray, matches: np.ndarray, longest: np.ndarray,
    written: np.ndarray, outcome_of: int, indexed: int, grown: int, max_depth: int, least: float, costs: np.ndarray,
    ratio: float, parent: int, token: int, probability: float, mask: np.ndarray,
) -> tuple[int, int, float]:  # fmt: skip
    """Count the outcome of the last draft, read the tokens written since, and draft: all computation of a sequence in a
    step. Return how many nodes pay, the root included, how many have grown, and the gain of the best candidate that was
    not added, 0 if none.

    This is a single function because numba compiles all callees again for each function called from Python. The first
    arguments are constant from step to step: one sequence with its draft, `template` (empty where trees grow) and
    index; then the shared state, the arrays of an `NgramMatrix`. Tuples of them would cost six microseconds more in
    numba.

    `written` (n,) int64: tokens since the last draft; they reveal the outcome of its `outcome_of` nodes (0: already
    counted) and are indexed from number `indexed` on (-1: not at all).

    Nodes are added to a draft of `grown` nodes, 0 for a new draft, while more may pay; none is deeper than `max_depth`
    (-1: no draft), none gains `least` or less. `costs` (m,) float64: time of verifying 1, 2, ... nodes, in any unit;
    empty if every node pays. `ratio`: accepted / predicted tokens of earlier drafts, which scales gains.

    A non-empty `mask` (see `_keep_allowed`) restricts the candidates of the first added node. With a `parent`, that
    node is the only one: `token`, with its probability; its candidates are not looked up if the mask is empty.
    """
    sequence, index = sequences[0], IndexArrays(index_tokens, index_before, index_newest, index_added)
    copying = sequence.copying
    sources = Sources(
        Rows(row_candidates, row_shares, row_keys),
        index,
        IndexArrays(history_tokens, history_before, history_newest, history_added),
        calibration,
        copying,
        Mixture(mixed, recent, alternative, matches, longest),
    )
    if outcome_of and sequence.counted:
        _count_chosen(tree, outcome_of, written, calibration)
    if outcome_of and sequence.corrected:
        count_chain(tree, outcome_of, written, sequence.outcomes, outcomes[0])
    if indexed >= 0:
        _read(index, copying, written, indexed)
    if max_depth < 0:
        return 0, 0, 0.0
    if parent >= 0:
        _put_below(tree, grown, parent, tree[parent].drafted, token, np.float32(probability), copying, index)
        if not len(mask):
            return 0, grown + 1, 0.0
    elif grown == 0:
        _begin(sequence, tree, written)
        if len(template):
            template[0].node = template[0].rank = 0
        if len(index.tokens):
            begin_draft(copying, index, tree)
    correction = corrections(sequence.outcomes, outcomes[0]) if sequence.corrected else (1.0, 1.0)
    paying, gain, expected, rate = max(grown, 1), 0.0, 1 / ratio, 0.0  # in units of the unscaled gains
    added = grown == 0 or parent >= 0
    while True:
        if added:
            _consider(tree, grown, sequence.recent, sources)
            if len(mask):
                _keep_allowed(tree[grown], mask)
            grown, expected = grown + 1, expected + gain
            if parent >= 0:
                return 0, grown, 0.0
            if not len(costs):
                paying = grown
            elif expected / costs[grown - 1] >= rate:
                paying, rate = grown, expected / costs[grown - 1]
        if grown > sequence.most_nodes:
            return paying, grown, 0.0
        if len(template):
            above, rank, gain = _next_of_template(tree, grown - 1, template, max_depth)
        else:
            above, rank, gain = _next(tree, grown, sequence.most_children, max_depth, correction)
        if gain <= least or not may_pay(costs, grown, expected, rate, gain):
            return paying, grown, gain
        token, probability = tree[above].candidates[rank], tree[above].probabilities[rank]
        _put_below(tree, grown, above, rank, token, np.float32(probability), copying, index)
        if sequence.most_children == 1:
            tree[grown].value = gain
        added = True


@compiled_part
def _begin(sequence: Record, tree: np.ndarray, written: np.ndarray) -> None:
    """Begin a tree with the newest token, after tokens (n,) int64 that were written since the last tree began."""
    recent, count = sequence.recent, len(written)
    for place in range(LONGEST - 1, -1, -1):
        recent[place] = written[count - 1 - place] if place < count else recent[place - count]
    root = tree[0]
    root.token, root.parent, root.rank, root.depth, root.value = recent[0], -1, 0, 0, 1


@compiled_part
def _read(index: IndexArrays, copying: Record, tokens: np.ndarray, indexed: int) -> None:
    """Index new tokens (n,) int64 of a sequence of which `indexed` are indexed, and update the state of copying."""
    for place in range(len(tokens)):
        if indexed + place >= copying.prompt:
            follow(copying, index, tokens[place])
        append_one(index, tokens[place])


@compiled_part
def _put_below(
    tree: np.ndarray, node: int, parent: int, rank: int, token: int, probability: float, copying: Record,
    index: IndexArrays,
) -> None:  # fmt: skip
    """Add a token below a node, as the newest node, with that rank among its parent's candidates."""
    new, above = tree[node], tree[parent]
    new.token, new.parent, new.depth, new.rank = token, parent, above.depth + 1, rank
    new.value = above.value * probability
    new.count = new.drafted = 0
    if above.drafted <= rank:
        above.drafted = rank + 1
    continue_copies(copying, index, tree, parent, node, token)


@compiled_inline
def _consider(tree: np.ndarray, node: int, recent: np.ndarray, sources: Sources) -> None:
    """Find the candidates after the newest node; `recent` (LONGEST,) int64: the tokens up to the root, newest first."""
    new, mixture, filled, above = tree[node], sources.mixture, np.int64(0), np.int64(node)
    for place in range(LONGEST):
        if place < new.depth:
            mixture.recent[place], above = tree[above].token, tree[above].parent
        else:
            mixture.recent[place] = recent[place - new.depth]
    for number in range(mix(sources, new)):
        candidate, place = mixture.candidates[number], filled
        while place > 0 and new.probabilities[place - 1] < candidate.probability:
            if place < CHILDREN:
                new.candidates[place], new.cells[place] = new.candidates[place - 1], new.cells[place - 1]
                new.probabilities[place] = new.probabilities[place - 1]
            place -= 1
        if place < CHILDREN:
            new.candidates[place], new.cells[place] = candidate.token, candidate.cell
            new.probabilities[place] = candidate.probability
            filled = min(filled + 1, np.int64(CHILDREN))
    new.count, new.drafted = filled, 0
    if node == 0:
        longest = mixture.longest[0]
        find(sources.copying, tree, longest.place, longest.length)


@compiled_part
def _keep_allowed(node: Record, mask: np.ndarray) -> None:
    """Drop the candidates of a node that a grammar forbids, also for the calibration. `mask` (words,) int32: one bit
    per token, lowest first, set if the token is allowed.
    """
    filled = np.int64(0)
    for rank in range(node.count):
        token = node.candidates[rank]
        if token < 32 * len(mask) and mask[token >> 5] >> (token & 31) & 1:
            node.candidates[filled], node.cells[filled] = token, node.cells[rank]
            node.probabilities[filled] = node.probabilities[rank]
            filled += 1
    node.count = filled


@compiled_part
def _next(
    tree: np.ndarray, grown: int, children: int, max_depth: int, correction: tuple[float, float]
) -> tuple[int, int, float]:
    """Return the parent, rank and probability of the best candidate among `grown` nodes; probability 0: none."""
    parent, best = np.int64(-1), np.float32(0.0)
    for number in range(grown):
        node = tree[number]
        rank = node.drafted
        if rank < node.count and rank < children and node.depth < max_depth:
            value = node.value * node.probabilities[rank]
            if value > best:
                parent, best = np.int64(number), value
    if parent < 0:
        return parent, np.int64(0), 0.0
    if children > 1:
        return parent, tree[parent].drafted, np.float64(best)
    probability = corrected(tree[parent].probabilities[0], correction)
    return parent, np.int64(0), np.float64(tree[parent].value * probability)


@compiled_part
def _next_of_template(tree: np.ndarray, newest: int, template: np.ndarray, max_depth: int) -> tuple[int, int, float]:
    """Return the same for a template. The root's `rank` is the number of the last handled node, which `newest` fills.
    Nodes without a candidate of their rank are left out with their descendants.
    """
    handled = template[0].rank
    template[handled].node = newest
    for place in range(handled + 1, len(template)):
        parent, rank = template[template[place].parent].node, template[place].rank
        if parent >= 0 and rank < tree[parent].count and tree[parent].depth < max_depth:
            template[0].rank = place
            return parent, rank, 1.0
        template[place].node = -1
    return np.int64(-1), np.int64(0), 0.0


@compiled_part
def _count_chosen(tree: np.ndarray, nodes: int, chosen: np.ndarray, calibration: np.ndarray) -> None:
    """Count which candidates were right along `chosen`, the tokens after the root of a draft of `nodes` nodes."""
    number = 0
    for place in range(len(chosen)):
        node, token = tree[number], chosen[place]
        for rank in range(node.count):
            count(calibration, node.cells[rank], node.candidates[rank] == token)
        parent, number = number, -1
        for child in range(parent + 1, nodes):
            if tree[child].parent == parent and tree[child].token == token:
                number = child
                break
        if number < 0:
            return


def warm_up() -> None:
    """Compile drafting and learning before a request needs them."""
    prompt, options = np.zeros(2, np.int64), Options(k=1, orders=1, history=LONGEST)
    recycler = Recycler(options.new_matrix(2), prompt, 1)
    recycler.predict(prompt)
    recycler.draft(prompt, 1, np.ones(1))  # the root alone: one more node may be added
    recycler.observe([0] * LONGEST, ends=True)
    ngrams = recycler.ngrams(np.array([-1, 0]), np.zeros(2, np.int64))
    recycler.matrix.learn(ngrams, *top_candidates(np.zeros((2, 2), np.float32), 1))
