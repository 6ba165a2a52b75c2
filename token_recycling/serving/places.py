"""How many texts are generated at once where the operator does not say.

Several, so that a short text does not wait for the end of a long one, where the texts of the model can share passes,
each is what it is alone, and so many as long as the model's context fit in memory; else one. Cost: a pass over two
tokens, which shows what a token takes in the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._util.device import memory
from ..drafters._base import Drafter
from ..loop.continuous import why_not_batched
from ..model.info import UnsupportedModelError
from ..model.kv_cache import TreeCache, unroll
from ..model.recurrence import bytes_of_states
from ..model.self_test import ready
from ..model.tree_model import TreeModel
from .settings import Settings

_TEXTS = 4
"""At most."""
_GROWN = 2
"""Room for a text grows by doubling, so that it may be this many times what the text needs."""
_MARGIN = 1 / 8
"""Of the memory, for all else: activations, drafters, other programs."""


class Places(NamedTuple):
    """How many texts are generated at once, and why."""

    texts: int
    why: str

    def __str__(self) -> str:
        return f"{f'{self.texts} texts at once' if self.texts > 1 else 'one text at a time'}, {self.why}"


def places(target: TreeModel, drafter: Drafter, settings: Settings, kept: int) -> Places:
    """For a server whose texts are drafted for by `drafter`, and which keeps up to `kept` bytes of earlier texts."""
    if settings.concurrency is not None:
        return Places(settings.concurrency, "as asked")
    if settings.reproducible:
        return Places(1, "since equal requests are to give equal texts")
    if settings.fast == "on":
        return Places(1, "since captured steps decode a fixed batch")
    reason = _why_one(target, drafter)
    return _by_memory(target, settings, kept) if reason is None else Places(1, f"since it {reason}")


def _why_one(target: TreeModel, drafter: Drafter) -> str | None:
    """Why texts are not generated together by default, or None."""
    try:
        ready(target.model)
    except UnsupportedModelError as error:
        return f"is not accelerated: {error}"
    reason = why_not_batched(target)
    if reason is not None:
        return f"cannot share passes: {reason}"
    if drafter.traits.samples:
        return "draws its drafts, whose sizes others decide too, so that no seed would hold; --concurrency 2 takes that"
    return None


def _by_memory(target: TreeModel, settings: Settings, kept: int) -> Places:
    limits = settings.max_prompt_tokens, settings.max_new_tokens
    lengths = [target.max_length, sum(filter(None, limits)) if all(limits) else None]
    slot, states = _bytes_of_text(target)
    longest = min(filter(None, lengths), default=0 if slot == 0 else None)
    if longest is None:
        return Places(1, "since the length of its context is not known; --concurrency says another number")
    weights = list(target.model.parameters())
    held = sum(memory(device) for device in {weight.device for weight in weights} if device.type != "meta")
    packed = 0 if target.prepacked is None else target.prepacked.nbytes
    others = sum(weight.nbytes for weight in weights) + packed + kept + int(_MARGIN * held)
    text, fits = _GROWN * slot * longest + states, f"of up to {longest:,} tokens each" if longest else "of any length"
    for texts in range(_TEXTS, 1, -1):
        if others + texts * text <= held:
            return Places(texts, f"since the memory holds {texts} {fits}")
    figures = f"{(others + 2 * text) / 1e9:.1f} GB of {held / 1e9:.1f} GB of memory"
    return Places(1, f"since 2 {fits} may need {figures}; --concurrency 2 takes that risk")


@torch.no_grad()
def _bytes_of_text(target: TreeModel) -> tuple[int, int]:
    """Bytes of the cache of a text: for each of its tokens, and of its states."""
    cache = target.new_cache()
    unroll(cache)
    target.read(torch.zeros(1, 2, dtype=torch.long), cache, last=1)
    return sum(part.nbytes for part in TreeCache(cache).parts(0, 0, 1)), bytes_of_states(cache)
