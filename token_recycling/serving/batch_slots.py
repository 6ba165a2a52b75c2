"""The default number of sequences decoded in one batch.

The default is several, so that a short request need not wait for a long one, if two conditions hold: batching does not
change outputs, and that many sequences of the full context length fit in memory. Otherwise it is one. Cost: one forward
pass over two tokens, which measures the cache size per token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._util.device import memory
from ..drafters._base import Drafter
from ..loop.continuous import why_not_batched
from ..model.target import Target
from ..model.tree_layer import capacity
from .settings import Settings

_MAX_SLOTS = 4
_GROWN = 2
"""Capacity of captured forward passes doubles as it grows, so it may be up to this many times the sequence length."""
_MARGIN = 1 / 8
"""Fraction of memory reserved for everything else: activations, drafters, other programs."""


class BatchSlots(NamedTuple):
    """The maximum number of sequences in a batch, and the reason for this number."""

    size: int
    reason: str

    def __str__(self) -> str:
        return f"{self.size} batch slot{'s' * (self.size > 1)}: {self.reason}"


def batch_slots(target: Target, drafter: Drafter, settings: Settings, cached: int) -> BatchSlots:
    """Return the batch slots of a server with this drafter and a prefix cache of up to `cached` bytes."""
    if settings.concurrency is not None:
        return BatchSlots(settings.concurrency, "set by --concurrency")
    if settings.reproducible:
        return BatchSlots(1, "--reproducible decodes one request at a time")
    reason = _why_one(target, drafter)
    return _by_memory(target, settings, cached) if reason is None else BatchSlots(1, reason)


def _why_one(target: Target, drafter: Drafter) -> str | None:
    """Return the reason why requests are not batched by default, or None if they are."""
    reason = why_not_batched(target)
    if reason is not None:
        return f"requests cannot be batched: {reason}"
    if drafter.traits.samples:
        return "sampled drafts depend on other requests, so seeds would not hold; --concurrency 2 accepts that"
    return None


def _by_memory(target: Target, settings: Settings, cached: int) -> BatchSlots:
    limits = settings.max_prompt_tokens, settings.max_new_tokens
    lengths = [target.max_length, sum(filter(None, limits)) if all(limits) else None]
    per_token, states = _bytes_of_sequence(target)
    longest = min(filter(None, lengths), default=0 if per_token == 0 else None)
    if longest is None:
        return BatchSlots(1, "the context length is unknown; --concurrency sets another number")
    weights = list(target.model.parameters())
    total = sum(memory(device) for device in {weight.device for weight in weights} if device.type != "meta")
    packed = 0 if target.prepacked is None else target.prepacked.nbytes
    others = sum(weight.nbytes for weight in weights) + packed + cached + int(_MARGIN * total)
    slots = capacity(longest) if target.device.type == "cpu" else _GROWN * longest
    sequence = per_token * slots + states
    lengths_of = f"of up to {longest:,} tokens each" if longest else "of any length"
    for count in range(_MAX_SLOTS, 1, -1):
        if others + count * sequence <= total:
            return BatchSlots(count, f"memory fits {count} sequences {lengths_of}")
    figures = f"{(others + 2 * sequence) / 1e9:.1f} GB of {total / 1e9:.1f} GB of memory"
    return BatchSlots(1, f"2 sequences {lengths_of} may need {figures}; --concurrency 2 accepts that risk")


@torch.no_grad()
def _bytes_of_sequence(target: Target) -> tuple[int, int]:
    """Return the cache size of a sequence in bytes: per token, and for its recurrent states."""
    cache = target.new_cache()
    target.read(torch.zeros(1, 2, dtype=torch.long), cache, last=1)
    per_token = sum(states.nbytes for layer in cache.slice(0, 0, 1) for states in layer)
    return per_token, 0 if cache.states is None else cache.states.nbytes
