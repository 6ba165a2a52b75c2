"""Trained parts on disk: a folder with `KIND.safetensors` and `KIND.json`, checked before use.

The JSON contains the part's sizes, the model it belongs to, and how it was trained. A model is recognized by its sizes
and one number from each of some weight matrices, compared with the tolerance of 16-bit types, so that a part serves the
model in both float32 and bfloat16.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from ..._util.files import replacing

VERSION = 1
_SAMPLED_MATRICES = 64
_RELATIVE, _ABSOLUTE = 0.01, 1e-6
"""Tolerances within which two numbers count as equal in 16-bit types."""


class TrainedPartError(ValueError):
    """A trained part that cannot be used; the message gives the reason and a remedy."""


def save_part(
    folder: str | os.PathLike[str],
    kind: str,
    tensors: Mapping[str, torch.Tensor],
    model: PreTrainedModel,
    facts: Mapping[str, Any],
) -> None:
    """Write a part trained for `model`; `load_part` returns `facts`, JSON values."""
    contents = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(Path(folder) / f"{kind}.safetensors") as temporary:
        save_file(contents, temporary, metadata={"format": f"token_recycling.{kind}"})
    describe_part(folder, kind, model, facts)


def describe_part(folder: str | os.PathLike[str], kind: str, model: PreTrainedModel, facts: Mapping[str, Any]) -> None:
    """Write only the JSON of a part whose weights are stored in another format."""
    described = {"kind": kind, "version": VERSION, "model": identity(model), **facts}
    with replacing(Path(folder) / f"{kind}.json") as temporary:
        Path(temporary).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


def load_part(folder: str | os.PathLike[str], kind: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors and the facts of a part; raises TrainedPartError, or FileNotFoundError if there is none."""
    where = Path(folder).expanduser()
    described, weights = where / f"{kind}.json", where / f"{kind}.safetensors"
    if not described.is_file() or not weights.is_file():
        raise FileNotFoundError(f"{where} has no {described.name} with {weights.name}; {_command(kind)} writes them")
    facts = described_part(where, kind)
    try:
        return load_file(weights), facts
    except (SafetensorError, OSError) as error:
        raise TrainedPartError(f"{weights}: not a readable safetensors file: {error}; train it again") from None


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of other programs: safetensors, or a pickled mapping. Raises TrainedPartError."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can fail in any way
        raise TrainedPartError(f"{path}: cannot be read as weights ({error})") from None
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise TrainedPartError(f"{path}: must be a mapping from names to tensors, got {type(tensors).__name__}")
    return tensors


def described_part(folder: Path, kind: str) -> dict[str, Any]:
    """Return the facts of a part; raises TrainedPartError."""
    described, remedy = folder / f"{kind}.json", f"train again with {_command(kind)}"
    try:
        facts = json.loads(described.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TrainedPartError(f"{described}: not valid JSON: {error}; {remedy}") from None
    if not isinstance(facts, dict) or (facts.get("kind"), facts.get("version")) != (kind, VERSION):
        raise TrainedPartError(f"{described}: not a {kind} of version {VERSION}; {remedy}")
    return facts


def _command(kind: str) -> str:
    return f"`token-recycling train {kind.replace('_', '-')}`"


def identity(model: PreTrainedModel) -> dict[str, Any]:
    """Return the fingerprint of a model: its sizes, and one number from each of some weight matrices."""
    config = model.config.get_text_config(decoder=True)
    return {
        "family": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": model.get_input_embeddings().weight.shape[1],
        "numbers": _numbers(model),
    }


def check_model(where: str | os.PathLike[str], facts: Mapping[str, Any], model: PreTrainedModel) -> None:
    """Raise TrainedPartError unless a part belongs to `model`, as far as `identity` can determine."""
    theirs, ours = facts.get("model") or {}, identity(model)
    remedy = "use the part trained for this model, or train one"
    for name in ("family", "vocab_size", "hidden_size"):
        if theirs.get(name) != ours[name]:
            raise TrainedPartError(
                f"{where}: the model's {name.replace('_', ' ')} must be {theirs.get(name)}, as in training, "
                f"got {ours[name]}; {remedy}"
            )
    for name, number in ours["numbers"].items():
        expected = theirs.get("numbers", {}).get(name, number)  # missing where a model was quantized
        if not math.isclose(number, expected, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE):
            raise TrainedPartError(
                f"{where}: trained for another model, whose {name} has {expected:.4g} where this model "
                f"has {number:.4g}; {remedy}"
            )


def _numbers(model: PreTrainedModel) -> dict[str, float]:
    """Return the middle number of evenly spaced matrices, except unreadable ones (offloaded, quantized)."""
    matrices = [(name, weight) for name, weight in model.named_parameters() if weight.ndim == 2]
    chosen = matrices[:: max(1, len(matrices) // _SAMPLED_MATRICES)]
    return {
        name: float(weight.detach()[weight.shape[0] // 2, weight.shape[1] // 2])
        for name, weight in chosen
        if weight.is_floating_point() and weight.device.type != "meta"
    }
