"""A plain and an accelerated model, created and changed alike, whose calls must return the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.tiny import seeded

import token_recycling as tr


class SideBySide:
    """A plain and an accelerated model, each with its own hooks, adapters and state."""

    def __init__(self, make: Callable[[], Any], *how: Any) -> None:
        self.plain, self.accelerated = make(), make()
        tr.accelerate(self.base, *how)

    @property
    def base(self) -> Any:
        """The accelerated model, without peft's wrapper."""
        whole = self.accelerated
        return whole.get_base_model() if hasattr(whole, "get_base_model") else whole

    def change(self, change: Callable[[Any], Any]) -> list[Any]:
        """Apply a change to both models and return its results."""
        return [change(model) for model in (self.plain, self.accelerated)]

    def assert_same(self, call: Callable[[Any], Any], reason: str | None = None, times: int = 1) -> Any:
        """Assert that calls of both models, with the same seeds, return the same, and that the accelerated ones fall
        back to `generate` for this reason, or not at all. Return the result of the last plain call.
        """
        for seed in range(times):
            wanted, found = (seeded(call, model, seed=seed)[0] for model in (self.plain, self.accelerated))
            assert_same(found, wanted)
            fallback = self.base.acceleration.fallback
            assert fallback is None if reason is None else fallback is not None and reason in fallback, fallback
        return wanted


def assert_same(found: Any, wanted: Any) -> None:
    """Assert that two results are equal, floating-point tensors up to rounding."""
    if isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), (found, wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    elif isinstance(wanted, torch.Tensor) and wanted.is_floating_point():
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    elif isinstance(wanted, torch.Tensor):
        assert found.tolist() == wanted.tolist()
    else:
        assert found == wanted
