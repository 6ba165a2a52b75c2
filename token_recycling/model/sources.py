"""Where a model is: MODEL is a local folder, a GGUF file, or a name on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from .._util.text_stream import first_line
from . import gguf

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_TIMEOUT = 5


def check_source(name: str) -> None:
    """Raises ValueError unless `name` is a folder with a model, a whole GGUF file or the name of a model on the hub."""
    path, file = Path(name).expanduser(), packed(name)
    if file is not None:
        gguf.checked(file)
        return
    if (path / "config.json").is_file():
        return
    if path.is_dir():
        files = _gguf_files(path)
        if files:
            raise ValueError(
                f"expected a folder with a config.json or one .gguf file, got {name} with {len(files)} of them: "
                f"{', '.join(file.name for file in files)}; give one of these files"
            )
        raise ValueError(f"expected a model folder with a config.json, got {name} without; is it the right folder?")
    if path.exists():
        raise ValueError(f"expected the folder of a model or a .gguf file, got the file {name}; give its folder")
    # A name such as models/target looks like a hub name; if its first part is a folder here, it is meant as a path.
    if not _HUB_NAME.fullmatch(name) or path.suffix == ".gguf" or ("/" in name and path.parent.is_dir()):
        raise ValueError(
            f"expected the folder of a model, a .gguf file or a hub name, got {name!r}: there is no such folder or file"
        )
    from huggingface_hub import HfApi, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT)  # unlike a download, this does not retry
    except Exception as error:  # not found, gated, offline, refused: in any case no model
        raise ValueError(
            f"expected the folder of a model, a .gguf file or a hub name, got {name!r}: there is no such folder or "
            f"file, and no answer of the hub with such a model ({first_line(error)})"
        ) from error


def resolved(name: str) -> str:
    """What transformers loads for `name`: a folder, that of a GGUF file unpacked (or ValueError), or the name on the
    hub.
    """
    file = packed(name)
    path = Path(name).expanduser() if file is None else gguf.unpacked(file)
    return str(path) if path.is_dir() else name


def packed(name: str) -> Path | None:
    """The GGUF file that `name` means: itself, or the only one in a folder without a config.json; else None."""
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        files = _gguf_files(path)
        return files[0] if len(files) == 1 else None
    return path if gguf.is_packed(path) else None


def title(name: str) -> str:
    """A model's name without places of this machine: a hub name as it is, else the last part of the path, without
    `.gguf`.
    """
    path = Path(name).expanduser()
    if not path.exists():
        return name
    return path.resolve().stem if gguf.is_packed(path) else path.resolve().name


def _gguf_files(folder: Path) -> list[Path]:
    return sorted(filter(gguf.is_packed, folder.iterdir()))
