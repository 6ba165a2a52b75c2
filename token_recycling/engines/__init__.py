"""Adapters of serving engines: one file each, and what they share in `engine`."""

import sys
from importlib.metadata import PackageNotFoundError, version

from .._util.versions import release

SGLANG = (0, 5, 23)
"""The release of SGLang whose NGRAM worker `sglang` overrides; its parts change with every release."""


def register_sglang() -> None:
    """Make the algorithm TOKEN_RECYCLING known to SGLang, whose plug-in entry point this is.

    SGLang calls it in every process of every start, whatever is served. So nothing is imported, logged or raised here
    for another SGLang or without numba, unless the command line asks for the algorithm; then RuntimeError or
    ImportError says what is missing.
    """
    asked = any(argument.upper().endswith("TOKEN_RECYCLING") for argument in sys.argv)
    try:
        known = release(version("sglang"))[:3] == SGLANG
    except PackageNotFoundError:  # a checkout that was never installed
        known = False
    try:
        if known or asked:
            from .sglang import register

            register()
    except Exception:
        if asked:
            raise
