"""Loading of models and tokenizers: MODEL is a local folder, a GGUF file, or a name on the Hugging Face hub.

A missing model is reported before anything slow begins.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .._util.text_stream import first_line
from . import gguf_files

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_TIMEOUT = 5


class Loaded(NamedTuple):
    """A model, ready to decode, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def context(self) -> int | None:
        """The model's context length, if its configuration has one."""
        from .inspection import context_length

        return context_length(self.model)

    @property
    def stored_dtype(self) -> str:
        """The dtype of the weights where the model was loaded from, such as bfloat16."""
        return str(getattr(load_configuration(self.model.name_or_path), "dtype", None)).removeprefix("torch.")


def load(
    name: str | os.PathLike[str],
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    threads: int | None = None,
    prepack: bool | None = None,
    reproducible: bool = False,
    device_map: str | Mapping[str, Any] | None = None,
) -> Loaded:
    """Load a model and its tokenizer from a local folder, a GGUF file or the hub: `model, tokenizer = load(name)`.

    A GGUF file is first unpacked into the user's cache folder, in float32. `dtype` defaults to float32 on a CPU, so
    that outputs equal `generate`'s exactly, and to the file's own elsewhere; `device` to the accelerator if there is
    one; `threads` to torch's choice; `prepack` and `reproducible` are as in `accelerate`. `device_map` is that of
    transformers' `from_pretrained`, in place of `device`: "auto" spreads a model that one card cannot hold over all of
    them. Raises ValueError with the reason, and UnsupportedModelError for a model that cannot be accelerated.
    """
    from . import prepacking
    from .info import UnsupportedModelError
    from .support import why_not

    name = os.fspath(name)
    tokenizer = load_tokenizer(name)
    model = load_model(name, dtype, device, threads, device_map)
    reason = why_not(model)
    if reason is not None:
        raise UnsupportedModelError(f"{name} cannot be accelerated: {reason}")
    prepacking.prepack(model, prepack, fixed=reproducible)
    return Loaded(model, tokenizer)


def check_source(name: str) -> None:
    """Raise ValueError unless `name` is a folder with a model, a whole GGUF file or the name of a model on the hub."""
    path, file = Path(name).expanduser(), gguf_file_of(name)
    if file is not None:
        gguf_files.check(file)
        return
    if (path / "config.json").is_file():
        return
    if path.is_dir():
        files = gguf_files.files_in(path)
        if files:
            raise ValueError(
                f"{name} has {len(files)} .gguf files and no config.json: {', '.join(file.name for file in files)}; "
                "give one of these files"
            )
        raise ValueError(f"{name} is not a model folder: it has no config.json; is it the right folder?")
    if path.exists():
        raise ValueError(f"{name} is a file, but not a .gguf file; give the folder of a model or a .gguf file")
    # A name such as models/target looks like a hub name; if its first part is a folder here, it is meant as a path.
    if not _HUB_NAME.fullmatch(name) or path.suffix == ".gguf" or ("/" in name and path.parent.is_dir()):
        raise ValueError(f"there is no folder or file {name!r}; give the folder of a model, a .gguf file or a hub name")
    from huggingface_hub import HfApi, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT)  # unlike a download, this does not retry
    except Exception as error:  # not found, gated, offline, refused: in any case no model
        raise ValueError(
            f"there is no folder or file {name!r}, and the hub does not have such a model ({first_line(error)}); give "
            "the folder of a model, a .gguf file or a hub name"
        ) from error


def resolved(name: str) -> str:
    """Return the source that transformers loads for `name`: a folder, the unpacked folder of a GGUF file, or a name on
    the hub. Raises ValueError.
    """
    file = gguf_file_of(name)
    path = Path(name).expanduser() if file is None else gguf_files.unpacked(file)
    return str(path) if path.is_dir() else name


def to_unpack(*names: str) -> list[str]:
    """Return the GGUF files among models that are not unpacked yet. Raises ValueError for an invalid name."""
    for name in names:
        check_source(name)
    files = [file for file in map(gguf_file_of, names) if file is not None]
    return [file.name for file in files if not gguf_files.is_unpacked(file)]


def gguf_file_of(name: str) -> Path | None:
    """Return the GGUF file that `name` means: itself, or the only one in a folder without a config.json; else None."""
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        files = gguf_files.files_in(path)
        return files[0] if len(files) == 1 else None
    return path if gguf_files.is_gguf(path) else None


def title(name: str) -> str:
    """Return a model's name without paths of this machine: a hub name as it is, else the last part of the path, without
    `.gguf`.
    """
    path = Path(name).expanduser()
    if not path.exists():
        return name
    return path.resolve().stem if gguf_files.is_gguf(path) else path.resolve().name


def load_model(
    name: str,
    dtype: str | torch.dtype | None,
    device: str | None,
    threads: int | None,
    device_map: str | Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Return the model in evaluation mode; raises ValueError. Weights for an accelerator are loaded directly onto it if
    the package accelerate is installed.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with_accelerate = importlib.util.find_spec("accelerate") is not None
    if device_map is not None and device is not None:
        raise ValueError(f"device and device_map cannot be combined, got {device!r} and {device_map!r}; give one")
    if device_map is not None and not with_accelerate:
        raise ValueError(f"device_map={device_map!r} needs the package accelerate; pip install accelerate")
    target_device, source = _device("cpu" if device_map == "cpu" else device), resolved(name)
    if threads is not None:
        torch.set_num_threads(threads)
    weights_dtype = dtype or ("float32" if target_device.type == "cpu" else "auto")
    if device_map is None and target_device.type != "cpu" and with_accelerate:
        device_map = {"": target_device}
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=weights_dtype, device_map=device_map)
        return (model.to(target_device) if device_map is None else model).eval()
    except Exception as error:  # a user's folder can be wrong in any way
        raise ValueError(f"{name} cannot be loaded as a causal language model: {first_line(error)}") from error


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model; raises ValueError."""
    from transformers import AutoTokenizer

    check_source(name)
    source = resolved(name)
    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:  # as above
        raise ValueError(f"{name} has no tokenizer that can be loaded: {first_line(error)}") from error


def saved_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer saved where a model was loaded from; None if there is none on this machine."""
    from transformers import AutoTokenizer

    if not model.name_or_path:
        return None
    try:
        return AutoTokenizer.from_pretrained(model.name_or_path, local_files_only=True)
    except Exception:  # none there, none on this machine, or one that cannot be read
        return None


def silence_transformers() -> None:
    """Turn off transformers' own progress bars, except of downloads, and warnings that a user cannot act on."""
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    enable_progress_bars()


def load_configuration(name: str) -> PreTrainedConfig:
    """Return the configuration of a model, without its weights; raises ValueError."""
    from transformers import AutoConfig

    file = gguf_file_of(name)
    if file is not None and not gguf_files.is_unpacked(file):
        return gguf_files.configuration(file)
    try:
        return AutoConfig.from_pretrained(resolved(name))
    except Exception as error:  # as above
        raise ValueError(f"{name} has no configuration that can be loaded: {first_line(error)}") from error


def _device(name: str | None) -> torch.device:
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    usable = [torch.device("cpu"), *([accelerator] if accelerator else [])]
    if name is None:
        return usable[-1]
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    count = torch.accelerator.device_count() if device.type != "cpu" else 1
    types = [usable_device.type for usable_device in usable]
    available = ", ".join(types)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} is not available: {_why_no_cuda()}; available here: {available}")
    if device.type not in types:
        raise ValueError(f"device {name!r} is not available; choose one of {available}")
    if (device.index or 0) >= count:
        raise ValueError(f"device {name!r} does not exist: this machine has {count} of type {device.type}")
    return device


def _why_no_cuda() -> str:
    """Return why torch cannot use CUDA, and what to do about it."""
    import torch

    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} was built without CUDA; "
            "pip install torch --index-url https://download.pytorch.org/whl/cu130"
        )
    return f"torch was built for CUDA {torch.version.cuda} and finds no NVIDIA GPU; run nvidia-smi to check the driver"


def uses_chat(loaded: Loaded, wanted: bool | None) -> bool:
    """Return whether prompts go through the chat template: as `wanted`, by default if there is one; raises ValueError
    if a wanted one is missing.
    """
    has_template = bool(getattr(loaded.tokenizer, "chat_template", None))
    if wanted and not has_template:
        raise ValueError("--chat needs a tokenizer with a chat template, which this one lacks; use --raw")
    return has_template if wanted is None else wanted


def load_matrix(loaded: Loaded, drafter: Any, path: Path) -> None:
    """Fill the drafter's matrix from a file if there is one; raises ValueError, also if the matrix cannot hold all of
    the file, since the callers save it there.
    """
    from ..recycling.matrix_file import MatrixFileError, fingerprint, has_ngrams
    from ..recycling.ngram_matrix import NgramMatrix
    from .target import Target

    if not hasattr(drafter, "matrix") or not hasattr(drafter, "prepare"):
        raise ValueError(f"--matrix needs a drafter with a matrix, such as recycling, got {drafter.name}")
    if path.is_dir():
        raise ValueError(f"--matrix must be a file, got the folder {path}")
    matrix = drafter.prepare(Target(loaded.model))
    if path.exists():
        matrix.load(path, tokenizer=fingerprint(loaded.tokenizer))
        if not isinstance(matrix, NgramMatrix) and has_ngrams(path):
            raise MatrixFileError(
                f"{path} contains a matrix of the drafter 'recycling', of which {drafter.name} would keep only a part; "
                "give another file"
            )
