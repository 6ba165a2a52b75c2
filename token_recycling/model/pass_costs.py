"""t(n) measured: the passes of one model, timed on this machine.

It is measured briefly the first time that it is needed, for bands of length, and from then on learned from the steps
themselves (`costs.online`). `token-recycling tune` measures at leisure and saves the curves (`cost_store`); afterwards
they are read from there to begin with.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from .._util.device import synchronize
from ..costs.curve import SHORTEST_BAND, TICK, CostCurve, band, shared_by
from ..costs.online import OnlineCurve
from ..trees.draft import Draft
from ..trees.templates import star
from . import cost_store as store
from .kv_cache import tree_cache, unroll
from .prefill import prefill
from .remembered import forget, recalled, remembered
from .tensor_parallel import agreed
from .tree_model import TreeModel

CPU_SIZES = (1, 2, 4, 6, 8, 9, 10, 12, 16, 20, 24, 32, 48, 64)
ACCELERATOR_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_BRIEFLY, _BRIEF_SIZES = 0.02, frozenset((1, 8, 64, 256))
"""Seconds, and sizes, for a curve that is measured on the way: a first call waits for it, and steps correct it."""
_LEAST_ROUNDS, _MOST_ROUNDS = 2, 20
"""Passes over each size: the best of a few, since other work only ever adds; at least two, whatever they take."""
_PROMPT = 16
_LONGEST = 1_000_000
"""Tokens of a text, where a model has no limit."""

T = TypeVar("T")
Measure = Callable[[int, float], CostCurve]
"""The curve for texts of a number of tokens, measured for about that many seconds."""


class PassCosts:
    """What the passes of one model cost, by length of text: from curves that `tune` saved, else measured once in this
    process.
    """

    def __init__(self, model: TreeModel, kind: str = "", measure: Measure | None = None) -> None:
        """`measure`, for steps that are made in another way than by ordinary passes, has a name, `kind`."""
        self.model, self.kind, self._measure = model, kind, measure

    def curve(self, length: int, like: torch.Tensor | None = None) -> CostCurve:
        """The curve for texts of `length` tokens, measured on tokens such as `like` (any,)."""
        length = with_room(self.model, band(length))

        def found() -> CostCurve:
            return self._saved(length) or self._brief(length, like)

        return self._remembered(found, "measured", length)

    def online(
        self, length: int, texts: int, like: torch.Tensor | None = None, before: OnlineCurve | None = None
    ) -> OnlineCurve:
        """What is learned, while decoding, of passes over so many texts. It begins with what was saved; else with what
        was learned `before`, or of other lengths, or of one text, rather than that a text waits for a measurement; else
        with one.
        """
        length = with_room(self.model, band(length))

        def begun() -> OnlineCurve:
            if self._saved(length) is None:
                if learned := before or self._learned(texts):
                    return OnlineCurve(learned.seconds)
                if texts > 1:
                    return OnlineCurve(shared_by(texts, self.online(length, 1, like).seconds))
            return OnlineCurve(shared_by(texts, self.curve(length, like).times()))

        return self._remembered(begun, "online", length, texts)

    def _learned(self, texts: int) -> OnlineCurve | None:
        """What was learned of the longest texts, if anything was."""
        longest = self.model.max_length or _LONGEST
        found = (
            recalled(self.model.model, self._key("online", length, texts), values_matter=False)
            for length in reversed(self.lengths(longest))
        )
        return next((curve for curve in found if curve is not None), None)

    def agreed(self, value: float) -> float:
        """A time that all processes that share the model take for true."""
        return agreed(self.model.model, value)

    def _remembered(self, make: Callable[[], T], *what: Hashable) -> T:
        return remembered(self.model.model, self._key(*what), make, values_matter=False)

    def _key(self, *what: Hashable) -> Hashable:
        return ("costs", self.kind, torch.get_num_threads(), *what)

    def _saved(self, length: int) -> CostCurve | None:
        saved = agreed(self.model.model, {curve.length: curve for curve in store.load(self.model, self.kind)})
        return saved.get(length)

    def _brief(self, length: int, like: torch.Tensor | None) -> CostCurve:
        if self._measure is not None:
            return self._measure(length, _BRIEFLY)
        sizes = [size for size in _sizes(self.model) if size in _BRIEF_SIZES]
        return measure(self.model, length, sizes, _BRIEFLY, like).convex()

    def measure(self, length: int, seconds: float) -> CostCurve:
        """Measures anew, at leisure; nothing is kept."""
        if self._measure is not None:
            return self._measure(length, seconds)
        return measure(self.model, length, seconds=seconds)

    def keep(self, curves: Sequence[CostCurve]) -> None:
        """Saves curves beside those of other lengths that were saved before, for this process and later ones."""
        kept = {curve.length: curve for curve in (*store.load(self.model, self.kind), *curves)}
        store.save(self.model, [kept[length] for length in sorted(kept)], self.kind)
        forget(self.model.model, "costs")

    def lengths(self, longest: int) -> list[int]:
        """Where curves are measured so that texts of up to `longest` tokens have one: 256, 1,024, 4,096, ..., shorter
        where the model's context ends before.
        """
        found: list[int] = []
        length = 1
        while not found or length <= longest:
            here = with_room(self.model, band(length))
            if here not in found:
                found.append(here)
            length = band(length) + 1
        return found


@torch.no_grad()
def measure(
    model: TreeModel,
    length: int = SHORTEST_BAND,
    sizes: Sequence[int] | None = None,
    seconds: float = 1.0,
    like: torch.Tensor | None = None,
) -> CostCurve:
    """Times forward passes over trees of the given sizes after `length` tokens, for about `seconds`.

    The trees are of the tokens `like` (any,), again and again if they are few: where tokens decide which weights are
    read, as with experts, no others would tell what passes cost. Without them they are of tokens that all differ.
    Nothing is left behind. The text is shorter where the model's context has no room for both; sizes for which there is
    none are left out. Trees that are not exact at that length are timed as well: that is for `decode` to decide, at
    each step. On an accelerator the device is waited for after each pass. Processes that share a model all have the
    curve of the first one.
    """
    wanted = tuple(sizes or _sizes(model))
    length = with_room(model, length, wanted[-1])
    limit = model.max_length or math.inf
    trees = {n: star(n) for n in wanted if n == 1 or length + n <= limit}
    tokens = (torch.arange(wanted[-1]) % model.embedded if like is None else like).to(model.device)
    tokens = tokens.repeat(-(-wanted[-1] // len(tokens)))
    cache = filled(model, length)
    held, kept = cache.get_seq_length(), tree_cache(cache)
    best: dict[int, float] = {}
    began = time.perf_counter()
    for done in range(_MOST_ROUNDS):
        if done >= _LEAST_ROUNDS and agreed(model.model, time.perf_counter() - began) > seconds:
            break
        for n, tree in trees.items():
            draft = Draft(tree, tokens[:n])
            synchronize(model.device)
            start = time.perf_counter()
            model.forward(model.inputs.of([draft], [held], held), cache)
            synchronize(model.device)
            taken = max(time.perf_counter() - start, TICK)
            kept.keep(held, [held], [[]])
            best[n] = min(taken, best.get(n, taken))
    return agreed(model.model, CostCurve(length, tuple(best), tuple(best.values())))


def with_room(model: TreeModel, length: int, nodes: int | None = None) -> int:
    """The length, less where the model's context has no room for it and `nodes` (default the largest measured tree)."""
    if model.max_length is None:
        return length
    return max(1, min(length, model.max_length - (nodes or _sizes(model)[-1])))


def _sizes(model: TreeModel) -> tuple[int, ...]:
    return CPU_SIZES if model.device.type == "cpu" else ACCELERATOR_SIZES


def filled(model: TreeModel, length: int) -> DynamicCache:
    """A cache as after `length` tokens. Where the layers allow it, a few tokens' states are repeated."""
    cache = model.new_cache()
    tokens = torch.arange(1, min(_PROMPT, length) + 2, device=model.device) % model.embedded
    prefill(model, [tokens], cache)
    unroll(cache)
    if all(type(layer) is DynamicLayer for layer in cache.layers):
        times = -(-length // cache.get_seq_length())
        for layer in cache.layers:
            layer.keys = layer.keys.repeat(1, 1, times, 1)[:, :, :length]
            layer.values = layer.values.repeat(1, 1, times, 1)[:, :, :length]
        return cache
    cache = model.new_cache()
    prefill(model, [torch.arange(length + 1, device=model.device) % model.embedded], cache)
    return cache
