"""Decisions that plain code bases on numbers of a forward pass. `if states.max() > 9:` changes all rows of the pass
because of one row; so does a column that is rounded unless one of its rows is large. A trial may not hit such a case.

So values that follow from the tokens are traced through all operations of one pass over a tree: no foreign function may
read a truth value or a float from them. Only classes may read integers: they choose experts by them, row by row. In
further checks some nodes of a tree are made large, or zero, in the inputs of foreign code, or are placed at the first
or the last position that the model has: no other node may change.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ...trees.draft import branch, star
from ..origin import package_of
from ..parts import is_compiled, parts_of
from ..self_test import before_tree, tree_logits
from ..target import Target
from .bystanders import memory_of
from .plain import Reachable
from .search import Foreign, codes_within

_TAKING = frozenset(
    {
        *("__bool__", "__float__", "__contains__", "item", "equal", "allclose", "is_nonzero"),
        *("__format__", "__repr__"),
    }
)
"""Operations that return a number to Python, or its text form."""
_COUNTING = frozenset(
    {
        *("__int__", "__index__", "item", "tolist", "numpy", "__array__", "nonzero", "argwhere", "masked_select"),
        *("unique", "unique_consecutive", "bincount", "repeat_interleave"),
    }
)
"""Operations that return integers to Python, or whose number of results depends on values."""
_FACTORS = {torch.float16: (10.0, 0.0)}
_USUAL_FACTORS = (100.0, 0.0)
"""Multipliers of nodes, by the model's dtype: smaller where attention scores would overflow."""
_FAR = 1 << 16
"""Length up to which positions are tried in models without a limit."""


def decides_by_numbers(
    target: Target, searched: Sequence[Reachable], texts: torch.Tensor, parents: np.ndarray, nodes: torch.Tensor
) -> str | None:
    """Return the name of a foreign function that bases a decision on numbers of a pass over a tree, or None; the
    arguments are those of `self_test.tree_logits`. Calls compiled by torch.compile cannot be traced and return None.
    """
    if any(map(is_compiled, parts_of(target.eager))):
        return None
    cache, inputs = before_tree(target, texts, parents, nodes)
    codes: dict[CodeType, bool] = {}
    for reach in searched:
        for code in (code for function in reach.functions for code in codes_within(function.__code__)):
            codes[code] = codes.get(code, True) and reach.is_class
    with _Tracing(inputs.tokens, codes) as tracing:
        target.forward(inputs, cache)
    return tracing.decided_by


def large_rows_change_others(
    target: Target, foreign: Sequence[Foreign], texts: torch.Tensor, nodes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return logits of the nodes that must not change while the other nodes are large or zero, and their expected
    logits; None if foreign code is in no module except the model itself. `nodes` (n,): children of the last tokens of
    the texts (batch, length). Where trees cannot branch, only the root must stay unchanged.
    """
    model = target.eager
    holders = {piece.holder: None for piece in foreign if isinstance(piece.holder, torch.nn.Module)}.keys() - {model}
    if not holders:
        return None
    parents, kept = _with_others(target, nodes)
    rows, wanted = len(parents), tree_logits(target, texts, parents, nodes)[:, :kept]
    results = []
    for factor in _FACTORS.get(target.dtype, _USUAL_FACTORS):
        cache, inputs = before_tree(target, texts, parents, nodes)
        with _scaling(holders, rows, kept, factor):
            logits = target.forward(inputs, cache)[:, :kept]
        # A large node may overflow, and masked values are multiplied by zero: such a result proves nothing.
        results.append(logits if bool((logits.isfinite() | ~wanted.isfinite()).all()) else wanted)
    return torch.stack(results), torch.stack([wanted] * len(results))


def distant_rows_change_others(
    target: Target, texts: torch.Tensor, nodes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return logits of the nodes that must not change while the other nodes are at the first or the last position, and
    their expected logits; None if the model has a bias for each slot, which positions select. The arguments are those
    of `large_rows_change_others`.
    """
    if target.info.key_bias is not None:
        return None
    threshold, (parents, kept) = target.info.length_threshold, _with_others(target, nodes)
    last = min(target.max_length or _FAR, _FAR if threshold is None else threshold.at) - 1
    wanted, results = tree_logits(target, texts, parents, nodes)[:, :kept], []
    for position in (0, last):
        cache, inputs = before_tree(target, texts, parents, nodes)
        inputs.positions[:, kept:] = position
        results.append(target.forward(inputs, cache)[:, :kept])
    return torch.stack(results), torch.stack([wanted] * len(results))


def _with_others(target: Target, nodes: torch.Tensor) -> tuple[np.ndarray, int]:
    """Return the parents of a tree of `nodes`, and how many of its first nodes attend to none of the others."""
    return (star(1 + len(nodes)), 2) if target.info.branches else (branch(1 + len(nodes)), 1)


@contextlib.contextmanager
def _scaling(modules: Iterable[torch.nn.Module], rows: int, first: int, factor: float) -> Iterator[None]:
    """Within the block, multiply the states (batch, rows, ...) given to modules in this thread, from row `first` on."""
    thread = threading.get_ident()

    def changed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.shape[1:2] != (rows,):
            return value
        return torch.cat([value[:, :first], value[:, first:] * factor], dim=1)

    def change(module: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return None
        return tuple(map(changed, args)), {name: changed(value) for name, value in kwargs.items()}

    with contextlib.ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_pre_hook(change, prepend=True, with_kwargs=True).remove)
        yield


class _Tracing(TorchFunctionMode):
    """Traces tensors that follow from the tokens, and records the foreign function that reads numbers from them."""

    def __init__(self, tokens: torch.Tensor, codes: dict[CodeType, bool]) -> None:
        """`codes`: code of foreign functions, and whether each may take integers."""
        super().__init__()
        self.decided_by: str | None = None
        self._codes = codes
        self._followed: list[torch.Tensor] = []
        """Kept alive, so that no other tensor reuses their memory."""
        self._memory: set[int] = set()
        self._follow(tokens)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self._memory.isdisjoint(memory_of(_tensors((args, kwargs)))):
            return result
        name = getattr(function, "__name__", "")
        takes = name in _TAKING and isinstance(result, (bool, float, str))
        masks = [index for index in _tensors(args[1:]) if index.dtype is torch.bool] if name == "__getitem__" else []
        selects = not self._memory.isdisjoint(memory_of(masks))
        if takes or selects or name in _COUNTING or (name == "where" and isinstance(result, tuple)):
            caller = _caller(sys._getframe(1))
            code = None if caller is None else caller.f_code
            if code in self._codes and (takes or not self._codes[code]):
                self.decided_by = code.co_qualname
        for tensor in _tensors(result):
            self._follow(tensor)
        return result

    def _follow(self, tensor: torch.Tensor) -> None:
        self._followed.append(tensor)
        self._memory |= memory_of([tensor])


def _tensors(item: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments or results of an operation."""
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, (tuple, list)):
        for part in item:
            yield from _tensors(part)
    elif isinstance(item, dict):
        yield from _tensors([*item.values()])


def _caller(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame outside torch."""
    while frame is not None and package_of(frame.f_globals.get("__name__")) == "torch":
        frame = frame.f_back
    return frame
