"""API keys. Each has a name, which separates what its requests teach the drafter; nothing else of a key is ever shown.

A key is written NAME:KEY, in an option, in the environment, or one to a line of a file. Only digests are kept, and a
received key is compared with all of them in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")
_SECRET = re.compile(r"[!-~]([ -~]*[!-~])?")
METRICS = "metrics"
"""The name of the key that opens /metrics and nothing else."""


@dataclass(frozen=True)
class Key:
    """The name of an API key and the SHA-256 digest of the key."""

    name: str
    digest: bytes


def parse_key(text: str) -> Key:
    """A key from NAME:KEY; raises ValueError, which never repeats the key."""
    name, colon, secret = text.strip().partition(":")
    if not colon or not secret or not _NAME.fullmatch(name):
        raise ValueError(
            "expected an API key as NAME:KEY, the name of letters, digits, '.', '_' and '-', got something else"
        )
    if not _SECRET.fullmatch(secret):
        raise ValueError(
            f"expected the API key {name} in ASCII characters that can be printed, without a space at its ends, got "
            "others, which no client can send in a header"
        )
    return Key(name, _digest(secret))


def parse_keys(texts: Iterable[str], file: Path | None = None) -> tuple[Key, ...]:
    """Keys from texts and a file, which only its owner may read; there empty lines and those that begin with # are left
    out. Raises ValueError.
    """
    lines = [] if file is None else _private_text(file).splitlines()
    written = [line for line in map(str.strip, lines) if line and not line.startswith("#")]
    if file is not None and not written:
        raise ValueError(f"expected API keys in {file}, one NAME:KEY to a line, got none")
    keys = tuple(map(parse_key, [*texts, *written]))
    for what, values in (("names", [key.name for key in keys]), ("keys", [key.digest for key in keys])):
        if len(set(values)) < len(values):
            raise ValueError(f"expected different {what} of API keys, got one twice")
    return keys


def _private_text(file: Path) -> str:
    """The text of a file that others cannot read; on Windows of any."""
    with file.open(encoding="utf-8") as opened:
        mode = os.fstat(opened.fileno()).st_mode
        if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ValueError(
                f"expected API keys in a file for its owner alone, got {file} with the permissions "
                f"{stat.filemode(mode)}; chmod 600 {file}"
            )
        return opened.read()


def find_key(keys: Iterable[Key], authorization: str | None) -> Key | None:
    """The key of an Authorization header, `Bearer KEY`, or None. Takes equally long for each."""
    scheme, _, secret = (authorization or "").partition(" ")
    digest = _digest(secret.strip())
    found = None
    for key in keys:
        if hmac.compare_digest(key.digest, digest):
            found = key
    return found if scheme.lower() == "bearer" else None


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
