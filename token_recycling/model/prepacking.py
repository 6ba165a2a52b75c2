"""Prepacked weights on a CPU: linear layers stored in the layout that products of a few rows need.

For a product of several rows, torch calls a library that rearranges the weights in every call. In float32 eight rows
then take two to three times as long as one. With weights that oneDNN has packed once, eight rows take 1.4 times as long
as one in float32, and in bfloat16 every forward pass takes a quarter less. Packing costs a second copy of the weights.
So it is done if memory allows, and used for the numbers of rows for which it was faster when the weights were packed.

torch has no public way to prepack weights except compiling the whole model: its compiler uses `torch.ops.mkldnn`.

The copy is valid while the weights are unchanged. A layer falls back to its own product as soon as its weight is
another tensor or was written to. Writes through a tensor's `.data`, which torch does not count, are detected at the
start of the next call: one number of every row and column of every weight is compared, since such writes usually change
whole rows and columns, as of a token, a neuron or a head.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from .._util.device import memory
from ..costs import TICK
from .compat import packed_product, packed_types, packed_weight, version
from .facts import Facts, address_of, facts_of
from .parts import parts_of

_LEAST_BYTES = 4_000_000
"""Smaller weights, which fit into a core's caches, are packed only on request."""
_SHARE_OF_MEMORY = 4
"""If the copy takes more than one part in this many of memory, packing is done only on request."""
_ROWS = (8, 4, 2, 1)
"""Numbers of rows that are timed: packed weights are used down to the smallest one at which they were still faster."""
_TRIED = 128_000_000
"""Maximum bytes of weights of one shape that are timed."""
_FASTER = 0.97
_USUALLY = {torch.bfloat16: 1, torch.float32: 4}
"""Rows from which packed weights are mostly faster."""
_PREPACKED_FOR = 16
"""Rows that the weights are packed for; other numbers take the same time."""
_PATIENCE = 1.0
"""Seconds above which the time of packing is logged."""
PREPACKED = "prepacked"

logger = logging.getLogger("token_recycling")

_used: ContextVar[Prepacked | None] = ContextVar("prepacked", default=None)
"""The packed weights that forward passes of this thread use."""


class _Layer:
    """Replaces `forward` of one linear layer: its packed product within `Prepacked.used`, else its own."""

    def __init__(self, module: nn.Linear, owner: Prepacked) -> None:
        self.module, self._owner = module, owner
        self.weight, self._at = module.weight, address_of(module.weight)
        self._version = version(self.weight)
        self.packed = packed_weight(self.weight.detach(), _PREPACKED_FOR)
        self._product = packed_product()
        rows, columns = self.weight.shape
        values = self.weight.detach()
        self._some = values[:, columns // 2], values[rows // 2]
        self._numbers = [numbers.clone() for numbers in self._some]
        self._strides = self.weight.stride()
        self.least = 1
        """Rows from which the packed product is used."""

    def __call__(self, input: torch.Tensor) -> torch.Tensor:  # callers may pass `input` by name
        if (
            torch.compiler.is_dynamo_compiling()
            or _used.get() is not self._owner
            or input.numel() < self.least * input.shape[-1]
            or not self.holds
            or input.dtype is not self.weight.dtype
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled("cpu")
            or type(self.module) is not nn.Linear
        ):
            return _own_product(self.module, input)
        return self.product(input)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., in) times the packed weight, with the layer's bias."""
        return self._product(x, self.packed, self.module.bias, "none", [], "")

    @property
    def holds(self) -> bool:
        """Whether the layer's weight is the tensor that was packed, unwritten since, as far as torch counts."""
        weight = self.module.weight
        return weight is self.weight and version(weight) == self._version and weight.data_ptr() == self._at

    @property
    def unchanged(self) -> bool:
        """Whether one number of every row and column of the weight is unchanged, and so is the order in memory."""
        return self.module.weight.stride() == self._strides and all(map(torch.equal, self._some, self._numbers))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as the layer's own product: a copy of the model packs its own weights."""
        return partial, (_own_product, self.module)


def _own_product(module: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """Return the product by the `forward` of the layer's class, which may have changed since the layer was packed."""
    return type(module).forward(module, input)


def is_packed(function: Any) -> bool:
    """Return whether a function is the packed product that replaces a linear layer's `forward`."""
    return isinstance(function, _Layer)


class Prepacked:
    """The packed weights of one model."""

    def __init__(self, modules: Sequence[nn.Linear], fixed: bool = False) -> None:
        """Pack the weights of `modules`, and measure for each shape from how many rows on that is faster; only such
        layers stay packed. `fixed`: measure nothing, so that every process rounds alike.
        """
        self.layers = [_Layer(module, self) for module in modules]
        self.fixed = fixed
        self.eight: float | None = None
        """Time of the products of eight rows / of one row; None if not measured."""
        if fixed:
            for layer in self.layers:
                layer.least = _USUALLY[layer.weight.dtype]
        else:
            self._try()
        for layer in self.layers:
            setattr(layer.module, "forward", layer)  # noqa: B010 (a method, to the type checker)

    def _try(self) -> None:
        shapes: dict[torch.Size, list[_Layer]] = {}
        for layer in self.layers:
            shapes.setdefault(layer.weight.shape, []).append(layer)
        tried = {shape: alike[: max(1, _TRIED // alike[0].weight.nbytes)] for shape, alike in shapes.items()}
        own, packed = ({rows: _seconds(tried, rows, way) for rows in _ROWS} for way in (False, True))
        for shape, alike in shapes.items():
            least = _least_rows({rows: packed[rows][shape] / own[rows][shape] for rows in _ROWS})
            for layer in alike:
                layer.least = least
        one, eight = (
            sum(min(own[rows][shape], packed[rows][shape]) * len(alike) for shape, alike in shapes.items())
            for rows in (1, 8)
        )
        self.eight = eight / one
        self.layers = [layer for layer in self.layers if layer.least]

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return sum(layer.weight.nbytes for layer in self.layers)

    @property
    def unchanged(self) -> bool:
        """Whether a sample of the weights shows no write that torch does not count; others drop this object
        (`facts`).
        """
        return all(layer.unchanged for layer in self.layers)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Within the block, passes of this thread use the packed weights."""
        token = _used.set(self)
        try:
            yield
        finally:
            _used.reset(token)

    def drop(self) -> None:
        """Restore every layer's own product, and free the memory."""
        for layer in self.layers:
            if vars(layer.module).get("forward") is layer:
                del layer.module.forward
        self.layers = []


def _least_rows(ratios: Mapping[int, float]) -> int:
    """Return the number of rows from which packed weights are used, by their relative time; 0 if never."""
    return min(itertools.takewhile(lambda rows: ratios[rows] < _FASTER, _ROWS), default=0)


def _seconds(layers: Mapping[torch.Size, Sequence[_Layer]], rows: int, packed: bool) -> dict[torch.Size, float]:
    """Return the mean seconds of a product of `rows` rows with a layer of each shape. All layers are read in turn, so
    that none is in the CPU's caches.
    """
    seconds = {}
    for shape, alike in layers.items():
        x = torch.ones(rows, shape[1], dtype=alike[0].weight.dtype)
        began = time.perf_counter()
        for layer in alike:
            layer.product(x) if packed else linear(x, layer.weight, layer.module.bias)
        seconds[shape] = max(TICK, time.perf_counter() - began) / len(alike)
    return seconds


def prepack(model: PreTrainedModel, wanted: bool | None = None, fixed: bool = False) -> Prepacked | None:
    """Pack the weights of a model's linear layers, once; return them, or None if they are not packed.

    `wanted=None` packs where possible, if the weights are not tiny and take at most a quarter of memory; `True`
    wherever possible, else raises ValueError; `False` drops packed weights. `fixed`: see `Prepacked`.
    """
    if wanted is not None and not isinstance(wanted, bool):
        raise TypeError(f"prepack must be True, False or None, got {wanted!r}")
    if wanted is False:
        drop(model)
        return None
    modules, reason = _layers_among(parts_of(model))
    needed = sum(module.weight.nbytes for module in modules)
    if wanted is None and not _LEAST_BYTES <= needed <= memory(torch.device("cpu")) // _SHARE_OF_MEMORY:
        return None
    if reason is not None:
        if wanted:
            raise ValueError(f"cannot prepack this model: {reason}; leave prepack=True out")
        return None
    facts = facts_of(model)
    packed = facts.recall(PREPACKED)
    if packed is not None and packed.fixed == fixed and packed.unchanged:
        return packed
    drop(model)
    began = time.perf_counter()
    packed = facts.get(PREPACKED, lambda: Prepacked(modules, fixed))
    if time.perf_counter() - began > _PATIENCE:
        logger.warning("prepacked weights in %.1f s, once", time.perf_counter() - began)
    return packed


def prepacked_of(model: PreTrainedModel, facts: Facts | None = None) -> Prepacked | None:
    """Return the prepacked weights of a model in its present state, if there are any. They are dropped if the model's
    weights were changed in a way that torch does not count. `facts`: the model's, if the caller already has them.
    """
    packed = (facts or facts_of(model)).recall(PREPACKED)
    if packed is not None and not packed.unchanged:
        drop(model)
        return None
    return packed


def drop(model: PreTrainedModel) -> None:
    """Drop packed weights, whatever the state of the model."""
    for module in parts_of(model):
        layer = vars(module).get("forward")
        if isinstance(layer, _Layer):
            layer._owner.drop()
    facts_of(model).forget(PREPACKED)


def _layers_among(parts: Iterable[nn.Module]) -> tuple[list[nn.Linear], str | None]:
    """Return the layers that can be packed, or why there are none."""
    dtypes = packed_types()
    if not dtypes:
        return [], "this build of torch has no oneDNN"
    layers = [part for part in parts if type(part) is nn.Linear and _packable(part, dtypes)]
    return layers, None if layers else "it has no linear layers in float32 or bfloat16 that this CPU multiplies"


def _packable(module: nn.Linear, dtypes: set[torch.dtype]) -> bool:
    weight, forward = module.weight, vars(module).get("forward")
    return (
        type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.dtype in dtypes
        and weight.layout is torch.strided
        and not weight.is_inference()
        and address_of(weight) != 0
        and (forward is None or isinstance(forward, _Layer) or getattr(forward, "func", None) is _own_product)
    )
