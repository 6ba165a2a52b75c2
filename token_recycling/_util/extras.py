"""Extras of the package: check that optional dependencies are installed."""

from __future__ import annotations

import importlib.util


def lacking(extra: str, *modules: str) -> str | None:
    """Return the end of a sentence that names missing `modules` of an extra and how to install it; None if all are
    installed. Imports nothing.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return f"needs the extra '{extra}', got no {', '.join(missing)}; pip install 'token-recycling[{extra}]'"
