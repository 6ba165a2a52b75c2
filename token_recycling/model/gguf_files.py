"""GGUF files: models in llama.cpp's format, each unpacked once into a folder that transformers loads.

transformers dequantizes a GGUF file again at every start: 19 s of processor time for 135 million parameters, where an
ordinary folder loads in one. So the model is stored in such a folder: in float32, which is lossless, with its
tokenizer, chat template and generation configuration. The folder is in the user's cache, named by the path, size and
date of the file. It is renamed into place when complete, and removed once the file has changed or is gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._util.extras import lacking
from .._util.files import cache_folder, exclusive, replacing_folder
from .._util.text_stream import first_line
from .._util.versions import installed

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

_MAGIC = b"GGUF"
_SOURCE = "gguf_source.json"
"""File in the folder of an unpacked model that records the GGUF file it was made from."""
_ENDS = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
"""Tokens that end a sequence, a turn and a message: generation ends at each, as in llama.cpp."""


def is_gguf(path: Path) -> bool:
    """Return whether a path is that of a GGUF file, by its name."""
    return path.suffix.lower() == ".gguf" and path.is_file()


def files_in(folder: Path) -> list[Path]:
    """Return the GGUF files in a folder, by name."""
    return sorted(filter(is_gguf, folder.iterdir()))


def is_unpacked(path: Path) -> bool:
    """Return whether the model in a GGUF file is in the cache."""
    return _folder_of(path).is_dir()


def unpacked(path: Path) -> Path:
    """Return the folder of the model in a GGUF file, created on first use; other processes wait for it. Folders of
    files that changed or are gone are removed. Raises ValueError for a file that transformers cannot read, for a
    missing package, and for a full disk.
    """
    folder = _folder_of(path)
    _remove_outdated()
    if not folder.is_dir():
        check(path)
        with exclusive(folder.with_suffix(".lock")):
            if not folder.is_dir():
                _unpack(path, folder)
    return folder


def configuration(path: Path) -> PreTrainedConfig:
    """Return the configuration of the model in a GGUF file, without its weights; raises ValueError as `unpacked`."""
    from transformers import AutoConfig

    check(path)
    with _reading(path):
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)


def check(path: Path) -> None:
    """Raise ValueError for a missing package, and for a file that is not a GGUF file."""
    if missing := lacking("gguf", "gguf", "accelerate"):
        raise ValueError(f"reading {path} {missing}")
    with open(path, "rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError(f"{path} is not a GGUF file: it does not begin with GGUF; give a model's .gguf file")


def unpacked_in() -> Path:
    """Return the folder of unpacked models."""
    return cache_folder() / "gguf"


def _folder_of(path: Path) -> Path:
    return unpacked_in() / hashlib.sha256(json.dumps(_identity(path)).encode()).hexdigest()[:16]


def _identity(path: Path) -> dict[str, Any]:
    """Return the key that identifies a GGUF file, and changes when the file is rewritten. It has no version of
    transformers: the folder is an ordinary model, which later releases load too.
    """
    status = path.stat()
    return {"file": str(path.resolve()), "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _remove_outdated() -> None:
    """Remove the folders of GGUF files that were rewritten or deleted. Those of files on a missing drive stay."""
    for record in unpacked_in().glob(f"*/{_SOURCE}"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            source = json.loads(record.read_text(encoding="utf-8"))
            file = Path(source["file"])
            if file.parent.is_dir() and not (file.is_file() and _identity(file) == source):
                shutil.rmtree(record.parent)


def _unpack(path: Path, folder: Path) -> None:
    """Write the model as an ordinary folder; raises ValueError."""
    from safetensors import SafetensorError

    model, tokenizer = _read(path)
    size = sum(weight.nbytes for weight in model.parameters())
    try:
        with replacing_folder(folder) as temporary:
            model.save_pretrained(temporary, state_dict=_narrowed(model))
            tokenizer.save_pretrained(temporary)
            (temporary / _SOURCE).write_text(json.dumps(_identity(path)), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"unpacking {path} takes {size / 1e9:.1f} GB in {folder.parent}, got: {first_line(error)}; free disk space "
            "or set TOKEN_RECYCLING_CACHE to a folder on another disk"
        ) from error


def _narrowed(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a model in float32, each in 16 bits if these hold all of its numbers: weights of a 16-bit
    file take no more space than the file. The configuration still says float32, in which they are loaded.
    """
    import torch

    narrowed: dict[int, torch.Tensor] = {}
    weights = model.state_dict()
    for weight in weights.values():
        if weight.data_ptr() not in narrowed:  # tied weights stay one
            dtypes = (
                dtype for dtype in (torch.bfloat16, torch.float16) if torch.equal(weight.to(dtype).float(), weight)
            )
            narrowed[weight.data_ptr()] = weight.to(next(dtypes, weight.dtype))
    return {name: narrowed[weight.data_ptr()] for name, weight in weights.items()}


def _read(path: Path) -> tuple[Any, Any]:
    """Return the model in float32, and its tokenizer; raises ValueError."""
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .compat import dequantizing

    # Alone in a folder: other files next to it, such as tokenizer settings, are ignored.
    with _reading(path), tempfile.TemporaryDirectory() as alone:
        (Path(alone) / "model.gguf").symlink_to(path.resolve())
        fields = GGUFReader(path).fields
        parts = fields["split.count"].contents() if "split.count" in fields else 1
        if parts > 1:
            raise ValueError(f"it is one of {parts} parts; join them with llama.cpp's `llama-gguf-split --merge`")
        ends = {fields[key].contents(): None for key in _ENDS if key in fields}
        source = {"pretrained_model_name_or_path": alone, "gguf_file": "model.gguf"}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(**source, dtype="float32", **dequantizing())
    # A dequantized model is saved like any other.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.generation_config.eos_token_id = [*ends] if len(ends) > 1 else next(iter(ends), None)
    return model, tokenizer


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise errors as ValueErrors, and hide transformers' own progress bar, which none of its settings turns off."""
    from transformers import modeling_gguf_pytorch_utils as reader

    tqdm = reader.tqdm
    reader.tqdm = partial(tqdm, disable=True)
    try:
        yield
    except Exception as error:  # a file can hold anything
        raise ValueError(
            f"transformers {installed('transformers')} cannot read {path}: {first_line(error)}; if the file is "
            "truncated, download it again; otherwise give another file, or the model's own folder or hub name"
        ) from error
    finally:
        reader.tqdm = tqdm
