"""API keys. Each has a name; requests with different names can have separate drafters. Only the name is ever shown.

A key is written NAME:KEY, or KEY with the name `default`: in an option, in the environment, or one per line of a file.
Only digests are kept.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger("token_recycling.serving")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")
_SECRET = re.compile(r"[!-~]([ -~]*[!-~])?")
_DEFAULT = "default"
"""The name of a key that was configured without a name."""
METRICS = "metrics"
"""The name of the key that gives access to /metrics and nothing else."""


@dataclass(frozen=True)
class Key:
    """The name of an API key and the SHA-256 digest of the key."""

    name: str
    digest: bytes


def parse_key(text: str) -> Key:
    """Return a key from NAME:KEY or KEY. Raise ValueError, whose message never contains the key."""
    name, colon, secret = text.strip().partition(":")
    if not colon:
        name, secret = _DEFAULT, name
    if not secret or not _NAME.fullmatch(name):
        raise ValueError(
            "an API key must be KEY or NAME:KEY, with a name of letters, digits, '.', '_' and '-'; a key that contains "
            "a colon needs a name"
        )
    if not _SECRET.fullmatch(secret):
        raise ValueError(
            f"the API key {name} must be printable ASCII without a space at either end: clients cannot send other "
            "characters in a header"
        )
    return Key(name, _digest(secret))


def parse_keys(texts: Iterable[str], file: Path | None = None) -> tuple[Key, ...]:
    """Return the keys in `texts` and in `file`, whose empty lines and lines that begin with # are skipped. Log a
    warning if other users may read the file. Raise ValueError.
    """
    lines = [] if file is None else _file_text(file).splitlines()
    written = [line for line in map(str.strip, lines) if line and not line.startswith("#")]
    if file is not None and not written:
        raise ValueError(f"{file} contains no API keys; write one NAME:KEY per line")
    keys = tuple(map(parse_key, [*texts, *written]))
    names = [key.name for key in keys]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"names of API keys must be unique, got {name} {names.count(name)} times; write NAME:KEY")
    if len({key.digest for key in keys}) < len(keys):
        raise ValueError("API keys must be unique, got one twice")
    return keys


def find_key(keys: Iterable[Key], authorization: str | None) -> Key | None:
    """Return the key of an Authorization header, `Bearer KEY`, or None, in constant time."""
    scheme, _, secret = (authorization or "").partition(" ")
    digest = _digest(secret.strip())
    # Every key is compared.
    matches = [key for key in keys if hmac.compare_digest(key.digest, digest)]
    return matches[0] if matches and scheme.lower() == "bearer" else None


def _file_text(file: Path) -> str:
    """Return the text of a key file.

    Group and other permissions only cause a warning: systemd credentials have mode 0440 with an ACL, Docker secrets
    0444 and Kubernetes secrets 0644, although only the service can read them.
    """
    with file.open(encoding="utf-8-sig") as opened:
        mode = os.fstat(opened.fileno()).st_mode
        if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
            logger.warning(
                "%s has the permissions %s; if other users of this machine can reach it, run chmod 600 %s",
                file, stat.filemode(mode), file,
            )  # fmt: skip
        return opened.read()


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
