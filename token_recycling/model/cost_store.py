"""Measured curves on disk: a JSON file for each model, device, type of numbers and number of threads."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .._util.files import cache_folder, replacing
from ..costs.curve import CostCurve
from .remembered import say_once

if TYPE_CHECKING:
    from .tree_model import TreeModel


def save(model: TreeModel, curves: Sequence[CostCurve], kind: str = "") -> Path:
    """Replaces what is kept for the setting; returns the file."""
    path = file_of(model, kind)
    with replacing(path) as temporary:
        held = {"setting": setting(model, kind), "curves": [asdict(curve) for curve in curves]}
        Path(temporary).write_text(json.dumps(held, indent=1))
    return path


def load(model: TreeModel, kind: str = "") -> list[CostCurve]:
    """The saved curves of the setting; none, with one notice, if the file is damaged: then they are
    measured again, and the next ones that are saved replace it.
    """
    path = file_of(model, kind)
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text())["curves"]
        return [CostCurve(one["length"], tuple(one["sizes"]), tuple(one["seconds"])) for one in found]
    except (OSError, KeyError, TypeError, ValueError) as error:
        say_once(
            model.model,
            f"expected the curves of `token-recycling tune` in {path}, got something else "
            f"({type(error).__name__}: {error}); measuring anew",
        )
        return []


def setting(model: TreeModel, kind: str = "") -> dict[str, str]:
    """What a curve depends on, besides the length. `kind`: how steps are made, where that is not by ordinary passes."""
    device = model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} cores"
    config = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
    return {
        "model": type(model.model).__name__,
        "shape": hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16],
        "attention": model.support.attention,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": f"{device.type}, {name}",
        "threads": str(torch.get_num_threads()) if device.type == "cpu" else "",
        **({"steps": kind} if kind else {}),
    }


def file_of(model: TreeModel, kind: str = "") -> Path:
    """Where the curves of the setting are kept."""
    digest = hashlib.sha256(json.dumps(setting(model, kind), sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "costs" / f"{digest}.json"
