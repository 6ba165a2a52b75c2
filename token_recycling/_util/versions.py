"""The supported releases of torch and transformers, and the warning for other releases.

`docs/versions.md` lists the releases with which the tests passed; `nox -s versions` generates it. Differences between
supported releases are handled in `model/compat`. Nothing heavy is imported: releases are read from pip's metadata.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from importlib import metadata

SUPPORTED = {"transformers": ((5, 10), (5, 24)), "torch": ((2, 9), (2, 15))}
"""The lowest and the newest release of each that passed the tests, as major and minor numbers."""

logger = logging.getLogger("token_recycling")


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: for 2.13.0+cpu and 2.13.0rc1 these are 2, 13 and 0."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def installed(name: str) -> str | None:
    """Return the version of a package; None if it is not installed or has no version."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def outside(installed: Mapping[str, str | None], too_old: bool = False) -> str | None:
    """Return a one-line description of unsupported versions among `installed`, or None; `too_old` only checks against
    the lowest supported versions.
    """
    wrong, remedies = [], []
    for name, (lowest, newest) in SUPPORTED.items():
        version = installed.get(name)
        if version is None:
            continue
        old = release(version)[:2] < lowest
        if old or (release(version)[:2] > newest and not too_old):
            first, last = (".".join(map(str, one)) for one in (lowest, newest))
            wrong.append(f"{name} must be {first} to {last}, got {version}")
            remedies.append(f"pip install '{name}>={first},<={last}.99'")
    return f"{' and '.join(wrong)}; {' and '.join(remedies)}" if wrong else None


def warn_outside() -> None:
    """Log one warning on the logger `token_recycling` if an installed release is outside the tested range."""
    reason = outside({name: installed(name) for name in SUPPORTED})
    if reason is not None:
        logger.warning("token_recycling: %s", reason)
