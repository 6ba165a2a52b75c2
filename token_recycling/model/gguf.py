"""A model in a GGUF file, as llama.cpp uses them: dequantised by transformers once, into an ordinary folder.

transformers dequantises such a file again at every start: 19 s of processor time for 135 million parameters, where the
folder loads in one. The folder holds the model in float32, which loses nothing, with its tokenizer, chat template and
generation configuration. It lies in the user's cache under the path, size and date of the file and the release of
transformers, and is renamed into place when it is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from .._util.extras import lacking
from .._util.files import cache_folder, one_at_a_time, replacing_folder
from .._util.text_stream import first_line
from .._util.versions import installed

_MAGIC = b"GGUF"
_ENDS = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
"""Tokens that end a text, a turn and a message: generation ends at each, as in llama.cpp."""


def is_packed(path: Path) -> bool:
    """Whether a path is that of a GGUF file, by its name."""
    return path.suffix.lower() == ".gguf" and path.is_file()


def is_unpacked(path: Path) -> bool:
    """Whether `unpacked` finds the model in the cache."""
    return _folder_of(path).is_dir()


def unpacked(path: Path) -> Path:
    """Return the folder of the model in a GGUF file, made on first use; other processes wait for it. Raises ValueError
    for a file that transformers does not read, for a missing package, and for a full disk.
    """
    folder = _folder_of(path)
    if not folder.is_dir():
        checked(path)
        with one_at_a_time(folder.with_suffix(".lock")):
            if not folder.is_dir():
                _unpack(path, folder)
    return folder


def configuration(path: Path) -> Any:
    """Return the configuration of the model in a GGUF file, without its weights; raises ValueError as `unpacked`."""
    from transformers import AutoConfig

    checked(path)
    with _reading(path):
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)


def checked(path: Path) -> None:
    """Raises ValueError for a missing package, and for what is no GGUF file."""
    if missing := lacking("gguf", "gguf", "accelerate"):
        raise ValueError(f"reading {path} {missing}")
    with open(path, "rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError(f"{path} is no GGUF file, it begins otherwise; give a model's .gguf file")


def kept_in() -> Path:
    """The folder of unpacked models."""
    return cache_folder() / "gguf"


def _folder_of(path: Path) -> Path:
    seen = path.stat()
    file = f"{path.resolve()} {seen.st_size} {seen.st_mtime_ns} {installed('transformers')}"
    return kept_in() / hashlib.sha256(file.encode()).hexdigest()[:16]


def _unpack(path: Path, folder: Path) -> None:
    """Write the model as an ordinary folder; raises ValueError."""
    from safetensors import SafetensorError

    model, tokenizer = _read(path)
    size = sum(weight.nbytes for weight in model.parameters())
    try:
        with replacing_folder(folder) as temporary:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"unpacking {path} takes {size / 1e9:.1f} GB in {folder.parent}, got: {first_line(error)}; free some disk, "
            "or set TOKEN_RECYCLING_CACHE to a folder on another disk"
        ) from error


def _read(path: Path) -> tuple[Any, Any]:
    """The model in float32, and its tokenizer; raises ValueError."""
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .compat import dequantising

    # Alone in a folder: nothing that lies beside the file, such as a tokenizer's settings, has a say.
    with _reading(path), tempfile.TemporaryDirectory() as alone:
        (Path(alone) / "model.gguf").symlink_to(path.resolve())
        fields = GGUFReader(path).fields
        parts = fields["split.count"].contents() if "split.count" in fields else 1
        if parts > 1:
            raise ValueError(f"it is one of {parts} parts; join them with llama.cpp's `llama-gguf-split --merge`")
        ends = {fields[key].contents(): None for key in _ENDS if key in fields}
        one = {"pretrained_model_name_or_path": alone, "gguf_file": "model.gguf"}
        tokenizer = AutoTokenizer.from_pretrained(**one)
        model = AutoModelForCausalLM.from_pretrained(**one, dtype="float32", **dequantising())
    # What is dequantised is a model as any other, and can be saved as such.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.generation_config.eos_token_id = [*ends] if len(ends) > 1 else next(iter(ends), None)
    return model, tokenizer


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Errors as ValueErrors, and no bar of transformers' own, which no setting of it turns off."""
    from transformers import modeling_gguf_pytorch_utils as reader

    tqdm = reader.tqdm
    reader.tqdm = partial(tqdm, disable=True)
    try:
        yield
    except Exception as error:  # a file can hold anything
        raise ValueError(
            f"transformers {installed('transformers')} cannot read {path}: {first_line(error)}; download the file "
            "again if it is cut off, else take another one, or the model's own folder or hub name"
        ) from error
    finally:
        reader.tqdm = tqdm
