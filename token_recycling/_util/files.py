"""Files and folders that a reader sees whole or not at all, and the folder for what is kept between processes: there,
facts that were learned about a model, of which a damaged file is replaced by the next one written.

Both are written in a hidden folder beside its place, which its writer holds locked. A lock ends with its process,
however that ends: so the next writer knows what was left behind, by whatever machine, and removes it. Where there are
no such locks (some network drives) it stays.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

logger = logging.getLogger("token_recycling")

T = TypeVar("T")

_PREFIX = ".token_recycling."


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield a temporary file that replaces `path` at the end of the block: readers see the old file or the new one,
    never a part. After an error the old file stays. Missing folders are made.

    The new file has the permissions of the old one, or of any new file. Of a symbolic link the target is replaced.
    """
    path = Path(os.path.realpath(path))
    with _writing_beside(path) as folder:
        temporary = folder / "whole"
        temporary.touch()
        # The umask belongs to all threads and can only be read by changing it: let a new file tell.
        usual = temporary.stat().st_mode
        yield str(temporary)
        _flush(temporary)
        os.chmod(temporary, stat.S_IMODE(path.stat().st_mode if path.exists() else usual))
        os.replace(temporary, path)


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces the folder `path` at the end of the block. After an error nothing has
    changed. Missing folders are made.
    """
    with _writing_beside(path) as folder:
        temporary = folder / "whole"
        temporary.mkdir()
        yield temporary
        for file in temporary.iterdir():
            _flush(file)
        if path.exists():
            os.replace(path, folder / "old")
        os.replace(temporary, path)


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Wait until no other process or thread is in such a block of the same `path`, a file made for that; where there
    are no locks it does not wait.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    with contextlib.suppress(OSError, NotImplementedError):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _writing_beside(path: Path) -> Iterator[Path]:
    """A hidden folder in that of `path`, locked until it is removed at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_behind(path.parent)
    folder, lock = _new_folder(path.parent)
    try:
        yield folder
    finally:
        lock.release()
        shutil.rmtree(folder, ignore_errors=True)


def _flush(file: Path) -> None:
    """Waits until what was written is on the disk."""
    with open(file, "rb") as written:
        os.fsync(written.fileno())


def _new_folder(parent: Path) -> tuple[Path, FileLock]:
    """A folder that no other writer removes, and the lock that says so."""
    while True:
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=_PREFIX))
        lock = _lock_of(folder)
        with contextlib.suppress(OSError, NotImplementedError):  # there are no locks here
            try:
                lock.acquire()
            except (Timeout, FileNotFoundError):  # taken for one that was left behind, before it was locked
                continue
        if folder.exists():
            return folder, lock
        lock.release()


def _remove_left_behind(parent: Path) -> None:
    """Removes the folders of writers that are gone."""
    for folder in parent.glob(f"{_PREFIX}*"):
        # Another's who writes, or another user's; or there are no locks here.
        with contextlib.suppress(OSError, NotImplementedError), _lock_of(folder):
            shutil.rmtree(folder)


def _lock_of(folder: Path) -> FileLock:
    return FileLock(folder / "writer", blocking=False)


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def cache_folder() -> Path:
    """Where measurements and unpacked models are kept: `TOKEN_RECYCLING_CACHE`, else `token_recycling` in the user's
    cache folder.
    """
    own = os.environ.get("TOKEN_RECYCLING_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "token_recycling"


def facts_file(folder: str, setting: dict[str, str]) -> Path:
    """Return the file of what was learned about a setting, in a folder of the cache."""
    return cache_folder() / folder / f"{digest(setting)}.json"


def read_facts(path: Path, parse: Callable[[Any], T], nothing: T) -> T:
    """Return the parsed content of a file; `nothing` if it is missing or, with a warning, damaged."""
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return nothing
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
        _say(f"{path} does not hold facts learned about a model ({problem}); they are learned again")
        return nothing


def write_facts(path: Path, content: dict[str, Any]) -> None:
    """Replace a file of facts."""
    try:
        with replacing(path) as temporary:
            Path(temporary).write_text(json.dumps(content, indent=1), encoding="utf-8")
    except OSError as error:
        _say(
            f"facts learned about a model cannot be written to {path} ({error}); set TOKEN_RECYCLING_CACHE to a "
            "writable folder"
        )


@functools.cache
def _say(message: str) -> None:
    """Log a warning, the first time only."""
    logger.warning(message)


def digest(of: Any) -> str:
    """A short name for what can be written as JSON, or else as text."""
    return hashlib.sha256(json.dumps(of, sort_keys=True, default=str).encode()).hexdigest()[:16]
