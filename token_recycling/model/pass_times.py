"""Cost t(n) of verifying n nodes, learned from a model's steps by batch size and length, and kept on disk.

Nothing is measured separately. The first step starts from costs that earlier processes learned about the model on this
machine, or from a prior; every step updates them (`costs`). Only the shape t(n) / t(1) is kept on disk, as a slow
average, so a machine that is busy for a while distorts it little. It is written when a sequence has ended, at most once
a minute.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed

from .._util.device import machine
from .._util.files import facts_file, read_facts, write_facts
from .._util.locks import Lock
from ..costs import OnlineCurve
from .target import Target

_SHORTEST_BAND, _BAND_STEP = 256, 4
"""Longest sequence of the first length band, in tokens, and the factor between bands."""
_MOST_ON_CPU, _MOST = 64, 256
"""Nodes of the largest forward passes considered."""
_BYTES_ON_CPU, _BYTES = 1e10, 1e12
"""Bytes of weights read per second, until steps were timed."""
_SECONDS, _STEPS, _SHARE = 60.0, 16, 0.25
"""Minimum time between two writes; minimum steps of a curve that is written; weight of the newest shape."""
_FLATTEST, _STEEPEST = 0.2, 2.0
"""Bounds of the factor on the usual cost of further rows, as estimated from products only."""
_FEW = 16
"""Maximum rows in 16 bits where costs are fixed."""
_DEAREST = 1.5
"""A curve is implausible if n nodes cost more than this many times n single ones."""


def shared_by(sequences: int, times: np.ndarray) -> np.ndarray:
    """Return seconds by nodes of each sequence, (nodes,) float64, from `times` (rows,) by rows of the whole batch."""
    return times[min(sequences, len(times)) - 1 :: sequences]


def band(length: int) -> range:
    """Return the band of lengths that shares a curve with sequences of `length` tokens: up to 256, 1,024, 4,096, ..."""
    shorter, longest = 0, _SHORTEST_BAND
    while longest < length:
        shorter, longest = longest, longest * _BAND_STEP
    return range(shorter + 1, longest + 1)


class PassTimes:
    """Learned cost curves of one model, for one way of making steps."""

    def __init__(self, prior: np.ndarray, setting: dict[str, str] | None) -> None:
        """`prior` (nodes,) float64: see the function. `setting`: values that t(n) depends on; None to store nothing."""
        self._prior, self._setting = prior, setting
        self._curves: dict[tuple[int, int], OnlineCurve] = {}
        """By batch size and the greatest length of a band."""
        self._path = None if setting is None else facts_file("costs", setting)
        self._written = -math.inf
        self._choosing = Lock()

    def curve(self, sequences: int, length: int) -> OnlineCurve:
        """Return the cost curve for a batch of this many sequences, the longest of `length` tokens. It starts from the
        curve on disk, else from that of another length or of one sequence.
        """
        key = sequences, band(length)[-1]
        with self._choosing:
            if key not in self._curves:
                self._curves[key] = OnlineCurve(self._begun(*key))
            return self._curves[key]

    def _begun(self, sequences: int, length: int) -> np.ndarray:
        by_length = {n: shape * self._prior[0] for (count, n), shape in self._on_disk().items() if count == sequences}
        learned = {key: curve.seconds for key, curve in self._curves.items() if curve.steps}
        by_length |= {n: seconds for (count, n), seconds in learned.items() if count == sequences}
        if by_length:
            return by_length[min(by_length, key=lambda other: abs(math.log(other / length)))]
        return self._prior if sequences == 1 else shared_by(sequences, self.curve(1, length).seconds)

    def _on_disk(self) -> dict[tuple[int, int], np.ndarray]:
        """Return the plausible shapes on disk."""
        return {} if self._path is None else read_facts(self._path, self._parsed, {})

    def _parsed(self, content: dict[str, Any]) -> dict[tuple[int, int], np.ndarray]:
        shapes = {
            (curve["texts"], curve["length"]): np.asarray(curve["relative"], dtype=np.float64)
            for curve in content["curves"]
        }
        return {
            (sequences, length): shape
            for (sequences, length), shape in shapes.items()
            if _plausible(shape) and len(shape) == len(shared_by(sequences, self._prior))
        }

    def keep(self) -> None:
        """Save learned costs to disk periodically; called at the end of a sequence. Other threads do not wait for the
        disk: the lock is held only while the curves are read.
        """
        with self._choosing:  # another thread's sequence may begin with a new length
            now = time.monotonic()
            if self._path is None or now - self._written < _SECONDS:
                return
            learned = {key: curve.shape() for key, curve in self._curves.items() if curve.steps >= _STEPS}
            learned = {key: shape for key, shape in learned.items() if _plausible(shape)}
            if not learned:
                return
            self._written = now
        shapes = self._on_disk()
        for key, shape in learned.items():
            shapes[key] = shapes[key] ** (1 - _SHARE) * shape**_SHARE if key in shapes else shape
        curves = [
            {"texts": sequences, "length": length, "relative": np.round(shape, 4).tolist()}
            for (sequences, length), shape in sorted(shapes.items())
        ]
        write_facts(self._path, {"setting": self._setting, "curves": curves})


def _plausible(shape: np.ndarray) -> bool:
    """Return whether t(n) / t(1) (nodes,) is plausible."""
    if shape.ndim != 1 or not len(shape) or shape[0] != 1:
        return False
    # Comparisons with NaN are false.
    return bool((np.diff(shape) >= 0).all() and (shape <= _DEAREST * np.arange(1, len(shape) + 1)).all())


def pass_times(target: Target, kind: str = "") -> PassTimes:
    """Return the learned costs of a model in this process; `kind`: how steps are made, if not eagerly."""
    key: Hashable = ("costs", kind, torch.get_num_threads(), target.prepacked is not None)
    return target.facts.get(key, partial(_new, target, kind), of="form")


def agreed_time(target: Target, seconds: float) -> float:
    """Return the time that rank 0 measured, which all ranks of a model use: with different trees they would deadlock.
    All must call it at the same point. One broadcast of 8 bytes.
    """
    agreed = torch.tensor(seconds, dtype=torch.float64, device=target.device)
    meshes = (weight.device_mesh for weight in target.model.parameters() if hasattr(weight, "device_mesh"))
    mesh = next(meshes, None)
    group = None if mesh is None else mesh["tp"].get_group() if mesh.ndim > 1 else mesh.get_group()
    torch.distributed.broadcast(agreed, group=group, group_src=0)
    return float(agreed)


def fixed_curve(target: Target, sequences: int) -> OnlineCurve:
    """Return the cost curve of a batch of this many sequences if nothing is measured."""
    # In 16 bits a pass over 16 rows takes little more than one over a single row: the weights are read once.
    return OnlineCurve(shared_by(sequences, np.ones(_FEW) if target.dtype.itemsize < 4 else prior(target)))


def _new(target: Target, kind: str) -> PassTimes:
    # Processes that share a model must start from the same curves, and may see different disks.
    return PassTimes(prior(target), setting(target, kind) if target.processes < 2 else None)


def setting(target: Target, kind: str = "") -> dict[str, str]:
    """Return the values that t(n) depends on, besides batch size and length."""
    return {
        "model": type(target.model).__name__,
        "shape": target.shape,
        "attention": target.info.attention,
        "dtype": str(target.dtype).removeprefix("torch."),
        "machine": machine(target.device),
        "threads": str(torch.get_num_threads()) if target.device.type == "cpu" else "",
        **({"steps": kind} if kind else {}),
        **({"weights": "prepacked"} if target.prepacked is not None else {}),
    }


def prior(target: Target) -> np.ndarray:
    """Return the prior cost (nodes,) float64 of forward passes over 1, 2, ... nodes, in seconds.

    The weights are read once. On a CPU rows add to that, the first ones most: the curve lies between those measured for
    models of 8 and 135 million parameters in float32 and bfloat16. With prepacked weights it is scaled so that eight
    rows cost as much as their products did when the weights were packed. An accelerator is memory-bound.
    """
    on_cpu = target.device.type == "cpu"
    nodes = np.arange(1, 1 + (_MOST_ON_CPU if on_cpu else _MOST))
    more = np.log2(nodes) / 8 + (nodes - 1) / 50 if on_cpu else (nodes - 1) / 512
    if target.prepacked is not None and target.prepacked.eight is not None:
        more *= min(_STEEPEST, max(_FLATTEST, (target.prepacked.eight - 1) / more[7]))
    shape = 1 + more
    return target.bytes_read / (_BYTES_ON_CPU if on_cpu else _BYTES) * shape
