"""Runners: they own the slots of a batch and make its forward passes.

A runner reads the prompts of a batch into slots, makes a forward pass over one draft per sequence, and keeps the slots
of the accepted nodes. Sequences join and leave it. The last token of a sequence is never in a slot: it is the root of
the next draft. A `Runner` works in a transformers cache. A `graphs.passes.GraphRunner` reads prompts in the same way,
and makes the later passes in the slots of captured passes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..trees.draft import Draft
from .hidden import layer_states
from .kv_cache import TreeCache
from .prefill import PIECE, Reading, cross_threshold, padded, prefill, read_text
from .target import Target

if TYPE_CHECKING:
    from ..trees.packed import PackedTrees


class NoFastPathError(ValueError):
    """`fast=True` was given where forward passes cannot be captured."""


class Pass(NamedTuple):
    """Results of one forward pass for all sequences, at all n nodes of the largest draft."""

    lengths: Sequence[int]
    """Tokens of each sequence that were cached before the pass."""
    starts: int | Sequence[int]
    """The slot of all roots, or of each, directly after its sequence."""
    logits: torch.Tensor
    """(batch, n, vocabulary)."""
    states: torch.Tensor | None = None
    """(batch, n, states * hidden), where hidden states are read."""
    prompt_states: Sequence[torch.Tensor] = ()
    """(tokens, states * hidden) each, of the prompts that the pass read before the roots, if it read any."""
    trees: PackedTrees | None = None
    """The drafts on the device, if they were sent in one copy."""
    prompt_from: int | None = None
    """Tokens of a prompt that were cached before the pass read the rest of it; None if it read none."""


class Runner:
    """Owns the slots of the sequences of one batch. Its passes are those of the model's own code, in a cache that may
    hold the beginnings of the sequences.
    """

    path = "eager"
    """Kind of passes: see `Stats.path`."""

    def __init__(
        self,
        target: Target,
        cache: TreeCache,
        reading: Reading | None,
        prepared: Callable[[], None],
    ) -> None:
        """`reading` is called before each piece of a prompt, and may raise; `prepared` before each pass over drafts,
        after its inputs are built.
        """
        self.target, self.cache, self.reading, self.prepared = target, cache, reading, prepared
        """The cache that now holds the sequences, each from slot 0 on."""

    def prefill(
        self,
        sequences: Sequence[torch.Tensor],
        cached: Sequence[int],
        states: tuple[int, ...] = (),
        shared: int = 0,
    ) -> list[torch.Tensor] | None:
        """Read each of `sequences` (length,), except its last token, into slots after its `cached` ones. Return for
        each the hidden states (tokens, states * hidden) numbered `states` (`hidden.layer_states`) of all tokens read;
        None if none are requested, or the family left some out. The first `shared` tokens, equal in all sequences, are
        read once.
        """
        rows = len(sequences)
        if not shared:
            return self._read(sequences, cached, states)
        first = self._read([sequences[0][: shared + 1]], [0], states)
        self.cache.select([0] * rows, shared)
        if max(map(len, sequences)) == shared + 1:
            return first and first * rows
        rest = self._read(sequences, [shared] * rows, states)
        return first and rest and [torch.cat([*first, own]) for own in rest]

    def _read(
        self, sequences: Sequence[torch.Tensor], cached: Sequence[int], states: tuple[int, ...]
    ) -> list[torch.Tensor] | None:
        """Read each sequence separately; see `prefill`."""
        with layer_states(self.target.model, states) as passes:
            prefill(self.target, sequences, self.cache, cached, self.reading)
        uncached = [len(sequence) - 1 - n for sequence, n in zip(sequences, cached, strict=True)]
        # States of all tokens read, and no more: a family may leave some out, or read a long prompt again.
        if not passes or sum(read.shape[1] for read in passes) != max(uncached):
            return None
        read = torch.cat(passes, dim=1).to(self.target.device)
        return [read[row, :n] for row, n in enumerate(uncached)]

    def forward(
        self,
        drafts: Sequence[Draft],
        sequences: Sequence[torch.Tensor],
        active: Collection[int],
        states: tuple[int, ...] = (),
    ) -> Pass:
        """Make one pass over a draft for each of `sequences` (length,), whose root is its last token. The first pass of
        a batch also reads the uncached part of its prompts. Rows that are not `active` attend to nothing.
        """
        if self.target.info.length_threshold is not None:
            cross_threshold(self.target, sequences, self.cache)
        lengths = [len(sequence) - 1 for sequence in sequences]
        if not states:
            return self._pass(drafts, sequences, lengths, active)
        cached = self.cache.length
        with layer_states(self.target.model, states) as passes:
            result = self._pass(drafts, sequences, lengths, active)
        n, read = result.logits.shape[1], torch.cat(passes, dim=1).to(self.target.device)
        prompts: list[torch.Tensor] = []
        if 0 < read.shape[1] - n == max(lengths) - cached:  # shorter sequences follow padding
            prompts = [read[row, max(lengths) - length : -n] for row, length in enumerate(lengths)]
        return result._replace(states=read[:, -n:], prompt_states=prompts)

    def _pass(
        self,
        drafts: Sequence[Draft],
        sequences: Sequence[torch.Tensor],
        lengths: Sequence[int],
        active: Collection[int],
    ) -> Pass:
        target, cache = self.target, self.cache
        cached = cache.length
        if cached < max(lengths):
            if target.info.recurrent:
                logits = read_prompts(target, sequences, cache)
            else:
                logits = first_pass(target, sequences[0], drafts[0], cache, self.reading)
            return Pass(lengths, cache.length - logits.shape[1], logits, prompt_from=cached)
        if target.fixed_shapes and cache.takes_frames and cache.settle(lengths):
            from ..trees.packed import send
            from .frames import band_of, packed_inputs, rows_of

            n = rows_of(max(map(len, drafts)))
            trees = send(drafts, lengths, n, target.device)
            inputs = packed_inputs(target, trees, band_of(max(lengths) + n), cache)
            self.prepared()
            return Pass(lengths, lengths, target.forward(inputs, cache), trees=trees)
        inputs = target.inputs.of(drafts, lengths, cached, active)
        self.prepared()
        return Pass(lengths, cached, target.forward(inputs, cache))

    def keep(self, result: Pass, accepted: Sequence[Sequence[int]]) -> None:
        """Keep the slots of the accepted nodes of the last pass, for each sequence; the others are free again."""
        self.cache.keep(result.starts, result.lengths, accepted)

    def undo(self, result: Pass) -> Pass:
        """Discard the slots that the last pass wrote; slots after the sequences then hold zeros. Return the pass with
        the numbers of tokens that are cached now: a prompt that it read is not.
        """
        lengths = result.lengths if result.prompt_from is None else [result.prompt_from]
        self.cache.keep(result.starts, lengths, [()] * len(lengths))
        self.cache.wipe(lengths)
        return result._replace(lengths=lengths)

    def join(self, other: Runner) -> None:
        """Add the sequence of another runner."""
        self.cache.join(other.cache)

    def leave(self, order: Sequence[int], cached: int) -> None:
        """Reorder sequences: the one in `order[place]` moves to `place`, which no later one needs. The longest that
        stays has `cached` tokens in slots.
        """
        self.cache.select(order, cached)

    def give_back(self, lengths: Sequence[int]) -> None:
        """Leave the first `lengths[row]` tokens of each sequence in the cache that the runner began with: this one."""


def read_prompts(model: Target, sequences: Sequence[torch.Tensor], cache: TreeCache) -> torch.Tensor:
    """Return logits (batch, 1, vocabulary) after the last token of each of `sequences` (length,). One forward pass
    reads the uncached tokens, as in `generate`, with shorter sequences padded on the left. Afterwards the cache holds
    each sequence from slot 0 on.
    """
    longest = max(map(len, sequences))
    cache.expect(longest)
    cached = cache.length
    padding = [longest - len(sequence) for sequence in sequences]
    tokens = torch.stack(
        [
            padded(sequence.to(model.device), (before, 0), sequence)
            for sequence, before in zip(sequences, padding, strict=True)
        ]
    )
    cache.drop_unseen(longest)
    logits = model.read(tokens[:, cached:], cache, last=1, padding=padding)
    if any(padding):
        cache.shift([-before for before in padding], list(map(len, sequences)))
    return logits


def first_pass(
    model: Target, sequence: torch.Tensor, draft: Draft, cache: TreeCache, reading: Reading | None = None
) -> torch.Tensor:
    """Return logits (1, n, vocabulary) after the nodes of a draft that follows the last token of `sequence` (length,),
    from a forward pass that also reads the uncached tokens.

    Without a draft it is the same forward pass as in `generate`. With one, every token has a row in the mask, and some
    models compute logits after every token; so only the end of a long sequence is read with the draft. `reading` is
    called before each piece.
    """
    sequence, n = sequence.to(model.device), len(draft)
    cache.expect(len(sequence) + n)
    cached = cache.length
    at_once = n == 1 and model.leaves_logits_out
    with_draft = max(0, PIECE - n)
    before = sequence[cached : len(sequence) if at_once else max(cached, len(sequence) - 1 - with_draft)]
    if len(before):
        logits = read_text(model, before[None], cache, len(sequence), reading)
        if at_once:
            return logits
    cached = cache.length
    cache.drop_unseen(cached)  # the pass may be repeated from here
    return model.forward(model.inputs.of_prompt(sequence[cached:-1], draft, cached), cache, last=n)
