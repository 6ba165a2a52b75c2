"""Waits for a device."""

from __future__ import annotations

import torch

from .locks import CAPTURING


def synchronize(device: torch.device) -> None:
    """Waits until an accelerator has done all its queued work, and for captures of other threads."""
    if device.type != "cpu":
        with CAPTURING:
            torch.accelerator.synchronize(device)
