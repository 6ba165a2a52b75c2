"""Prompts and text files that users specify: as arguments, as files and folders, or on standard input."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

STANDARD_INPUT = Path("-")
_BYTE_ORDER_MARK = "\ufeff"
"""First character of texts from some editors, mostly on Windows; the encoding `utf-8-sig` removes it from files."""


class Prompt(NamedTuple):
    """A text to continue, and its source."""

    name: str
    text: str


def read_prompts(texts: Sequence[str], paths: Sequence[Path]) -> list[Prompt]:
    """Return prompts from arguments, else from files and all files of folders, else from standard input (`-` anywhere);
    raises ValueError. Line ends at the end of a file or of standard input are dropped, since editors add them.
    """
    if texts and paths:
        raise ValueError("a prompt argument and a path of prompts cannot be combined; omit one of them")
    if not texts and not paths and sys.stdin.isatty():
        raise ValueError("there is no prompt; pass one as an argument, as a file or on standard input")
    given = enumerate(texts, start=1)
    prompts = [_read(STANDARD_INPUT) if text == "-" else Prompt(f"argument {n}", text) for n, text in given]
    for path in paths if prompts else paths or [STANDARD_INPUT]:
        prompts += map(_read, _prompt_files(path))
    for prompt in prompts:
        if not prompt.text.strip():
            raise ValueError(f"the prompt is empty ({prompt.name}); provide text to continue")
        if prompt.text.encode("utf-8", "ignore").decode() != prompt.text:
            raise _not_utf8(prompt.name)
    return prompts


def _prompt_files(path: Path) -> list[Path]:
    """Return the file itself, or the files of a folder; raises ValueError."""
    if path == STANDARD_INPUT or path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"there is no file or folder {path}")
    files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    if not files:
        raise ValueError(f"there are no prompt files in the folder {path}")
    return files


def text_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files among `paths` and, by name, all non-hidden files below the folders among them; standard input is
    a file. Raises ValueError for a path that does not exist, and for a folder without files.
    """
    found = []
    for path in paths:
        shown = [path]
        if path.is_dir():
            below = sorted(file for file in path.rglob("*") if file.is_file())
            shown = [file for file in below if not any(part.startswith(".") for part in file.relative_to(path).parts)]
        elif path != STANDARD_INPUT and not path.is_file():
            raise ValueError(f"there is no file or folder {path}")
        if not shown:
            raise ValueError(f"there are no text files in the folder {path}")
        found += shown
    return found


def bytes_of(files: Sequence[Path]) -> int:
    """Return the total size of these files in bytes, without standard input."""
    return sum(file.stat().st_size for file in files if file != STANDARD_INPUT)


def _read(path: Path) -> Prompt:
    """Return the prompt in a file, or on standard input; raises ValueError."""
    name = "standard input" if path == STANDARD_INPUT else path.name
    try:
        text = sys.stdin.read() if path == STANDARD_INPUT else path.read_text(encoding="utf-8-sig")
        return Prompt(name, text.removeprefix(_BYTE_ORDER_MARK).rstrip("\r\n"))
    except UnicodeDecodeError:
        raise _not_utf8(name) from None


def _not_utf8(name: str) -> ValueError:
    return ValueError(f"{name} is not text in UTF-8")
