"""Notes of the forward passes of accelerated calls: hooks of a user's would prevent acceleration."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

import token_recycling.model.hidden


def _note(module: Any, inputs: Any, arguments: Any) -> None:
    """The code of hooks; their variables are not those of this module."""
    notes.append(of(arguments))  # noqa: F821


def noted(model: torch.nn.Module, of: Callable[[dict[str, Any]], Any]) -> tuple[list[Any], RemovableHandle]:
    """Return a list that grows by `of(arguments)` before each forward pass of a model, and the handle of its hook. It
    counts as one of this library's own, which change nothing.
    """
    notes: list[Any] = []
    variables = {"__name__": token_recycling.model.hidden.__name__, "notes": notes, "of": of}
    hook = FunctionType(_note.__code__, variables)
    return notes, model.register_forward_pre_hook(hook, with_kwargs=True)
