"""Environment of a measurement: hardware, versions, model. Each row records it completely."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from .. import __version__
from .._util.device import cpu_name
from ..model.inspection import weights_fingerprint


def environment(model: PreTrainedModel, name: str) -> dict[str, Any]:
    """Return the environment as plain values; `name` is the model as given by the user."""
    return {
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": _accelerator(model.device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "token_recycling": __version__,
        "model": name,
        "model_fingerprint": weights_fingerprint(model, typed=False),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
    }


def _accelerator(device: torch.device) -> str | None:
    if device.type == "cpu":
        return None
    get_name = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return str(get_name(device)) if get_name else device.type


def commit() -> str | None:
    """Return this package's commit, with -dirty if files differ from it; None outside a checkout."""
    package = Path(__file__).parents[1]
    if not (package.parent / ".git").exists():
        return None
    try:
        head = _git(package, "rev-parse", "--short=12", "HEAD")
        changed = _git(package, "status", "--porcelain", "--", ".")
    except (OSError, subprocess.SubprocessError):  # git is missing, or does not trust the checkout
        return None
    return f"{head}-dirty" if changed else head


def _git(folder: Path, *command: str) -> str:
    git = subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True, check=True, timeout=10)
    return git.stdout.strip()
