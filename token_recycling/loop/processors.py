"""Scopes of transformers' logits processors: which part of its input each of them depends on.

A processor without an entry is called as `generate` calls it, for one sequence at a time; where that is impossible, the
call runs through transformers' own `generate`. A new processor of transformers is one entry here.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from transformers import LogitsProcessor
from transformers.generation import logits_process as processors

from ..model.origin import is_foreign

if TYPE_CHECKING:
    from ..trees.packed import PackedTrees


class Scope(IntEnum):
    """The input that a processor depends on; each kind supports everything that the preceding kinds do."""

    UNKNOWN = 0
    """Unknown: the processor may compare the sequences of a batch."""
    EACH_SEQUENCE = 1
    """Each sequence of a batch independently."""
    SCORES = 2
    """Only the scores; the processor is stateless and may be called for any sequence."""
    EACH_ROW = 3
    """As `SCORES`, for any row of scores and in tensor operations: callable for all nodes of a tree at once."""


_SCOPES: dict[type, Scope] = {
    processors.EpsilonLogitsWarper: Scope.EACH_ROW,
    processors.MinPLogitsWarper: Scope.EACH_ROW,
    processors.TemperatureLogitsWarper: Scope.EACH_ROW,
    processors.TopKLogitsWarper: Scope.EACH_ROW,
    processors.TopPLogitsWarper: Scope.EACH_ROW,
    processors.TypicalLogitsWarper: Scope.EACH_ROW,
    processors.EtaLogitsWarper: Scope.SCORES,
    processors.TopHLogitsWarper: Scope.SCORES,
    processors.ExponentialDecayLengthPenalty: Scope.EACH_SEQUENCE,
    processors.ForcedBOSTokenLogitsProcessor: Scope.EACH_SEQUENCE,
    processors.ForcedEOSTokenLogitsProcessor: Scope.EACH_SEQUENCE,
    processors.InfNanRemoveLogitsProcessor: Scope.EACH_SEQUENCE,
    processors.LogitNormalization: Scope.EACH_SEQUENCE,
    processors.MinLengthLogitsProcessor: Scope.EACH_SEQUENCE,
    processors.MinNewTokensLengthLogitsProcessor: Scope.EACH_SEQUENCE,
    processors.NoBadWordsLogitsProcessor: Scope.EACH_SEQUENCE,
    processors.NoRepeatNGramLogitsProcessor: Scope.EACH_SEQUENCE,
    processors.PrefixConstrainedLogitsProcessor: Scope.EACH_SEQUENCE,
    processors.RepetitionPenaltyLogitsProcessor: Scope.EACH_SEQUENCE,
    processors.SequenceBiasLogitsProcessor: Scope.EACH_SEQUENCE,
    processors.SuppressTokensAtBeginLogitsProcessor: Scope.EACH_SEQUENCE,
    processors.SuppressTokensLogitsProcessor: Scope.EACH_SEQUENCE,
    processors.WatermarkLogitsProcessor: Scope.EACH_SEQUENCE,
}


def scope(processor: Any) -> Scope:
    """Return the scope of a processor by its exact type: a subclass or a replaced method may depend on more."""
    kind = type(processor)
    return Scope.UNKNOWN if is_foreign(kind.__call__) else _SCOPES.get(kind, Scope.UNKNOWN)


def for_sequence(processor: LogitsProcessor, row: int) -> LogitsProcessor | None:
    """Return a processor of a batch restricted to one sequence; None if it may depend on other sequences."""
    if scope(processor) < Scope.EACH_SEQUENCE:
        from ..grammar import adapters

        return adapters.for_sequence(processor, row)
    if type(processor) is processors.RepetitionPenaltyLogitsProcessor and isinstance(
        processor.prompt_ignore_length, torch.Tensor
    ):
        ignored = processor.prompt_ignore_length[row : row + 1]
        return processors.RepetitionPenaltyLogitsProcessor(processor.penalty, prompt_ignore_length=ignored)
    if type(processor) is processors.PrefixConstrainedLogitsProcessor:
        from ..grammar import adapters

        allowed, samples = adapters.prefix_parts(processor)
        return processors.PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row // samples, ids), num_beams=1)
    return processor


def holds_at_nodes(processor: Any) -> bool:
    """Return whether the effect of a processor at every node of a tree is known."""
    by_path = type(processor) is processors.RepetitionPenaltyLogitsProcessor
    return scope(processor) == Scope.EACH_ROW or (by_path and scope(processor) != Scope.UNKNOWN)


def penalize(
    processor: processors.RepetitionPenaltyLogitsProcessor,
    scores: torch.Tensor,
    sequence: torch.Tensor,
    tree: PackedTrees,
) -> torch.Tensor:
    """Return scores (n, vocabulary) with the repetition penalty applied at every node of one packed tree below a
    sequence (length,), whose last token is the root.
    """
    n, vocabulary = scores.shape
    ignored = 0 if processor.prompt_ignore_length is None else int(processor.prompt_ignore_length)
    # One extra column, for tokens without a score and for nodes that are not on the path.
    emitted = torch.zeros(vocabulary + 1, dtype=torch.bool, device=scores.device)
    emitted.scatter_(0, sequence[ignored:].to(scores.device).clamp(max=vocabulary), True)
    # The root is part of the sequence.
    below = tree.ancestors[0] & (torch.arange(n, device=scores.device) > 0)
    on_path = torch.where(below, tree.tokens.clamp(min=0, max=vocabulary), vocabulary)
    before = torch.zeros(n, vocabulary + 1, dtype=torch.bool, device=scores.device).scatter_(1, on_path, True)
    less = torch.where(scores < 0, scores * processor.penalty, scores / processor.penalty)
    return torch.where((before | emitted)[:, :vocabulary], less, scores)
