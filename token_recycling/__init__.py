"""Token Recycling: the same text from any Hugging Face decoder-only model in fewer steps, without training.

`accelerate(model)` makes the model's own `generate()` faster; `generate` does one call; `stream` hands out step after
step.
"""

from .decode import stream
from .drafting import Context, Draft, Drafter, Step, drafter_names, make_drafter
from .hf import Acceleration, accelerate, accelerated, custom_generate, decelerate, generate
from .matrix import AdjacencyMatrix, MatrixFileError, fingerprint
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
    "Stats",
    "Step",
    "Tree",
    "UnsupportedModelError",
    "accelerate",
    "accelerated",
    "custom_generate",
    "decelerate",
    "drafter_names",
    "fingerprint",
    "generate",
    "make_drafter",
    "stream",
    "unsupported",
]
