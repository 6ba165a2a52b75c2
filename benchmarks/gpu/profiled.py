"""Device activity during a run: how long the device worked, and how long it waited for the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from token_recycling._util.device import synchronize

_LONGEST = 6


def profiled(run: Callable[[], Any], device: torch.device, times: int = 8) -> dict[str, Any]:
    """Return for one run: `seconds` from the first to the last operation on the device, `busy` seconds with an
    operation running, the number of `operations`, and the `longest` kinds as [name, seconds]. On a CPU, operations are
    torch's own.
    """
    run()
    synchronize(device)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as found:
        for _ in range(times):
            run()
        synchronize(device)
    events = [event for event in found.events() or [] if _counts(event, device)]
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    kinds: Counter[str] = Counter()
    for event in events:
        kinds[event.name] += event.time_range.end - event.time_range.start
    return {
        "seconds": (max(end for _, end in spans) - spans[0][0]) / times / 1e6,
        "busy": _covered(spans) / times / 1e6,
        "operations": round(len(events) / times),
        "longest": [[name[:60], spent / times / 1e6] for name, spent in kinds.most_common(_LONGEST)],
    }


def _counts(event: FunctionEvent, device: torch.device) -> bool:
    """Return whether an event is an operation of the device; on a CPU, whether it is not part of another operation."""
    if device.type == "cuda":
        return event.device_type == torch.autograd.DeviceType.CUDA
    return event.cpu_parent is None and event.name.startswith("aten::")


def _covered(spans: list[tuple[float, float]]) -> float:
    """Return the time covered by at least one span; `spans` are sorted by start."""
    total, until = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
