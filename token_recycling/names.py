"""The names of all drafters, found without importing one: a shell that completes them does not wait for torch."""

from __future__ import annotations

import functools
import pkgutil
from importlib import metadata
from pathlib import Path

ENTRY_POINTS = "token_recycling.drafters"
"""The group in which other packages name theirs."""


def drafter_names() -> list[str]:
    """Names of all drafters, the package's own first."""
    own = own_names()
    return own + sorted({point.name for point in metadata.entry_points(group=ENTRY_POINTS)} - set(own))


@functools.cache
def own_names() -> list[str]:
    """Names of the package's own drafters."""
    return sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).with_name("drafters"))]))
