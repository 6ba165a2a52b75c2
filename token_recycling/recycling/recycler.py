"""Draft for one sequence or many, and learn from the verified logits (Luo et al., 2408.08696, and later work).

The knowledge is an `NgramMatrix`, which recyclers may share. This module imports neither transformers nor torch nor an
engine, and learning depends only on tokens and logits, never on clocks or random numbers, so that all ranks of a
tensor-parallel engine learn the same. Cost per step: about 20 microseconds, a few more per sequence, and the nodes
(`growth`).

Each sequence has a slot in arrays shared with compiled code, an index of its tokens, and a recorder that appends it to
the history of all outputs. A slot is freed when its sequence is garbage-collected, at any time and in any thread; its
last tokens are then recorded with the next draft.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .._util.topk import top_candidates
from ..costs.budget import NO_COSTS
from ..grammar.grow import Candidates, GrammarStatistics, grow
from .growth import Asked, SequenceArrays, Shape, count_chosen, draft, put, read_on
from .ngram_matrix import NgramMatrix
from .nodes import CHILDREN, GrowingTree, keep_allowed
from .options import Options
from .suffix_index import BREAK, LONGEST, SuffixIndex, masked

if TYPE_CHECKING:
    import torch

    from ..grammar.state import State
    from ..trees.tree import Tree

_OURS = "token_recycling"
_ROOT_ALONE = np.ones(1)
"""Costs by which no node pays."""
_NO_MASK = np.zeros(0, np.int32)
"""An empty mask: no candidates are looked up."""
_UNFINISHED = 16
"""Tokens per piece added to the history where the end of a sequence is not announced."""
_PIECE, _LEAD = 32, 8
"""Tokens per piece of a sequence, and how many of them are repeated at the start of the next piece."""


class Recycler:
    """Drafts for sequences and learns from verified steps."""

    def __init__(
        self,
        matrix: NgramMatrix,
        options: Options,
        nodes: int,
        *,
        template: Tree | None = None,
        chains: bool = False,
        corrected: bool = False,
        prompts: bool = False,
        learns: bool = True,
    ) -> None:
        """`nodes`: most drafted nodes of a sequence. `template`: filled instead of growing a tree; it branches at most
        `CHILDREN` times per node. `corrected`: see `Shape`. `prompts`: record the end of each prompt too, so that its
        continuation is found again.
        """
        self.matrix, self.options, self.nodes, self.learns = matrix, options, nodes, learns
        self.lessons = 0
        """Rows learned so far."""
        self._prompts = prompts
        parents, ranks = ((), ()) if template is None else (template.parents, template.ranks)
        self._shape = Shape(
            np.array(parents, np.int64),
            np.array(ranks, np.int64),
            nodes,
            1 if chains else CHILDREN,
            corrected,
        )
        self._sequences = SequenceStates(matrix.history, nodes + 1, options.orders, options.k)

    # Sequences

    def begin(self, tokens: np.ndarray, sequence: SequenceState | None = None) -> SequenceState:
        """Start a sequence with its prompt `tokens` (length,), in a new slot or in that of `sequence`."""
        sequence, history = self._sequences.new() if sequence is None else sequence, self.matrix.history
        recorder = Recorder(history, tokens, _UNFINISHED) if self._prompts else Recorder(history)
        self._sequences.begin(sequence.slot, len(tokens), recorder)
        sequence.read = sequence.recorded = len(tokens)
        sequence.last = int(tokens[-1])
        return sequence

    def predict(self, sequence: SequenceState, tokens: Sequence[int] | np.ndarray, answered: int = 0) -> None:
        """Set the predicted output of a sequence that has just begun, tokens (n,): drafts copy from it first.
        `answered`: how many tokens of the sequence are output already.
        """
        if len(tokens):
            self._sequences.predict(sequence.slot, [*tokens, BREAK])
            self._sequences.arrays.copying.begin(sequence.slot, sequence.read - answered, len(tokens))

    def predicted(self, sequence: SequenceState) -> int:
        """Return how many tokens of a sequence its prediction contained, counting tokens read so far."""
        return self._sequences.arrays.copying.predicted(sequence.slot)

    def sequence_of(
        self, record: Any, tokens: np.ndarray, prediction: Callable[[], Sequence[int]] = tuple, answered: int = 0
    ) -> SequenceState:
        """Return the sequence state stored on an engine's record of a request. It starts again where it does not
        continue with `tokens` (length,), with the predicted output `prediction()`.
        """
        sequence: SequenceState | None = getattr(record, _OURS, None)
        if sequence is None or not sequence.read <= len(tokens) or tokens[sequence.read - 1] != sequence.last:
            sequence = self.begin(tokens, sequence)
            self.predict(sequence, prediction(), answered)
            setattr(record, _OURS, sequence)
        return sequence

    # Drafts

    def draft(
        self,
        sequences: Sequence[SequenceState],
        tokens: np.ndarray,
        rows: np.ndarray,
        lengths: np.ndarray,
        max_depths: np.ndarray,
        costs: np.ndarray = NO_COSTS,
        ratio: float = 1.0,
    ) -> np.ndarray:
        """Draft for n sequences; return the size of each draft (n,) int64, the root included. `tree` has the nodes.

        The sequences lie in `rows` (n,) of `tokens` (rows, longest) and have `lengths` (n,); no node is deeper than
        `max_depths` (n,). All are int64; tokens may be any integers. `costs` (m,) float64: time of verifying 1, 2, ...
        nodes of all sequences, in any unit; empty where every node pays. `ratio`: accepted / predicted tokens of
        earlier drafts, which scales the expected gain of a node.
        """
        self._sequences.record_ended()
        for sequence, row, length in zip(sequences, rows.tolist(), lengths.tolist(), strict=True):
            if length > sequence.recorded:
                self._record(sequence, tokens[row, sequence.recorded : length].tolist(), False)
            sequence.read, sequence.last = length, int(tokens[row, length - 1])
        slots, counts = (
            np.array([sequence.slot for sequence in sequences], np.int64),
            np.empty(len(sequences), np.int64),
        )
        if self.options.suffix:
            for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
                self._sequences.reserve(slot, length)
        asked = Asked(tokens, rows, slots, lengths, max_depths, self.learns)
        draft(self._sequences.arrays, asked, self.matrix.sources(), self._shape, costs, ratio, counts)
        return counts

    def draft_one(
        self,
        sequence: SequenceState,
        tokens: np.ndarray,
        max_depth: int,
        costs: np.ndarray = NO_COSTS,
        ratio: float = 1.0,
    ) -> GrowingTree:
        """Draft for one sequence (length,), as `draft`; return the nodes."""
        one = np.array([0, len(tokens), max_depth])
        counts = self.draft([sequence], tokens[None], one[:1], one[1:2], one[2:], costs, ratio)
        return self.tree(sequence, int(counts[0]))

    def draft_within(
        self,
        sequence: SequenceState,
        tokens: np.ndarray,
        max_depth: int,
        state: State,
        grammar_statistics: GrammarStatistics,
        costs: np.ndarray = NO_COSTS,
        ratio: float = 1.0,
    ) -> tuple[GrowingTree, np.ndarray]:
        """Draft for one sequence (length,) within a grammar. Return the nodes as `draft_one` does, and the probability
        (n,) float32 of each being accepted if its parent is. `state`: the grammar's state at the end of the sequence.
        """
        one = np.array([0, len(tokens), max_depth])
        self.draft([sequence], tokens[None], one[:1], one[1:2], one[2:], _ROOT_ALONE)
        tree, known, slot = self.tree(sequence, self.nodes + 1), self.matrix.sources(), sequence.slot
        sequences, made = self._sequences.arrays, [0]

        def candidates(node: int) -> Candidates:
            shown = slice(tree.known[node])
            return [*zip(tree.candidates[node, shown].tolist(), tree.probabilities[node, shown].tolist(), strict=True)]

        def propose(parent: int, token: int, probability: float, after: State | None) -> Candidates:
            put(sequences, slot, known, parent, token, probability, _NO_MASK if after is None else after.mask)
            made[0] += 1
            return [] if after is None else candidates(made[0])

        keep_allowed(tree, 0, state.mask)
        first = candidates(0)
        root = int(tree.tokens[0])
        _, _, confidence = grow(state, first, root, propose, grammar_statistics, max_depth, self.nodes, costs, ratio)
        return self.tree(sequence, len(confidence)), np.array(confidence, np.float32)

    def tree(self, sequence: SequenceState, nodes: int) -> GrowingTree:
        """Return the first nodes of a draft in order of growth, as views that hold until the next draft."""
        trees = self._sequences.arrays.trees
        arrays = [
            array[sequence.slot] if array is trees.recent else array[sequence.slot, :nodes] for array in trees[:-1]
        ]
        return GrowingTree._make([*arrays, trees.mixture])

    def chain(self, sequence: SequenceState, nodes: int) -> list[int]:
        """Return the drafted tokens of a chain of that many nodes."""
        return self._sequences.arrays.trees.tokens[sequence.slot, 1:nodes].tolist()

    # Learning

    def observe(self, sequence: SequenceState, written: Sequence[int], ends: bool) -> None:
        """Record the accepted tokens of the last draft now instead of with the next one; `ends`: the sequence ends
        there.
        """
        made, self._sequences.arrays.made[sequence.slot] = int(self._sequences.arrays.made[sequence.slot]), 0
        if made and self.learns:
            tree = self.tree(sequence, made)
            count_chosen(tree, made, np.array(written, np.int64), self.matrix.calibration)
        arrays, slot = self._sequences.arrays, sequence.slot
        if ends and arrays.capacities[slot] and arrays.copying.state[slot, 0] >= 0:
            self._sequences.reserve(slot, int(arrays.read[slot]) + len(written))
            read_on(arrays, slot, np.array(written, np.int64), self.matrix.sources())
        self._record(sequence, written, ends)

    def forget_draft(self, sequence: SequenceState) -> None:
        """Discard the last draft, which was not verified."""
        self._sequences.arrays.made[sequence.slot] = 0

    def ngrams(self, sequence: SequenceState, parents: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return the n-gram (n, orders) int64 at each node of a tree (n,) below the newest token of a sequence."""
        ngrams = np.empty((len(parents), self.options.orders), np.int64)
        ngrams[:, 0] = tokens
        ngrams[0] = self._sequences.arrays.trees.recent[sequence.slot, : self.options.orders]
        for place in range(1, self.options.orders):
            ngrams[1:, place] = ngrams[parents[1:], place - 1]
        return ngrams

    def learn(self, ngrams: np.ndarray, ids: np.ndarray, probabilities: np.ndarray) -> None:
        """Learn candidates (n, k) after n-grams (n, orders)."""
        if self.learns and len(ngrams):
            self.matrix.learn(ngrams, ids, probabilities)
            self.lessons += len(ngrams)

    def learn_logits(self, ngrams: np.ndarray, logits: np.ndarray | torch.Tensor) -> None:
        """Learn from the target's logits (n, vocabulary) after n-grams (n, orders) whose rows would change."""
        if not self.learns or not len(ngrams):
            return
        rows = None
        if (
            isinstance(logits, np.ndarray) or logits.device.type == "cpu"
        ):  # on other devices copying all is cheaper than selecting
            logits = logits if isinstance(logits, np.ndarray) else logits.float().numpy()
            rows = self.matrix.surprised_by(ngrams, logits)
            ngrams = ngrams[rows]
        if len(ngrams):
            self.learn(ngrams, *top_candidates(logits, self.options.k, rows))

    def _record(self, sequence: SequenceState, written: Sequence[int], ends: bool) -> None:
        if self.learns:
            self._sequences.record(sequence.slot, written, ends)
        sequence.recorded += len(written)


class Recorder:
    """Appends one sequence to the shared history piece by piece, so that concurrent sequences do not interleave. A
    piece repeats the end of the one before, unless that is the newest in the history. A continuation already in the
    history is not added again.
    """

    def __init__(self, history: SuffixIndex, before: np.ndarray | None = None, piece: int = _PIECE) -> None:
        """`before` (n,): tokens before the sequence, matched but never drafted. `piece`: tokens added at once."""
        self._history, self._piece, self._written_to = history, piece, -1
        self._held: list[int] = [] if before is None else masked(before[-LONGEST:]).tolist()
        """The end of the last piece, or of `before`, and the tokens since."""
        self._lead = len(self._held)

    def add(self, tokens: Iterable[int], ends: bool = False) -> None:
        """Add tokens; `ends`: the sequence ends with them."""
        self._held.extend(tokens)
        if len(self._held) - self._lead < (1 if ends else self._piece):
            return
        with self._history.writing:
            if self._history.holds(self._held):
                self._written_to = -1  # the next piece does not continue the end of the history
            else:
                alone = len(self._history) == self._written_to
                self._history.extend(self._held[self._lead :] if alone else [BREAK, *self._held])
                self._written_to = len(self._history)
        self._held = self._held[-_LEAD:]
        self._lead = len(self._held)


class SequenceState:
    """One sequence in progress; its owner keeps a reference to it."""

    slot: int
    read = recorded = 0
    """Tokens read, and tokens given to the recorder."""
    last = -1
    """The last token read."""


class SequenceStates:
    """Slots of all sequences of a recycler."""

    def __init__(self, history: SuffixIndex, *sizes: int) -> None:
        """`history`: outputs of all earlier sequences. `sizes`: see `SequenceArrays.empty`."""
        self._history, self._sizes = history, sizes
        self._free: list[int] = []
        self._predicted: list[int] = []
        """Tokens of the prediction at the start of each index."""
        self._indices: list[SuffixIndex] = []
        self._recorders: list[Recorder] = []
        self._ended: list[Recorder] = []
        self.arrays = SequenceArrays.empty(0, *sizes)
        """Replaced by larger arrays as sequences are added."""

    def new(self) -> SequenceState:
        """Return a sequence in a slot of its own, which is freed when the last reference goes."""
        sequence = SequenceState()
        sequence.slot = self._take()
        weakref.finalize(sequence, self._give_back, sequence.slot)
        return sequence

    def begin(self, slot: int, prompt: int, recorder: Recorder) -> None:
        """Start a sequence with a prompt of that many tokens in a slot."""
        arrays = self.arrays
        arrays.copying.begin(slot, prompt)
        arrays.made[slot] = arrays.read[slot] = arrays.wrong[slot] = 0
        self._ended.append(self._recorders[slot])
        self._indices[slot], self._recorders[slot], self._predicted[slot] = SuffixIndex(), recorder, 0
        self._locate(slot)

    def predict(self, slot: int, tokens: Sequence[int]) -> None:
        """Put predicted tokens into the index of a sequence that has just begun."""
        self._indices[slot].extend(tokens)
        self._predicted[slot] = len(tokens)
        self._locate(slot)

    def reserve(self, slot: int, length: int) -> None:
        """Reserve memory for the unread tokens of a sequence of `length` tokens."""
        if self._predicted[slot] + length > self.arrays.capacities[slot]:
            self._indices[slot].reserve(length - int(self.arrays.read[slot]))
            self._locate(slot)

    def record(self, slot: int, written: Sequence[int], ends: bool) -> None:
        """Append output to the history; `ends`: the sequence ends there."""
        self._recorders[slot].add(written, ends)

    def record_ended(self) -> None:
        """Append the remaining tokens of garbage-collected sequences to the history."""
        while self._ended:
            self._ended.pop().add((), ends=True)

    def _take(self) -> int:
        """Return a free slot; double the number of slots where there is none."""
        if not self._free:
            old, slots = self.arrays, len(self._indices)
            self.arrays = new = SequenceArrays.empty(max(1, 2 * slots), *self._sizes)
            for into, from_ in zip(_flat(new), _flat(old), strict=True):
                into[:slots] = from_[:slots]
            new.wrong[-1] = old.wrong[-1]
            added = range(slots, len(new.read))
            self._indices += [SuffixIndex() for _ in added]
            self._predicted += [0 for _ in added]
            self._recorders += [Recorder(self._history) for _ in added]
            self._free += reversed(added)
        return self._free.pop()

    def _give_back(self, slot: int) -> None:
        """Free a slot. Must not block: it runs during garbage collection."""
        self._indices[slot] = SuffixIndex()
        self._ended.append(self._recorders[slot])
        self._free.append(slot)

    def _locate(self, slot: int) -> None:
        index = self._indices[slot].arrays
        self.arrays.capacities[slot] = len(index.tokens)
        self.arrays.addresses[slot] = [array.__array_interface__["data"][0] for array in index]


def _flat(sequences: SequenceArrays) -> list[np.ndarray]:
    """Return all arrays that have slots as their first dimension."""
    return [*sequences.trees[:-1], *sequences[1:-1], *sequences.copying]
