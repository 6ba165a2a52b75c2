"""What a step of n nodes costs on this machine: t(n), measured.

A forward pass over n nodes takes longer than one over a single token, by how much depends on the model, its type of
numbers, the device, the number of threads and the length of the text. It is measured on random tokens, briefly, the
first time that it is needed, for bands of length. `token-recycling tune` measures at leisure and saves the curves;
afterwards they are read from there.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from .cache import TreeCache, unroll
from .drafting import Draft
from .files import replacing
from .ranks import agreed
from .tree import Tree

if TYPE_CHECKING:
    from .target import Target

CPU_SIZES = (1, 2, 4, 6, 8, 9, 10, 12, 16, 20, 24, 32, 48, 64)
ACCELERATOR_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_SHORTEST_BAND, _BAND_STEP = 256, 4
_BRIEFLY, _BRIEF_SIZES = 0.1, frozenset((1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 256))
"""Seconds, and sizes, for a curve that is measured on the way."""
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 20
"""Passes over each size: the best of a few, since other work only ever adds; at least three, whatever they take."""
_TICK = 1e-7
"""Seconds; no pass is quicker than a clock can tell."""
_PROMPT = 16


@dataclass(frozen=True)
class CostCurve:
    """Times of forward passes, the best of several."""

    length: int
    """Tokens of the text before the nodes."""
    sizes: tuple[int, ...]
    """Numbers of nodes, the root included, ascending from 1."""
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sizes or self.sizes[0] != 1 or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"expected ascending sizes from 1, got {self.sizes}")
        if len(self.seconds) != len(self.sizes) or not all(0 < taken < math.inf for taken in self.seconds):
            raise ValueError(f"expected a time above 0 for each of {len(self.sizes)} sizes, got {self.seconds}")

    def relative(self, texts: int = 1) -> np.ndarray:
        """(nodes,) float64: t(n) / t(1) for n = 1, 2, ... nodes for each of so many texts in one pass.

        What lies between two sizes is on the line between them. A pass cannot cost more than a larger one: where it
        seems to, something else was going on. Of several texts all have the same number of nodes.
        """
        rows = np.arange(texts, max(self.sizes[-1], texts) + 1, texts)
        times = np.interp(rows, self.sizes, np.minimum.accumulate(self.seconds[::-1])[::-1])
        return times / times[0]

    def convex(self) -> CostCurve:
        """The largest convex curve below this one. Of a brief measurement it is the better estimate: other work on the
        machine only ever adds, to one size or another, and a size that seems dear hides all larger ones.
        """
        kept: list[int] = []
        for place in range(len(self.sizes)):
            while len(kept) > 1 and self._slope(kept[-2], kept[-1]) >= self._slope(kept[-1], place):
                kept.pop()
            kept.append(place)
        return CostCurve(
            self.length, tuple(self.sizes[place] for place in kept), tuple(self.seconds[place] for place in kept)
        )

    def _slope(self, before: int, after: int) -> float:
        return (self.seconds[after] - self.seconds[before]) / (self.sizes[after] - self.sizes[before])


def band(length: int) -> int:
    """The length that stands for texts of so many tokens: 256, 1,024, 4,096, ..."""
    found = _SHORTEST_BAND
    while found < length:
        found *= _BAND_STEP
    return found


@torch.no_grad()
def measure(
    target: Target, length: int = _SHORTEST_BAND, sizes: Sequence[int] | None = None, seconds: float = 1.0
) -> CostCurve:
    """Times forward passes over trees of the given sizes after `length` random tokens, for some `seconds`.

    Nothing is left behind. The text is shorter where the model's context has no room for both; sizes for which there is
    none are left out. Trees that are not exact at that length are timed as well: that is for `decode` to decide, at
    each step. On an accelerator the device is waited for after each pass. Processes that share a model all have the
    curve of the first one. Where steps are fast, whole steps of their sizes are timed.
    """
    if target.steps is not None:
        from .fast.timing import staircase

        return staircase(target, target.steps, length, seconds)
    wanted = tuple(sizes or _sizes(target))
    length = with_room(target, length, wanted[-1])
    limit = target.max_length or math.inf
    trees = {n: _star(n) for n in wanted if n == 1 or length + n <= limit}
    cache = filled(target, length)
    held, kept = cache.get_seq_length(), TreeCache(cache)
    best: dict[int, float] = {}
    began = time.perf_counter()
    for done in range(_MOST_ROUNDS):
        if done >= _LEAST_ROUNDS and agreed(target.model, time.perf_counter() - began) > seconds:
            break
        for n, tree in trees.items():
            draft = Draft(tree, torch.zeros(n, dtype=torch.long, device=target.device))
            wait(target.device)
            start = time.perf_counter()
            target.forward(target.inputs([draft], [held], held), cache)
            wait(target.device)
            taken = max(time.perf_counter() - start, _TICK)
            kept.keep(held, [held], [[]])
            best[n] = min(taken, best.get(n, taken))
    return agreed(target.model, CostCurve(length, tuple(best), tuple(best.values())))


def with_room(target: Target, length: int, nodes: int | None = None) -> int:
    """The length, less where the model's context has no room for it and `nodes` (default the largest measured tree)."""
    if target.max_length is None:
        return length
    return max(1, min(length, target.max_length - (nodes or _sizes(target)[-1])))


def _sizes(target: Target) -> tuple[int, ...]:
    return CPU_SIZES if target.device.type == "cpu" else ACCELERATOR_SIZES


def _star(nodes: int) -> Tree:
    return Tree((-1, *[0] * (nodes - 1)), tuple(range(nodes)))


def filled(target: Target, length: int):  # type: ignore[no-untyped-def]
    """A cache as after so many tokens. Where the layers allow it, a few tokens' states are repeated."""
    cache = target.new_cache()
    tokens = torch.arange(1, min(_PROMPT, length) + 2, device=target.device) % target.embedded
    target.prefill([tokens], cache)
    unroll(cache)
    if all(type(layer) is DynamicLayer for layer in cache.layers):
        times = -(-length // cache.get_seq_length())
        for layer in cache.layers:
            layer.keys = layer.keys.repeat(1, 1, times, 1)[:, :, :length]
            layer.values = layer.values.repeat(1, 1, times, 1)[:, :, :length]
        return cache
    cache = target.new_cache()
    target.prefill([torch.arange(length + 1, device=target.device) % target.embedded], cache)
    return cache


def wait(device: torch.device) -> None:
    """Until an accelerator has done all that it was asked for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


_measured: WeakKeyDictionary[PreTrainedModel, dict[tuple[int, int, str], CostCurve]] = WeakKeyDictionary()


def costs(target: Target, length: int) -> CostCurve:
    """The curve for texts of so many tokens: one saved by `tune`, else measured once in this process."""
    length = with_room(target, band(length))
    key = (length, torch.get_num_threads(), target.steps.kind if target.steps else "")
    known = _measured.setdefault(target.model, {})
    if key not in known:
        saved = agreed(target.model, {curve.length: curve for curve in load(target)})
        known[key] = saved.get(length) or _brief(target, length)
    return known[key]


def _brief(target: Target, length: int) -> CostCurve:
    if target.steps is not None:
        return measure(target, length, seconds=_BRIEFLY)
    sizes = [size for size in _sizes(target) if size in _BRIEF_SIZES]
    return measure(target, length, sizes, _BRIEFLY).convex()


def save(target: Target, curves: Sequence[CostCurve]) -> Path:
    """Keeps curves for this model, device, type of numbers and number of threads; returns the file."""
    path = _file(target)
    with replacing(path) as temporary:
        held = {"setting": setting(target), "curves": [asdict(curve) for curve in curves]}
        Path(temporary).write_text(json.dumps(held, indent=1))
    _measured.pop(target.model, None)
    return path


def load(target: Target) -> list[CostCurve]:
    """The saved curves of this model, device, type of numbers and number of threads; empty if there are none.

    Raises ValueError for a damaged file.
    """
    path = _file(target)
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text())["curves"]
        return [CostCurve(one["length"], tuple(one["sizes"]), tuple(one["seconds"])) for one in found]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"expected the curves of `token-recycling tune` in {path}, got something else ({error}); delete it"
        ) from None


def setting(target: Target) -> dict[str, str]:
    """What a curve depends on, besides the length."""
    device = target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} cores"
    config = {key: value for key, value in target.config.to_dict().items() if key != "_name_or_path"}
    return {
        "model": type(target.model).__name__,
        "shape": hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16],
        "attention": target.support.attention,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": f"{device.type}, {name}",
        "threads": str(torch.get_num_threads()) if device.type == "cpu" else "",
        **({"steps": target.steps.kind} if target.steps else {}),
    }


def _file(target: Target) -> Path:
    digest = hashlib.sha256(json.dumps(setting(target), sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "costs" / f"{digest}.json"


def cache_folder() -> Path:
    """Where measurements are kept: `TOKEN_RECYCLING_CACHE`, else `token_recycling` in the user's cache folder."""
    own = os.environ.get("TOKEN_RECYCLING_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "token_recycling"
