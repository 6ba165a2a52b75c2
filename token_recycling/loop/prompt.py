"""The prompt: when it is read, before the first step or with it, and what drafters are given of it.

All of a prompt but its last token goes into the cache (`model.prefill`); the last one is the root of the first draft.
The first step of a single sequence reads what is left of the prompt in the same forward pass, and verifies a draft with
it, unless somebody waits for the first token of a long prompt. Batches, and long prompts beside other sequences, are
read before, the latter in pieces.
"""

from __future__ import annotations

import torch

from ..model.prefill import first_pass, read_prompts
from ..model.prefill import prefill as fill
from ..trees.draft import Draft
from .state import BatchState

_SHORT_PROMPT = 32
"""Unread tokens; a pass over so few takes about as long as one over a single token, and so do drafted rows in it."""


def reads_along(batch: BatchState) -> bool:
    """Whether the first step reads the prompt too: of one sequence, where the model computes alike at every length, or
    of any, where states over the sequence must be what `generate` has then.
    """
    return batch.target.info.recurrent or (len(batch.requests) == 1 and batch.target.info.border is None)


def reads_alone(batch: BatchState) -> bool:
    """Whether the first step verifies no draft: its token is waited for, or the model reads drafts otherwise."""
    uncached = batch.requests[0].sequence.length - batch.requests[0].cached
    waited_for = batch.streamed and reads_along(batch) and uncached > _SHORT_PROMPT
    return waited_for or batch.target.info.recurrent


def prefill(batch: BatchState, most: int | None = None) -> None:
    """Put all of each sequence but its last token into the cache; of a single sequence at most `most` tokens more."""
    sequences, held = batch.sequences, [row.cached for row in batch.requests]
    if most is not None:
        sequences = [sequence[: there + most + 1] for sequence, there in zip(sequences, held, strict=True)]
    with batch.states() as passes:
        fill(batch.target, sequences, batch.cache, held, batch.reading)
    uncached = [len(sequence) - 1 - there for sequence, there in zip(sequences, held, strict=True)]
    # Of all that was read, and no more: a family may leave states out, or read a long prompt again.
    if passes and sum(states.shape[1] for states in passes) == max(uncached):
        states = torch.cat(passes, dim=1).to(batch.target.device)
        if most is not None:
            batch.states_read.append(states[0])
        else:
            give_states(batch, [states[index, :count] for index, count in enumerate(uncached)])
    for row, count in zip(batch.requests, uncached, strict=True):
        row.cached += count


def first_logits(batch: BatchState, drafts: list[Draft], alone: bool) -> torch.Tensor | None:
    """Logits (batch, n, vocabulary) of a pass over drafts that reads the uncached part of the prompts too; None where
    all is cached. `alone`: nothing is drafted.
    """
    if alone and batch.target.info.recurrent:
        return read_prompts(batch.target, batch.sequences, batch.cache)
    if len(drafts) == 1 and batch.cache.get_seq_length() < batch.requests[0].sequence.length - 1:
        return first_pass(batch.target, batch.sequences[0], drafts[0], batch.cache, batch.reading)
    return None


def give_states(batch: BatchState, states: list[torch.Tensor]) -> None:
    """Give each drafter the hidden states (n, states * hidden) of its prompt: of earlier pieces, then `states`."""
    for row, last in zip(batch.requests, states, strict=True):
        with row.guarded():
            batch.sequence_drafter(row).read_prompt(torch.cat([*batch.states_read, last]))
    batch.states_read.clear()
