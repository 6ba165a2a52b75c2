"""CONTRIBUTING.md lists the source files of one step: files that a profile of a step enters, and compiled files."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from support import tiny

import token_recycling as tr

PACKAGE = Path(tr.__file__).parent
PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


def listed_files() -> dict[str, str]:
    """Return each file of the table, with its part of the step."""
    table = PAGE.read_text(encoding="utf-8").partition("## Source files of one step")[2].partition("\n## ")[0]
    return dict(re.findall(r"\| `([\w/]+\.py)` \| (.*) \|", table))


def entered_files() -> set[str]:
    """Return the package's files whose functions are called by steps of the loop."""
    files: set[str] = set()

    def note(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            files.add(path.relative_to(PACKAGE).as_posix())

    steps = tr.stream(tiny.llama(), tiny.prompt(0, 12), max_new_tokens=100)
    for _ in range(8):  # initialization is over
        next(steps)
    sys.setprofile(note)
    try:
        for _ in range(8):
            next(steps)
    finally:
        sys.setprofile(None)
    steps.close()
    return files - {"hf/stream.py"}


def test_page_lists_the_files_of_a_step():
    files, table = entered_files(), listed_files()
    assert files <= table.keys(), f"missing in {PAGE.name}: {sorted(files - table.keys())}"
    unused = {name for name, part in table.items() if "compiled" not in part} - files
    assert not unused, f"not used by a step: {sorted(unused)}"
    assert all((PACKAGE / name).is_file() for name in table)
