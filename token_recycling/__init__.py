"""Token Recycling: identical output from any Hugging Face decoder-only model in fewer decoding steps, without training.

`accelerate(model)` speeds up the model's own `generate()`; `generate` accelerates a single call; `stream` yields the
steps one by one. Names are imported on first use, so that the command line starts without importing torch.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._util.versions import warn_outside

if TYPE_CHECKING:
    from ._util.display import mat_over_time, text_by_step
    from .drafters._base import Drafter, DrafterTraits, SequenceDrafter
    from .drafters._registry import drafter_names, make_drafter
    from .engines.vllm import VLLM
    from .hf.accelerate import accelerate, accelerated, decelerate, generate
    from .hf.acceleration import Acceleration
    from .hf.constrain import constrain
    from .hf.conversation import Conversation
    from .hf.stream import stream
    from .hf.warm import warm
    from .loop.stats import Stats
    from .model.info import ModelInfo, UnsupportedModelError
    from .model.loading import load
    from .model.runner import NoFastPathError
    from .model.support import check, why_not
    from .recycling.matrix_file import MatrixFileError, fingerprint
    from .trees.draft import Context, Draft, Step
    from .trees.templates import Template

__version__ = "0.1.0"
if not {"sglang", "vllm"} & {*sys.modules}:  # engines pin their own versions, and transformers is unused here
    warn_outside()

__all__ = [
    "VLLM",
    "Acceleration",
    "Context",
    "Conversation",
    "Draft",
    "Drafter",
    "DrafterTraits",
    "MatrixFileError",
    "ModelInfo",
    "NoFastPathError",
    "SequenceDrafter",
    "Stats",
    "Step",
    "Template",
    "UnsupportedModelError",
    "accelerate",
    "accelerated",
    "check",
    "constrain",
    "decelerate",
    "drafter_names",
    "fingerprint",
    "generate",
    "load",
    "make_drafter",
    "mat_over_time",
    "stream",
    "text_by_step",
    "warm",
    "why_not",
]

_MODULES = {
    "_util.display": ("mat_over_time", "text_by_step"),
    "model.runner": ("NoFastPathError",),
    "drafters._base": ("Drafter", "DrafterTraits", "SequenceDrafter"),
    "drafters._registry": ("drafter_names", "make_drafter"),
    "engines.vllm": ("VLLM",),
    "hf.accelerate": ("accelerate", "accelerated", "decelerate", "generate"),
    "hf.acceleration": ("Acceleration",),
    "hf.constrain": ("constrain",),
    "hf.conversation": ("Conversation",),
    "hf.stream": ("stream",),
    "hf.warm": ("warm",),
    "loop.stats": ("Stats",),
    "model.loading": ("load",),
    "model.support": ("check", "why_not"),
    "model.info": ("ModelInfo", "UnsupportedModelError"),
    "recycling.matrix_file": ("MatrixFileError", "fingerprint"),
    "trees.draft": ("Context", "Draft", "Step"),
    "trees.templates": ("Template",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
