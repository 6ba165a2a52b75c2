"""The releases of torch and transformers that this library runs on, and what is said outside of them.

`docs/versions.md` shows with which of them the tests passed; `nox -s versions` makes it. What a release within the
range lacks is in `model/compat`. Nothing heavy is imported here: the installed releases are read from what pip wrote.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from importlib import metadata

SUPPORTED = {"transformers": ((5, 10), (5, 24)), "torch": ((2, 9), (2, 15))}
"""The lowest and the newest release of each that the tests passed with, as far as its second number."""

logger = logging.getLogger("token_recycling")


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: of 2.13.0+cpu and of 2.13.0rc1 these are 2, 13 and 0."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def installed(name: str) -> str | None:
    """The version of a package; None where there is none, or none that says so."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def outside(installed: Mapping[str, str | None], too_old: bool = False) -> str | None:
    """What is wrong with the versions `found` of the supported packages, in one line, or None; `too_old` looks no
    further than the lowest ones.
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
    """One line on the logger `token_recycling` where an installed release is outside of what was tested."""
    reason = outside({name: installed(name) for name in SUPPORTED})
    if reason is not None:
        logger.warning("token_recycling: %s", reason)
