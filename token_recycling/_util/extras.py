"""The extras of the package: whether what an optional feature needs is there, and what to install where it is not."""

from __future__ import annotations

import importlib.util


def lacking(extra: str, *modules: str) -> str | None:
    """The end of a sentence for the user where one of `modules`, which an extra brings, is missing; None if all are
    there. Nothing is imported.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return f"needs the extra '{extra}', got no {', '.join(missing)}; pip install 'token-recycling[{extra}]'"
