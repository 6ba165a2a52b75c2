"""The table of what was measured."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_WAYS = {"new": "new", "kept": "kept", "unaware": "no grammar"}


def markdown(folder: Path) -> str:
    """Of each dtype in a folder: tokens a step and speed by kind of answer and by question, and where texts part."""
    parts = []
    for path in sorted(folder.glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        parts += [f"## {path.stem}\n", _by_kind(rows), _by_case(rows), *_partings(rows)]
    return "\n".join(parts)


def _total(rows: list[Row], name: str) -> float:
    return sum(row.get(name, 0.0) for row in rows)


def _line(ways: dict[str, list[Row]]) -> list[str]:
    """Tokens a step and speed of each way, then what its masks and its drafting take of the passes."""
    columns = []
    for way in _WAYS:
        rows = ways.get(way, [])
        if not rows:
            columns += ["", ""]
            continue
        speed = _total(ways["generate"], "seconds") / _total(rows, "seconds")
        # Texts may part where two candidates nearly tie, and then have other lengths.
        speed *= _total(rows, "tokens") / _total(ways["generate"], "tokens")
        columns += [f"{_total(rows, 'tokens') / _total(rows, 'steps'):.2f}", f"{speed:.2f}"]
    rows = ways["new"]
    shares = [_total(rows, name) / _total(rows, "forward") for name in ("drafting", "masks")]
    return [*columns, *(f"{100 * share:.1f} %" for share in shares)]


def _table(names: list[str], lines: list[list[str]]) -> str:
    head = [*names, *(f"{way}: {what}" for way in _WAYS.values() for what in ("tokens a step", "speed"))]
    head += ["drafting", "of it masks"]
    return _grid(head, lines)


def _grid(head: list[str], lines: list[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _ways_by(rows: list[Row], name: str) -> dict[str, dict[str, list[Row]]]:
    found: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        found[row[name]][row["way"]].append(row)
    return found


def _by_kind(rows: list[Row]) -> str:
    lines = []
    for kind, ways in _ways_by(rows, "kind").items():
        same = f"{sum(row['same'] for row in ways['new'])} of {len(ways['new'])}"
        lines.append([kind, same, *_line(ways)])
    return _table(["answers", "same text"], lines)


def _by_case(rows: list[Row]) -> str:
    lines = []
    for case, ways in _ways_by(rows, "case").items():
        (plain,), (ours,) = ways["generate"], ways["new"]
        said = f"{plain['tokens']}{'' if plain['ended'] else ' (cut)'}"
        lines.append([case, said, "yes" if ours["same"] else "no", *_line(ways)])
    return _table(["question", "tokens", "same text"], lines)


def _partings(rows: list[Row]) -> list[str]:
    """How near the tokens are where texts part: the margin of `generate`'s over ours in logits, as `generate` had them
    and in float32, and the error that such margins have in that text.
    """
    lines = []
    for row in rows:
        if (parting := row.get("parting")) is not None:
            tokens = " or ".join(
                f"`{json.dumps(token, ensure_ascii=False)}`".replace("|", "\\|") for token in parting["tokens"]
            )
            margins = [f"{parting[name]:.3f}" for name in ("margin", "exact", "error")]
            lines.append([row["case"], _WAYS[row["way"]], str(parting["place"] + 1), tokens, *margins])
    head = ["question", "drafter", "token", "generate's or ours", "margin", "in float32", "error of margins"]
    return [_grid(head, lines)] if lines else []
