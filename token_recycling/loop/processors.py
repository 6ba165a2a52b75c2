"""One table of what each of transformers' logits processors looks at.

A processor that is not in it is called as `generate` calls it, for one sequence at a time; where that cannot be, the
call is left to transformers. A new processor of transformers is one entry here.
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
    """What a processor looks at; each kind can do all that the kinds before it can."""

    UNKNOWN = 0
    """Anything: it may compare the sequences of a batch."""
    EACH_SEQUENCE = 1
    """Each sequence of a batch alone."""
    SCORES = 2
    """The scores alone; it remembers nothing, so that it may be called for any sequence."""
    EACH_ROW = 3
    """The same for any row of scores, in tensor operations: it can be called for all nodes of a tree at once."""


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
    """Return what a processor looks at, by its exact type: a subclass may look at more, as may a replaced method."""
    kind = type(processor)
    return Scope.UNKNOWN if is_foreign(kind.__call__) else _SCOPES.get(kind, Scope.UNKNOWN)


def for_sequence(processor: LogitsProcessor, row: int) -> LogitsProcessor | None:
    """Return a processor of a batch as one of its sequences sees it, alone; None for one that may look at others."""
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
    """Whether it is known what a processor does at every node of a tree."""
    by_path = type(processor) is processors.RepetitionPenaltyLogitsProcessor
    return scope(processor) == Scope.EACH_ROW or (by_path and scope(processor) != Scope.UNKNOWN)


def penalised(
    processor: processors.RepetitionPenaltyLogitsProcessor,
    scores: torch.Tensor,
    sequence: torch.Tensor,
    tree: PackedTrees,
) -> torch.Tensor:
    """Scores (n, vocabulary) after a penalty on repetition, at every node of one packed tree below a sequence
    (length,), whose last token is the root.
    """
    n, vocabulary = scores.shape
    ignored = 0 if processor.prompt_ignore_length is None else int(processor.prompt_ignore_length)
    # One column more, for tokens without a score and for what is not on a node's path.
    emitted = torch.zeros(vocabulary + 1, dtype=torch.bool, device=scores.device)
    emitted.scatter_(0, sequence[ignored:].to(scores.device).clamp(max=vocabulary), True)
    # The root is part of the sequence.
    below = tree.ancestors[0] & (torch.arange(n, device=scores.device) > 0)
    on_path = torch.where(below, tree.tokens.clamp(min=0, max=vocabulary), vocabulary)
    before = torch.zeros(n, vocabulary + 1, dtype=torch.bool, device=scores.device).scatter_(1, on_path, True)
    less = torch.where(scores < 0, scores * processor.penalty, scores / processor.penalty)
    return torch.where((before | emitted)[:, :vocabulary], less, scores)
