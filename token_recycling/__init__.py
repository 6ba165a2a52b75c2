"""Token Recycling: the same text from any Hugging Face decoder-only model in fewer steps, without training.

`accelerate(model)` makes the model's own `generate()` faster; `generate` does one call; `stream` hands out step after
step. A name is imported when it is first used, so that the command line answers without waiting for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .architectures import Support
    from .checking import check
    from .decode import stream
    from .drafting import Context, Draft, Drafter, Step, drafter_names, make_drafter
    from .fast import NoFastPathError
    from .hf import Acceleration, accelerate, accelerated, custom_generate, decelerate, generate
    from .matrix import AdjacencyMatrix, fingerprint
    from .matrixfile import MatrixFileError
    from .stats import Stats
    from .target import UnsupportedModelError, unsupported
    from .tree import Tree

__version__ = "0.1.0"

__all__ = [
    "Acceleration",
    "AdjacencyMatrix",
    "Context",
    "Draft",
    "Drafter",
    "MatrixFileError",
    "NoFastPathError",
    "Stats",
    "Step",
    "Support",
    "Tree",
    "UnsupportedModelError",
    "accelerate",
    "accelerated",
    "check",
    "custom_generate",
    "decelerate",
    "drafter_names",
    "fingerprint",
    "generate",
    "make_drafter",
    "stream",
    "unsupported",
]

_MODULES = {
    "architectures": ("Support",),
    "checking": ("check",),
    "decode": ("stream",),
    "drafting": ("Context", "Draft", "Drafter", "Step", "drafter_names", "make_drafter"),
    "fast": ("NoFastPathError",),
    "hf": ("Acceleration", "accelerate", "accelerated", "custom_generate", "decelerate", "generate"),
    "matrix": ("AdjacencyMatrix", "fingerprint"),
    "matrixfile": ("MatrixFileError",),
    "stats": ("Stats",),
    "target": ("UnsupportedModelError", "unsupported"),
    "tree": ("Tree",),
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
