"""Find words in documentation that this field does not use, and say what to write instead.

    python scripts/glossary.py [FILE ...]     default: README.md, CONTRIBUTING.md and docs/

Code blocks and `code` are not checked. `make lint` runs it; it ends with status 1 if it finds anything.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TERMS = {
    r"drawn drafts?|drawn tokens?|is drawn|are drawn": "sampled",
    r"laid out": "prepacked",
    r"drafter rests|it rests|resting": "drafting is disabled, backs off",
    r"foreseen|foresees?": "predicted, predicts",
    r"anew": "again",
    r"gone on with|goes on where": "resumed, resumes",
    r"unread": "uncached",
    r"at hand": "available",
    r"whoever|whatever asks": "the component or the user",
    r"what came of": "accepted tokens, the outcome",
    r"of one's own": "custom",
    r"texts part|text parts": "outputs diverge",
    r"by chance": "Poisson arrivals",
    r"changes? places": "near-ties resolve differently",
    r"hopeful|earns its place": "(no metaphors)",
    r"the house|each room|floors": "packages, layers",
}
_CODE = re.compile(r"^```.*?^```|`[^`\n]+`|^    .*$", re.M | re.S)


def blank(found: re.Match[str]) -> str:
    """Spaces and line ends of the same length, so that line numbers stay."""
    return re.sub(r"\S", " ", found[0])


def findings(page: Path) -> list[str]:
    """One line for each term found in a page."""
    text = _CODE.sub(blank, page.read_text(encoding="utf-8"))
    found = []
    for term, instead in TERMS.items():
        for match in re.finditer(rf"\b(?:{term})\b", text, re.I):
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{page}:{line}: {match[0]!r}: write {instead}")
    return found


if __name__ == "__main__":
    given = [Path(name) for name in sys.argv[1:]]
    pages = given or [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    lines = [line for page in pages for line in findings(page)]
    print("\n".join(lines), end="\n" if lines else "")
    sys.exit(bool(lines))
