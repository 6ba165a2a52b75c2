"""What was found out about models, on disk for later processes: a small JSON file for everything that it depends on.

A damaged file is noticed once and replaced by the next that is written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PretrainedConfig

from .._util.files import cache_folder, replacing

logger = logging.getLogger("token_recycling")

T = TypeVar("T")


def file_of(kind: str, setting: dict[str, str]) -> Path:
    """Where what is known of a setting is kept."""
    return cache_folder() / kind / f"{digest(setting)}.json"


def read(path: Path, parse: Callable[[Any], T], nothing: T) -> T:
    """What `parse` makes of a file; `nothing` if there is none, or with a notice if it is damaged."""
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return nothing
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = f"{type(error).__name__}: {error}"
        _say(f"expected what was learned of a model in {path}, got something else ({found}); learning it anew")
        return nothing


def write(path: Path, found: dict[str, Any]) -> None:
    """Replace what is kept."""
    try:
        with replacing(path) as temporary:
            Path(temporary).write_text(json.dumps(found, indent=1), encoding="utf-8")
    except OSError as error:
        _say(
            f"expected to keep what was learned of a model in {path}, got {error}; set TOKEN_RECYCLING_CACHE to "
            "a folder that can be written"
        )


@cache
def _say(message: str) -> None:
    logger.warning(message)


def digest(of: Any) -> str:
    """A short name for what can be written as JSON, or else as text."""
    return hashlib.sha256(json.dumps(of, sort_keys=True, default=str).encode()).hexdigest()[:16]


def shape_of(config: PretrainedConfig) -> str:
    """A short name for a configuration, wherever the model was loaded from."""
    return digest({key: value for key, value in config.to_dict().items() if key != "_name_or_path"})


@cache
def machine(device: torch.device) -> str:
    """The name of what computes."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor()
    return f"{device.type} {name}"
