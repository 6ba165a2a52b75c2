"""A model in a GGUF file, as llama.cpp and its relatives use them: unpacked once into an ordinary folder.

transformers dequantises such files anew at every start. Here that is done once: the model is kept in float32, which
loses nothing, with its tokenizer, chat template and generation configuration, in the user's cache folder under the
SHA-256 of the file. A second start costs a look at the file's date and size. A folder is renamed into place when it is
complete; what was damaged later, or made by another release of transformers, is made anew.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from .._util.extras import lacking
from .._util.files import cache_folder, one_at_a_time, replacing, replacing_folder, sha256
from .._util.text_stream import first_line
from .._util.versions import installed
from .gguf_header import Header, header

_NOTE = "unpacked.json"
"""In an unpacked folder: what made it, and its files."""
_ENDS = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
"""Tokens that end a text, a turn and a message: generation ends at each, as in llama.cpp."""
_SAMPLE = 1 << 20


def is_packed(path: Path) -> bool:
    """Whether a path is that of a GGUF file, by its name."""
    return path.suffix.lower() == ".gguf" and path.is_file()


def is_unpacked(path: Path) -> bool:
    """Whether `unpacked` finds the model in the cache."""
    return _is_whole(kept_in() / _fingerprint(path))


def unpacked(path: Path) -> Path:
    """The folder of the model in a GGUF file, made on first use; other processes wait for it. Raises ValueError for a
    file that is cut off, is no GGUF file or holds what transformers does not read, for a missing package, and for a
    full disk.
    """
    folder = kept_in() / _fingerprint(path)
    if not _is_whole(folder):
        found = checked(path)
        with one_at_a_time(folder.with_suffix(".lock")):
            if not _is_whole(folder):
                _unpack(path, found, folder)
    return folder


def configuration(path: Path) -> Any:
    """The configuration of the model in a GGUF file, without its weights; raises ValueError as `unpacked`."""
    from transformers import AutoConfig

    checked(path)
    with _reading(path):
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)


def checked(path: Path) -> Header:
    """The header of a GGUF file, if that does not tell that it cannot be unpacked; else raises ValueError."""
    if missing := lacking("gguf", "gguf", "accelerate"):
        raise ValueError(f"reading {path} {missing}")
    from gguf import GGMLQuantizationType

    found = header(path)
    if unknown := found.kinds - {kind.value for kind in GGMLQuantizationType}:
        raise ValueError(
            f"expected a quantisation that the package gguf {installed('gguf')} knows in {path}, got ggml's number "
            f"{min(unknown)}; take a file of another quantisation, such as Q4_K_M or Q8_0, or a later gguf"
        )
    if (parts := found.values.get("split.count", 1)) > 1:
        raise ValueError(
            f"expected a whole model in one GGUF file, got {path}, one of {parts} parts; put them together with "
            "llama.cpp's `llama-gguf-split --merge`"
        )
    return found


def _unpack(path: Path, found: Header, folder: Path) -> None:
    """Write the model as an ordinary folder; raises ValueError."""
    with _room(path, found, folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder.parent).free < found.unpacked:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    model, tokenizer = _read(path)
    ends = {found.values[key]: None for key in _ENDS if key in found.values}
    model.generation_config.eos_token_id = [*ends] if len(ends) > 1 else next(iter(ends), None)
    with _room(path, found, folder), replacing_folder(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        (temporary / _NOTE).write_text(json.dumps(_note(temporary), indent=1), encoding="utf-8")


def _read(path: Path) -> tuple[Any, Any]:
    """The model in float32, and its tokenizer; raises ValueError."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .compat import dequantising

    # Alone in a folder: nothing that lies beside the file, such as a tokenizer's settings, has a say.
    with _reading(path), tempfile.TemporaryDirectory() as alone:
        (Path(alone) / "model.gguf").symlink_to(path.resolve())
        one = {"pretrained_model_name_or_path": alone, "gguf_file": "model.gguf"}
        tokenizer = AutoTokenizer.from_pretrained(**one)
        model = AutoModelForCausalLM.from_pretrained(**one, dtype="float32", **dequantising())
    # What is dequantised is a model as any other, and can be saved as such.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Errors of transformers as ValueErrors, and no bar of its own, which no setting of it turns off."""
    from transformers import modeling_gguf_pytorch_utils as reader

    tqdm = reader.tqdm
    reader.tqdm = partial(tqdm, disable=True)
    try:
        yield
    except Exception as error:  # a file can hold anything
        raise ValueError(
            f"expected a language model of an architecture and a quantisation that transformers "
            f"{installed('transformers')} reads from GGUF in {path}, got: {first_line(error)}; take another file, or "
            "the model's own folder or hub name"
        ) from error
    finally:
        reader.tqdm = tqdm


@contextlib.contextmanager
def _room(path: Path, found: Header, folder: Path) -> Iterator[None]:
    """Errors of writing as a ValueError that names the disk."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        free = shutil.disk_usage(folder.parent).free if folder.parent.is_dir() else 0
        raise ValueError(
            f"expected {found.unpacked / 1e9:.1f} GB of free disk for unpacking {path} into {folder.parent}, got "
            f"{free / 1e9:.1f} GB ({error}); free some, or set TOKEN_RECYCLING_CACHE to a folder on another disk"
        ) from error


def kept_in() -> Path:
    """The folder of unpacked models."""
    return cache_folder() / "gguf"


def _fingerprint(path: Path) -> str:
    """The SHA-256 of a file's content; looked up where a file of this path, size and date was seen before."""
    seen = path.stat()
    place = f"{path.resolve()} {seen.st_size} {seen.st_mtime_ns} {seen.st_ino}"
    known = kept_in() / "known" / hashlib.sha256(place.encode()).hexdigest()
    with contextlib.suppress(OSError, ValueError):
        if len(digest := known.read_text(encoding="ascii")) == 64:
            return digest
    found = sha256(path)
    with contextlib.suppress(OSError), replacing(known) as temporary:  # a cache may be full or read-only
        Path(temporary).write_text(found, encoding="ascii")
    return found


def _is_whole(folder: Path) -> bool:
    """Whether a folder is as it was when the installed transformers unpacked it."""
    try:
        return bool(json.loads((folder / _NOTE).read_text(encoding="utf-8")) == _note(folder))
    except (OSError, ValueError):
        return False


def _note(folder: Path) -> dict[str, Any]:
    """What made the files of a folder, and of each its size and the digest of its beginning."""
    files = {}
    for file in sorted(each for each in folder.iterdir() if each.name != _NOTE):
        with open(file, "rb") as opened:
            files[file.name] = [file.stat().st_size, hashlib.sha256(opened.read(_SAMPLE)).hexdigest()]
    return {"transformers": installed("transformers"), "files": files}
