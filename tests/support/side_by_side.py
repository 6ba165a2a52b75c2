"""A plain model and an accelerated one, made and changed alike: their calls return the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.tiny import seeded

import token_recycling as tr


class SideBySide:
    """A plain model and an accelerated one, each with hooks, adapters and state of its own."""

    def __init__(self, make: Callable[[], Any], *how: Any) -> None:
        self.plain, self.accelerated = make(), make()
        tr.accelerate(self.base, *how)

    @property
    def base(self) -> Any:
        """The accelerated model, within peft's wrapper if it has one."""
        whole = self.accelerated
        return whole.get_base_model() if hasattr(whole, "get_base_model") else whole

    def change(self, change: Callable[[Any], Any]) -> list[Any]:
        """What a change returns, made to both models."""
        return [change(model) for model in (self.plain, self.accelerated)]

    def assert_same(self, call: Callable[[Any], Any], reason: str | None = None, times: int = 1) -> Any:
        """What the last of some calls of the plain model returns. Those of the accelerated one, which begin with the
        same seed, return the same, and are left to `generate` for this reason or for none.
        """
        for seed in range(times):
            wanted, found = (seeded(call, model, seed=seed)[0] for model in (self.plain, self.accelerated))
            assert_same(found, wanted)
            fallback = self.base.acceleration.fallback
            assert fallback is None if reason is None else fallback is not None and reason in fallback, fallback
        return wanted


def assert_same(found: Any, wanted: Any) -> None:
    """Two results are equal, numbers that are computed to rounding."""
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
