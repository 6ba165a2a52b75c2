"""Random numbers of one text among others."""

from __future__ import annotations

import torch


class Draws:
    """Within it torch draws what it would for this text alone after `torch.manual_seed(seed)`."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device
        before = self._now()
        torch.manual_seed(seed)
        self._own = self._now()
        self._set(before)

    def __enter__(self) -> None:
        self._others = self._now()
        self._set(self._own)

    def __exit__(self, *raised: object) -> None:
        self._own = self._now()
        self._set(self._others)

    def _now(self) -> list[torch.Tensor]:
        """Read the states of the generators of the host and of the device."""
        on_device = self._device.type != "cpu"
        states = [torch.get_device_module(self._device).get_rng_state(self._device)] if on_device else []
        return [torch.get_rng_state(), *states]

    def _set(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.get_device_module(self._device).set_rng_state(states[1], self._device)
