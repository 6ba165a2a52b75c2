"""Atomic writing of files and folders, and the cache folder shared by processes, with facts learned about models.

A file or folder is first written to a hidden folder next to it, which its writer keeps locked. The lock ends with the
process, however that ends: so the next writer, on any machine, detects abandoned folders and removes them. Without such
locks (on some network drives) abandoned folders stay. A damaged file of facts is replaced by the next write.
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
    """Yield a temporary file that replaces `path` at the end of the block: readers see either the old or the new file,
    never a part. After an error the old file stays. Missing folders are created. An OSError of the system, such as a
    full disk, names `path`.

    The new file has the permissions of the old file, or the default ones. For a symbolic link the target is replaced.
    """
    path = Path(os.path.realpath(path))
    with _staging_folder(path) as folder:
        temporary = folder / "whole"
        temporary.touch()
        # The umask is shared by all threads and can only be read by changing it: read it from a new file.
        usual = temporary.stat().st_mode
        try:
            yield str(temporary)
            _flush(temporary)
        except OSError as error:
            if error.errno is None or error.filename is not None:
                raise
            raise OSError(error.errno, error.strerror, str(path)) from error
        os.chmod(temporary, stat.S_IMODE(path.stat().st_mode if path.exists() else usual))
        os.replace(temporary, path)


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces the folder `path` at the end of the block. After an error nothing has
    changed. Missing folders are created.
    """
    with _staging_folder(path) as folder:
        temporary = folder / "whole"
        temporary.mkdir()
        yield temporary
        for file in temporary.iterdir():
            _flush(file)
        if path.exists():
            os.replace(path, folder / "old")
        os.replace(temporary, path)


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Wait until no other process or thread is in such a block with the same `path`, a file only used for locking;
    without file locks it does not wait.
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
def _staging_folder(path: Path) -> Iterator[Path]:
    """Yield a hidden folder in the parent of `path`, locked until it is removed at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_behind(path.parent)
    folder, lock = _new_folder(path.parent)
    try:
        yield folder
    finally:
        lock.release()
        shutil.rmtree(folder, ignore_errors=True)


def _flush(file: Path) -> None:
    """Wait until the content of a file is on disk."""
    with open(file, "rb") as written:
        os.fsync(written.fileno())


def _new_folder(parent: Path) -> tuple[Path, FileLock]:
    """Return a folder that no other writer removes, and the lock that protects it."""
    while True:
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=_PREFIX))
        lock = _lock_of(folder)
        with contextlib.suppress(OSError, NotImplementedError):  # no file locks here
            try:
                lock.acquire()
            except (Timeout, FileNotFoundError):  # removed as abandoned before it was locked
                continue
        if folder.exists():
            return folder, lock
        lock.release()


def _remove_left_behind(parent: Path) -> None:
    """Remove the folders of writers that no longer exist."""
    for folder in parent.glob(f"{_PREFIX}*"):
        # It may belong to an active writer or another user; or there are no file locks here.
        with contextlib.suppress(OSError, NotImplementedError), _lock_of(folder):
            shutil.rmtree(folder)


def _lock_of(folder: Path) -> FileLock:
    return FileLock(folder / "writer", blocking=False)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def cache_folder() -> Path:
    """Return the folder for measurements and unpacked models: `TOKEN_RECYCLING_CACHE`, else `token_recycling` in the
    user's cache folder.
    """
    own = os.environ.get("TOKEN_RECYCLING_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "token_recycling"


def facts_file(folder: str, setting: dict[str, str]) -> Path:
    """Return the file of the facts learned about a setting, in a folder of the cache."""
    return cache_folder() / folder / f"{digest(setting)}.json"


def read_facts(path: Path, parse: Callable[[Any], T], nothing: T) -> T:
    """Return the parsed content of a file; `nothing` if it is missing or, with a warning, damaged."""
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return nothing
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
        _say(f"{path} does not contain facts learned about a model ({problem}); learning them again")
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
    """Return a short digest of a value, as JSON where possible, otherwise as text."""
    return hashlib.sha256(json.dumps(of, sort_keys=True, default=str).encode()).hexdigest()[:16]
