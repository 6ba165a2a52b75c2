"""Find home-made words in documentation, docstrings and comments, and print the field's term for each.

    python scripts/glossary.py [FILE ...]     default: all pages, and Python files except tests

Code blocks and `code` are not checked. `make lint` runs this script; it exits with status 1 if it finds anything.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("token_recycling", "benchmarks", "deploy", "examples", "scripts")
SOURCES = [ROOT / "noxfile.py", *(file for name in FOLDERS for file in sorted((ROOT / name).rglob("*.py")))]
TERMS = {
    r"drawn drafts?|drawn tokens?|is drawn|are drawn": "sampled",
    r"laid out|lays? out weights": "prepacked",
    r"drafter rests|it rests|resting": "drafting is disabled, backs off",
    r"foreseen|foresees?": "predicted, predicts",
    r"anew": "again",
    r"gone on with|goes on where": "resumed, resumes",
    r"habits": "token statistics",
    r"unread": "uncached",
    r"chances": "probabilities",
    r"in words": "prompted",
    r"at hand": "available",
    r"whoever|whatever asks": "the component or the user",
    r"what came of": "accepted tokens, the outcome",
    r"of one's own": "custom",
    r"texts part|text parts": "outputs diverge",
    r"likeliest": "most probable",
    r"by chance": "at random; of arrivals: Poisson",
    r"changes? places": "near-ties resolve differently",
    r"hopeful|earns its place": "(no metaphors)",
    r"the house|each room|floors": "packages, layers",
}
_CODE = re.compile(r"^```.*?^```|`[^`\n]+`|^    .*$", re.M | re.S)


def blank(found: re.Match[str]) -> str:
    """Replace a match by spaces and its line breaks, so that line numbers stay the same."""
    return re.sub(r"\S", " ", found[0])


def prose_of(file: Path) -> list[tuple[int, str]]:
    """Return the prose of a file in pieces, each with the number of its first line."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        return [(1, _CODE.sub(blank, text))]
    pieces = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and token.string.startswith('"""')):
            pieces.append((token.start[0], re.sub(r"`[^`\n]+`", blank, token.string)))
    return pieces


def findings(file: Path) -> list[str]:
    """Return one line for each term found in a file."""
    lines = []
    for first, prose in prose_of(file):
        for term, instead in TERMS.items():
            for match in re.finditer(rf"\b(?:{term})\b", prose, re.I):
                line = first + prose.count("\n", 0, match.start())
                lines.append(f"{file}:{line}: {match[0]!r}: write {instead}")
    return lines


if __name__ == "__main__":
    given = [Path(name) for name in sys.argv[1:]]
    lines = [line for file in given or [*PAGES, *SOURCES] for line in findings(file)]
    print("\n".join(lines), end="\n" if lines else "")
    sys.exit(bool(lines))
