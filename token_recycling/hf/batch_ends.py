"""Ends of the sequences of a batch: where `generate` ends them, though here they advance independently.

`BatchStopping` applies criteria that must see all sequences of a batch together. `generate` appends one token to every
sequence, evaluates the criteria and continues. Here sequences advance by different numbers of tokens. So a column of
the batch is evaluated once every sequence has reached it, in order; tokens that a sequence emitted beyond its end are
withdrawn. `fill_up` continues shorter sequences with padding, as `generate` does, and `show_padding` calls functions
that choose allowed tokens for that padding.
"""

from __future__ import annotations

import torch
from transformers import PrefixConstrainedLogitsProcessor, StoppingCriteriaList

from ..loop.request import Request, TokenSequence
from ..model.kv_cache import TreeCache
from ..model.prefill import extend


class BatchStopping:
    """Applies criteria to the sequences of a batch, column by column, and ends sequences."""

    def __init__(self, sequences: list[TokenSequence], criteria: StoppingCriteriaList, padding: int | None) -> None:
        """`padding` continues sequences that have ended; None if every sequence continues until all have ended."""
        self.sequences, self.criteria, self.padding = sequences, criteria, padding
        self.withdrawn = 0
        """Tokens that were emitted beyond an end."""
        self.columns = sequences[0].columns
        """Column evaluated last."""
        self._met = [False] * len(sequences)

    def apply(self) -> None:
        """Evaluate the criteria for every column that all sequences have reached."""
        while not all(self._met) and all(
            sequence.ended or sequence.columns > self.columns for sequence in self.sequences
        ):
            self.columns += 1
            unfinished = 1 & ~self.criteria(self._shown(), None)  # as `generate` does, for any return type
            stops = (unfinished == 0).reshape(len(self.sequences), -1).all(dim=1).tolist()
            for row, sequence in enumerate(self.sequences):
                at_its_end = sequence.ended and sequence.columns <= self.columns
                if self._met[row] or not (stops[row] or at_its_end):
                    continue
                self._met[row] = True
                if self.padding is not None:
                    self._end(sequence)
        if self.padding is None and all(self._met):
            for sequence in self.sequences:
                self._end(sequence)

    def _end(self, sequence: TokenSequence) -> None:
        self.withdrawn += max(0, sequence.columns - self.columns)
        sequence.end_at(min(sequence.columns, self.columns))

    def _shown(self) -> torch.Tensor:
        """Return (batch, columns) ids up to the column under evaluation, as `generate` would have them."""
        shown = self.sequences[0].padded.new_full((len(self.sequences), self.columns), self.padding or 0)
        for row, sequence in enumerate(self.sequences):
            tokens = sequence.padded[0, : self.columns]
            shown[row, : len(tokens)] = tokens
        return shown


def fill_up(requests: list[Request], cache: TreeCache, padding: int) -> None:
    """Continue shorter sequences with padding, as `generate` does: their tokens, cache, scores and logits."""
    sequences = [request.sequence for request in requests]
    columns = max(sequence.columns for sequence in sequences)
    rest = [sequence.tokens.new_full((columns - sequence.columns,), padding) for sequence in sequences]
    # Padding follows the last token; the last padding token gets no slot.
    fed = [torch.cat([sequence.tokens[-1:], padded])[:-1] for sequence, padded in zip(sequences, rest, strict=True)]
    lengths, roots = [sequence.length - 1 for sequence in sequences], [sequence.tokens[-1:] for sequence in sequences]
    for pieces, logits in extend(requests[0].target, fed, lengths, cache, roots):
        for row, piece in enumerate(pieces):
            for node in range(len(piece)):
                requests[row].selector.scored(logits[row, node])
                sequences[row].push(padding)


def show_padding(requests: list[Request], padding: int) -> None:
    """Call functions that choose allowed tokens, which may raise, for the padding of shorter sequences, as `generate`
    does.
    """
    columns = max(request.sequence.columns for request in requests)
    for request in requests:
        functions = [one for one in request.selector.processors if type(one) is PrefixConstrainedLogitsProcessor]
        sequence, scores = request.sequence, torch.zeros(1, request.target.vocab_size)
        while functions and sequence.columns < columns:
            for function in functions:
                function(sequence.padded, scores.to(sequence.padded.device))
            sequence.push(padding)
