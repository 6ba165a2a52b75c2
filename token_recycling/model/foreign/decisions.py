"""Decisions that plain code makes by numbers of a forward pass: `if states.max() > 9:` changes all rows of the pass by
one of them. A trial need not meet the case, so that the code is looked at while it runs: in one pass over a tree, what
follows from the tokens is traced through all operations, and no foreign function may take a truth value or a fraction
of it. Integers may be taken: experts are chosen by them, row by row.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ...trees.draft import Draft
from ..origin import package_of
from ..parts import is_compiled, parts_of
from ..prefill import prefill
from ..target import Target
from .plain import Reachable

_TAKING = frozenset({"__bool__", "__float__", "__contains__", "item", "equal", "allclose", "is_nonzero"})
"""Operations that give a number to Python."""


def decides_by_numbers(
    target: Target, searched: Sequence[Reachable], texts: torch.Tensor, parents: np.ndarray, nodes: torch.Tensor
) -> str | None:
    """Return the name of a foreign function that decides by numbers of a pass over a tree, or None; the arguments are
    those of `self_test.tree_logits`. Calls that torch.compile made cannot be traced.
    """
    if any(map(is_compiled, parts_of(target.eager))):
        return None
    cache, length = target.new_cache(), texts.shape[1] - 1
    prefill(target, list(texts), cache)
    drafts = [Draft(torch.cat([text[-1:], nodes.to(text.device)]), parents) for text in texts]
    inputs = target.inputs.of(drafts, [length] * len(texts), length)
    codes = {code for reach in searched for function in reach.functions for code in _within(function.__code__)}
    with _Tracing(inputs.tokens, codes) as tracing:
        target.forward(inputs, cache)
    return tracing.decided_by


def _within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _within(constant)


class _Tracing(TorchFunctionMode):
    """Traces what follows from tokens, and who takes numbers of it."""

    def __init__(self, tokens: torch.Tensor, codes: set[CodeType]) -> None:
        super().__init__()
        self.decided_by: str | None = None
        self._codes = codes
        self._followed: list[torch.Tensor] = []
        """Kept, so that no other tensor gets the memory of one."""
        self._memory: set[int] = set()
        self._follow(tokens)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self._memory.isdisjoint(map(_address, _tensors((args, kwargs)))):
            return result
        if getattr(function, "__name__", "") in _TAKING and isinstance(result, (bool, float)):
            caller = _caller(sys._getframe(1))
            if caller is not None and caller.f_code in self._codes:
                self.decided_by = caller.f_code.co_qualname
        for tensor in _tensors(result):
            self._follow(tensor)
        return result

    def _follow(self, tensor: torch.Tensor) -> None:
        self._followed.append(tensor)
        self._memory |= {_address(tensor)} - {0}


def _tensors(item: Any) -> Iterator[torch.Tensor]:
    """Tensors among arguments or results of an operation."""
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, (tuple, list)):
        for part in item:
            yield from _tensors(part)
    elif isinstance(item, dict):
        yield from _tensors([*item.values()])


def _address(tensor: torch.Tensor) -> int:
    """Address of the memory that a tensor is a view of, 0 if it has none."""
    with contextlib.suppress(RuntimeError, NotImplementedError):  # one that wraps others
        return tensor.untyped_storage().data_ptr()
    return 0


def _caller(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame that is none of torch's."""
    while frame is not None and package_of(frame.f_globals.get("__name__")) == "torch":
        frame = frame.f_back
    return frame
