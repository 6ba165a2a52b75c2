"""The file of what a model taught by output of its own (`hf.warm`): in the cache folder, named by the weights."""

from __future__ import annotations

from pathlib import Path

from ..._util.files import cache_folder
from ...model.inspection import weights_fingerprint
from ...model.target import Target
from ...recycling.ngram_matrix import NgramMatrix


def load_warmed(matrix: NgramMatrix, target: Target) -> None:
    """Fill a matrix with what the model taught by output of its own; raises ValueError if there is no file."""
    path = warmed_file(target, matrix.k, matrix.orders)
    if not path.exists():
        raise ValueError(
            f"this model was not warmed for k={matrix.k}, orders={matrix.orders}: no file {path}; "
            "run `token-recycling warm MODEL` first, or leave out warmed=true"
        )
    matrix.load(path)


def warmed_file(target: Target, k: int, orders: int) -> Path:
    """Return the file of what a model taught by output of its own."""
    return cache_folder() / "warm" / f"{weights_fingerprint(target.model)}-{k}-{orders}.safetensors"
