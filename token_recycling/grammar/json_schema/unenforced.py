"""Keywords of a schema that cannot be enforced, and the error that names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .json_values import unescaped


class Unenforced(NamedTuple):
    """A keyword that outputs are not held to."""

    place: str
    """JSON pointer to the keyword, as a fragment."""
    why: str
    mistaken: bool = False
    """Whether no schema has such a keyword: its value is of the wrong kind, or refers to nothing."""

    @property
    def keyword(self) -> str:
        """Return its name."""
        return unescaped(self.place.rpartition("/")[2])

    def __str__(self) -> str:
        return f"{self.place}: {self.why}"


class UnenforceableError(ValueError):
    """A schema with keywords that cannot be enforced, where they must be, or with mistakes."""

    def __init__(self, unenforced: Sequence[Unenforced]) -> None:
        shown = "; ".join(map(str, unenforced[:5])) + ("; ..." if len(unenforced) > 5 else "")
        fix = "correct the schema" if unenforced[0].mistaken else "leave these keywords out, or ask without strict"
        super().__init__(f"{shown}; {fix}")
        self.unenforced = unenforced
