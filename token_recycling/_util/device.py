"""Devices and torch modes: synchronization, inference mode, random generator states, memory, names, dtypes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from .locks import CAPTURING

F = TypeVar("F", bound=Callable[..., Any])

_CGROUPS, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_UNKNOWN = 8 * 2**30
"""Assumed bytes of memory of a host that does not report its size."""
_SEEDS = 2**63 - 1
"""Exclusive upper bound of seeds."""
_CPU = Path("/proc/cpuinfo")
_INSTRUCTIONS = {
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
    "float16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}
"""Flags of x86 and ARM CPUs with 16-bit multiplication."""


def synchronize(device: torch.device) -> None:
    """Wait for all queued work of an accelerator, and for captures of other threads."""
    if device.type != "cpu":
        with CAPTURING:
            torch.accelerator.synchronize(device)


def outside_inference_mode(function: F) -> F:
    """Create a function's tensors outside inference mode, so that they can be written in place later, in inference mode
    or outside: one call may be within it and the next not.
    """
    return torch.inference_mode(False)(torch.no_grad()(function))  # inference_mode(False) alone would enable gradients


def random_state(device: torch.device, generator: torch.Generator | None) -> torch.Tensor:
    """Return the state of a generator, or of the device's default generator. Nothing waits for the device."""
    if generator is not None:
        return generator.get_state()
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(*_named(device))


def set_random_state(device: torch.device, generator: torch.Generator | None, state: torch.Tensor) -> None:
    """Restore a state returned by `random_state`."""
    if generator is not None:
        generator.set_state(state)
    elif device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, *_named(device))


def seeded_generators(
    number: int, device: torch.device, generator: torch.Generator | None = None
) -> list[torch.Generator]:
    """Return generators on a device, seeded with random numbers of `generator`, or of the device's default."""
    seeds = torch.randint(_SEEDS, (number,), device=device, generator=generator).tolist()
    return [torch.Generator(device).manual_seed(seed) for seed in seeds]


def derived_generator(device: torch.device, generator: torch.Generator | None) -> torch.Generator:
    """Return a generator on a device whose numbers depend on the current state of `generator`, or of the device's
    default generator, without consuming any of its numbers.
    """
    state = random_state(device, generator).cpu().numpy().tobytes()
    seed = int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "big")
    return torch.Generator(device).manual_seed(seed % _SEEDS)


def _named(device: torch.device) -> tuple[torch.device, ...]:
    """Return the arguments that name a device, if there may be several of its type."""
    return () if device.type == "mps" else (device,)


def memory(device: torch.device) -> int:
    """Return a device's total bytes of memory; for the host, the memory that this process may use."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else _UNKNOWN
    return min([physical, *_limits()])


def _limits() -> list[int]:
    """Return the limits, in bytes, of the control groups that contain this process: its own and all ancestors, as set
    by Slurm, systemd and containers.
    """
    files = {_CGROUPS / "memory.max"}
    with contextlib.suppress(OSError):
        for line in _OWN_CGROUPS.read_text().splitlines():
            _, _, group = line.partition(":")
            controllers, _, path = group.partition(":")
            if controllers and "memory" not in controllers.split(","):
                continue
            root, name = (_CGROUPS / "memory", "memory.limit_in_bytes") if controllers else (_CGROUPS, "memory.max")
            own = Path(path.lstrip("/"))
            files |= {root / parent / name for parent in (own, *own.parents)}
    limits = []
    for file in files:
        with contextlib.suppress(OSError, ValueError):  # "max" if a group has no limit
            limits.append(int(file.read_text()))
    return limits


def cpu_dtypes() -> set[str]:
    """Return the 16-bit dtypes that this CPU has instructions for; empty if unknown."""
    try:
        flags = set(_CPU.read_text().split())
    except OSError:  # not Linux
        return set()
    return {dtype for dtype, names in _INSTRUCTIONS.items() if names & flags}


@cache
def machine(device: torch.device) -> str:
    """Return the name of the computing device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {cpu_name()}"


def cpu_name() -> str:
    """Return the name of this machine's processor."""
    try:
        lines = _CPU.read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):  # another system, or a processor without a name
        return platform.processor() or platform.machine()
