"""Code blocks, in order, of the README, CONTRIBUTING.md and the pages of docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^(?:<!-- not run: (?P<reason>.+?) -->\n+)?```(?P<language>\w+)\n(?P<code>.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    """Code between ``` fences."""

    language: str
    code: str
    line: int
    """Line of its first code line, from 1."""
    reason: str | None
    """Reason why it cannot run in tests, from a comment before it."""


def blocks(page: Path, language: str) -> list[Block]:
    """Return the blocks of a page in one language."""
    text = page.read_text(encoding="utf-8")
    found = [
        Block(match["language"], match["code"], text.count("\n", 0, match.start("code")) + 1, match["reason"])
        for match in _BLOCK.finditer(text)
    ]
    return [block for block in found if block.language == language]


def name(page: Path) -> str:
    """Return a page's name for the id of a test."""
    return page.relative_to(ROOT).as_posix()
