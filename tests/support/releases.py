"""Skip tests of features that some supported releases of transformers lack."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from token_recycling._util.versions import release

HERE = release(transformers.__version__)


def needs(*first: int) -> pytest.MarkDecorator:
    """Return a mark that skips a test before a release."""
    return pytest.mark.skipif(first > HERE, reason=_reason(first))


def skip_before(*first: int) -> None:
    """Skip the running test, or the module being imported, before a release."""
    if first > HERE:
        pytest.skip(_reason(first), allow_module_level=True)


def _reason(first: tuple[int, ...]) -> str:
    return f"needs transformers {'.'.join(map(str, first))}"


def skip_without(family: str, known: Any) -> None:
    """Skip the running test if a family is not among the `known` ones."""
    if family not in known:
        pytest.skip(f"needs a transformers that has {family}")
