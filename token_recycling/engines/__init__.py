"""Adapters for serving engines: one file each; shared code is in `engine`."""

import sys
from importlib.metadata import PackageNotFoundError, version

from .._util.versions import release

SGLANG = (0, 5, 23)
"""The release of SGLang whose NGRAM worker `sglang` overrides; the worker's internals change with every release."""


def register_sglang() -> None:
    """Register the algorithm TOKEN_RECYCLING with SGLang; this is the plug-in entry point.

    SGLang calls it in every process at every start, whatever is served. So nothing is imported, logged or raised for
    another SGLang release or without numba, unless the command line requests the algorithm; in that case RuntimeError
    or ImportError names what is missing.
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
