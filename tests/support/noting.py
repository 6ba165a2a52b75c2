"""Record forward passes of accelerated calls; hooks of a user would prevent acceleration."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

import token_recycling.model.hidden


def _as_own(*given: Any, **named: Any) -> Any:
    """Code of the hooks; `hook` is a global of each function made by `own`."""
    return hook(*given, **named)  # noqa: F821


def own(hook: Callable[..., Any]) -> FunctionType:
    """Return a copy of a hook that counts as the library's own, which are known to change nothing."""
    variables = {"__name__": token_recycling.model.hidden.__name__, "hook": hook}
    return FunctionType(_as_own.__code__, variables)


def noted(model: torch.nn.Module, of: Callable[[dict[str, Any]], Any]) -> tuple[list[Any], RemovableHandle]:
    """Return a list to which `of(arguments)` is appended before each forward pass, and the handle of its hook."""
    notes: list[Any] = []

    def note(module: torch.nn.Module, inputs: Any, arguments: dict[str, Any]) -> None:
        notes.append(of(arguments))

    return notes, model.register_forward_pre_hook(own(note), with_kwargs=True)
