"""The README, the guide for contributors and the pages of docs/ as tests read them: their blocks of code, in order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^(?:<!-- not run: (?P<reason>.+?) -->\n+)?```(?P<language>\w+)\n(?P<code>.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    """Code between ``` signs."""

    language: str
    code: str
    line: int
    """Where its code begins, from 1."""
    reason: str | None
    """Why it cannot run in the tests, as a comment before it says."""


def blocks(page: Path, language: str) -> list[Block]:
    """The blocks of a page in one language."""
    text = page.read_text(encoding="utf-8")
    found = [
        Block(match["language"], match["code"], text.count("\n", 0, match.start("code")) + 1, match["reason"])
        for match in _BLOCK.finditer(text)
    ]
    return [block for block in found if block.language == language]


def name(page: Path) -> str:
    """A page as it is called in the name of a test."""
    return page.relative_to(ROOT).as_posix()
