"""The recycler: drafts for one sequence or many, and learns from what the target said (Luo et al., 2408.08696, and
more).

What is learned is an `NgramMatrix`, which recyclers may share. Nothing here imports transformers, torch or an engine,
and what is learned follows from tokens and logits, never from clocks or random numbers: the ranks of a tensor-parallel
engine learn the same. Cost per step: some twenty microseconds, a few a sequence, and what `growth` says of nodes.

Every sequence has a slot in arrays that compiled code shares, an index of its tokens, and a recorder, which adds it to
the past of all. A slot is given back when its sequence is gone, in whatever thread and at whatever moment that is: what
such a sequence had not yet added is added with the next draft.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .._util.topk import top_candidates
from ..costs.budget import NO_COSTS
from .constrained import Candidates, GrammarStatistics, grow
from .growth import Asked, SequenceArrays, Shape, count_chosen, draft, put, read_on
from .ngram_matrix import NgramMatrix
from .nodes import CHILDREN, GrowingTree, keep_allowed
from .options import Options
from .suffix_index import BREAK, LONGEST, SuffixIndex, masked

if TYPE_CHECKING:
    import torch

    from ..trees.constraint import State
    from ..trees.tree import Tree

_OURS = "token_recycling"
_ROOT_ALONE = np.ones(1)
"""Times by which no node pays."""
_NO_MASK = np.zeros(0, np.int32)
"""Where nothing is looked for."""
_UNFINISHED = 16
"""Tokens of a piece that is added to the history where nobody says when a sequence ends."""
_PIECE, _LEAD = 32, 8
"""Tokens of a piece of a sequence, and how many of the piece before it stand before these again."""


class Recycler:
    """Drafts for sequences from what was learned, and learns from what was verified."""

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
        """`nodes`: most drafted ones of a sequence. `template`: filled instead of growing; its breadth is `CHILDREN` at
        most. `corrected` as of `Shape`. `prompts`: keep the end of a prompt, by which what followed is found again.
        """
        self.matrix, self.options, self.nodes, self.learns = matrix, options, nodes, learns
        self.lessons = 0
        """How many rows were learned."""
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
        """A sequence that begins with `tokens` (length,), its prompt, or one that has become another."""
        sequence, history = self._sequences.new() if sequence is None else sequence, self.matrix.history
        recorder = Recorder(history, tokens, _UNFINISHED) if self._prompts else Recorder(history)
        self._sequences.begin(sequence.slot, len(tokens), recorder)
        sequence.read = sequence.recorded = len(tokens)
        sequence.last = int(tokens[-1])
        return sequence

    def predict(self, sequence: SequenceState, tokens: Sequence[int] | np.ndarray, answered: int = 0) -> None:
        """What is expected to follow the prompt of a sequence that has just begun, tokens (n,): drafts are copied from
        it first. `answered`: how many tokens of the sequence are no prompt any more.
        """
        if len(tokens):
            self._sequences.predict(sequence.slot, [*tokens, BREAK])
            self._sequences.arrays.copying.begin(sequence.slot, sequence.read - answered, len(tokens))

    def predicted(self, sequence: SequenceState) -> int:
        """How many tokens of a sequence its prediction had, of those that were read; all of them once it has ended."""
        return self._sequences.arrays.copying.predicted(sequence.slot)

    def sequence_of(
        self, record: Any, tokens: np.ndarray, prediction: Callable[[], Sequence[int]] = tuple, answered: int = 0
    ) -> SequenceState:
        """The sequence kept on an engine's record of a request; begun again if it does not go on with `tokens`
        (length,), then with what `prediction()` says of it, as of `predict`.
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
        rooms: np.ndarray,
        costs: np.ndarray = NO_COSTS,
        ratio: float = 1.0,
    ) -> np.ndarray:
        """(n,) int64: how many nodes the draft of each of n sequences has, the root included; `tree` has them.

        The sequences lie in `rows` (n,) of `tokens` (rows, longest) and have `lengths` (n,); no node stands deeper than
        `rooms` (n,). All int64, but the tokens any integers. `costs` (m,) float64: what passes over 1, 2, ... nodes of
        all sequences take, in any unit; none where every node pays. `ratio`: accepted / predicted tokens of earlier
        drafts, which scales what nodes are expected to bring.
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
        asked = Asked(tokens, rows, slots, lengths, rooms, self.learns)
        draft(self._sequences.arrays, asked, self.matrix.sources(), self._shape, costs, ratio, counts)
        return counts

    def draft_one(
        self,
        sequence: SequenceState,
        tokens: np.ndarray,
        room: int,
        costs: np.ndarray = NO_COSTS,
        ratio: float = 1.0,
    ) -> GrowingTree:
        """The nodes of a draft for one sequence (length,): as `draft`."""
        one = np.array([0, len(tokens), room])
        counts = self.draft([sequence], tokens[None], one[:1], one[1:2], one[2:], costs, ratio)
        return self.tree(sequence, int(counts[0]))

    def draft_within(
        self,
        sequence: SequenceState,
        tokens: np.ndarray,
        room: int,
        state: State,
        grammar_statistics: GrammarStatistics,
        costs: np.ndarray = NO_COSTS,
        ratio: float = 1.0,
    ) -> tuple[GrowingTree, np.ndarray]:
        """A draft for one sequence (length,) that keeps to a grammar: its nodes as of `draft_one`, and how likely each
        is if its parent is accepted, (n,) float32. `state`: what may follow the sequence.
        """
        one = np.array([0, len(tokens), room])
        self.draft([sequence], tokens[None], one[:1], one[1:2], one[2:], _ROOT_ALONE)
        tree, known, slot = self.tree(sequence, self.nodes + 1), self.matrix.sources(), sequence.slot
        sequences, made = self._sequences.arrays, [0]

        def candidates(node: int) -> Candidates:
            shown = slice(tree.known[node])
            return [*zip(tree.candidates[node, shown].tolist(), tree.probabilities[node, shown].tolist(), strict=True)]

        def propose(parent: int, token: int, chance: float, after: State | None) -> Candidates:
            put(sequences, slot, known, parent, token, chance, _NO_MASK if after is None else after.mask)
            made[0] += 1
            return [] if after is None else candidates(made[0])

        keep_allowed(tree, 0, state.mask)
        first = candidates(0)
        root = int(tree.tokens[0])
        _, _, confidence = grow(state, first, root, propose, grammar_statistics, room, self.nodes, costs, ratio)
        return self.tree(sequence, len(confidence)), np.array(confidence, np.float32)

    def tree(self, sequence: SequenceState, nodes: int) -> GrowingTree:
        """The first nodes of a sequence's draft, in order of growth: views that hold until the next draft."""
        trees = self._sequences.arrays.trees
        arrays = [
            array[sequence.slot] if array is trees.recent else array[sequence.slot, :nodes] for array in trees[:-1]
        ]
        return GrowingTree._make([*arrays, trees.mixture])

    def chain(self, sequence: SequenceState, nodes: int) -> list[int]:
        """The drafted tokens of a chain of so many nodes."""
        return self._sequences.arrays.trees.tokens[sequence.slot, 1:nodes].tolist()

    # What is learned

    def observe(self, sequence: SequenceState, written: Sequence[int], ends: bool) -> None:
        """Learn what followed the last draft before the next one would; `ends`: the sequence ends with it."""
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
        """Forget the last draft, which was not verified."""
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
        """Learns from the target's logits (n, vocabulary) after n-grams (n, orders), where they say something new."""
        if not self.learns or not len(ngrams):
            return
        rows = None
        if isinstance(logits, np.ndarray) or logits.device.type == "cpu":  # elsewhere all are copied sooner than some
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
    """Adds one sequence to the history of all, a piece at a time: sequences that are written at once do not mix. A
    piece begins with the end of the one before, unless that is the newest of the history. One that is there already is
    not added again.
    """

    def __init__(self, history: SuffixIndex, before: np.ndarray | None = None, piece: int = _PIECE) -> None:
        """`before` (n,): tokens before the sequence, matched but never drafted. `piece`: tokens added at once."""
        self._history, self._piece, self._written_to = history, piece, -1
        self._held: list[int] = [] if before is None else masked(before[-LONGEST:]).tolist()
        """The end of the last piece, or of `before`, and the tokens since."""
        self._lead = len(self._held)

    def add(self, tokens: Iterable[int], ends: bool = False) -> None:
        """Add what was written since the last call; `ends`: the sequence ends with it."""
        self._held.extend(tokens)
        if len(self._held) - self._lead < (1 if ends else self._piece):
            return
        with self._history.writing:
            if self._history.holds(self._held):
                self._written_to = -1  # the next piece does not follow what stands at the end
            else:
                alone = len(self._history) == self._written_to
                self._history.extend(self._held[self._lead :] if alone else [BREAK, *self._held])
                self._written_to = len(self._history)
        self._held = self._held[-_LEAD:]
        self._lead = len(self._held)


class SequenceState:
    """One sequence that is being written, kept by whoever asks for its drafts."""

    slot: int
    read = recorded = 0
    """Tokens that were seen, and given to the recorder."""
    last = -1
    """The last token that was seen."""


class SequenceStates:
    """The slots of all sequences of a recycler."""

    def __init__(self, history: SuffixIndex, *sizes: int) -> None:
        """`history`: what was written before, of all sequences. `sizes`: as of `SequenceArrays.empty`."""
        self._history, self._sizes = history, sizes
        self._free: list[int] = []
        self._predicted: list[int] = []
        """Tokens of each index that are not the sequence's."""
        self._indices: list[SuffixIndex] = []
        self._recorders: list[Recorder] = []
        self._ended: list[Recorder] = []
        self.arrays = SequenceArrays.empty(0, *sizes)
        """Made again as there are more sequences."""

    def new(self) -> SequenceState:
        """A sequence in a slot of its own, as long as it is referred to."""
        sequence = SequenceState()
        sequence.slot = self._take()
        weakref.finalize(sequence, self._give_back, sequence.slot)
        return sequence

    def begin(self, slot: int, prompt: int, recorder: Recorder) -> None:
        """A sequence of a prompt of so many tokens begins in a slot, or another one than before."""
        arrays = self.arrays
        arrays.copying.begin(slot, prompt)
        arrays.made[slot] = arrays.read[slot] = arrays.wrong[slot] = 0
        self._ended.append(self._recorders[slot])
        self._indices[slot], self._recorders[slot], self._predicted[slot] = SuffixIndex(), recorder, 0
        self._locate(slot)

    def predict(self, slot: int, tokens: Sequence[int]) -> None:
        """Adds tokens to the index of a sequence that has just begun."""
        self._indices[slot].extend(tokens)
        self._predicted[slot] = len(tokens)
        self._locate(slot)

    def reserve(self, slot: int, length: int) -> None:
        """Makes room for what is not read of a sequence of `length` tokens."""
        if self._predicted[slot] + length > self.arrays.capacities[slot]:
            self._indices[slot].reserve(length - int(self.arrays.read[slot]))
            self._locate(slot)

    def record(self, slot: int, written: Sequence[int], ends: bool) -> None:
        """Adds what was written to the history; `ends`: the sequence ends with it."""
        self._recorders[slot].add(written, ends)

    def record_ended(self) -> None:
        """Adds to the history what sequences that are gone still hold."""
        while self._ended:
            self._ended.pop().add((), ends=True)

    def _take(self) -> int:
        """A free slot; where there is none, twice as many are made."""
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
        """Nothing here may wait."""
        self._indices[slot] = SuffixIndex()
        self._ended.append(self._recorders[slot])
        self._free.append(slot)

    def _locate(self, slot: int) -> None:
        index = self._indices[slot].arrays
        self.arrays.capacities[slot] = len(index.tokens)
        self.arrays.addresses[slot] = [array.__array_interface__["data"][0] for array in index]


def _flat(sequences: SequenceArrays) -> list[np.ndarray]:
    """All arrays of sequences that have a dimension of slots in front."""
    return [*sequences.trees[:-1], *sequences[1:-1], *sequences.copying]
