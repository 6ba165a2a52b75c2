"""What the cases of a campaign add up to, as markdown."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .run import BETTER, FAILURES, LEFT, REFUSED, SAME, TIE

OUTCOMES = (SAME, LEFT, REFUSED, BETTER, TIE, *FAILURES)
_TOLD = (LEFT, REFUSED, BETTER)
Row = dict[str, Any]


def read(file: Path) -> list[Row]:
    """The rows of a campaign, in the order of their cases; a line that was cut off is left out, and a case that was
    run twice counts once.
    """
    rows: dict[tuple[int, int], Row] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[row["seed"], row["case"]] = row
    return [rows[key] for key in sorted(rows)]


def signature(row: Row) -> str:
    """What results of one cause have in common: their words without numbers, and names of models and files."""
    told = re.sub(r" \([\w/]+\.py:\d+\)$", "", row["detail"]) if row["outcome"] in _TOLD else row["detail"]
    if row["outcome"] not in (*_TOLD, "ERROR"):
        return str(row["outcome"])
    if row["outcome"] == "ERROR" and "in threads" in row["words"]["event"]:  # seldom the same error twice
        return f"in threads: {told.partition(':')[0]}"
    told = re.sub(r"/tmp/\S+", "FILE", told)
    told = re.sub(r"\w+(ForCausalLM|LMHeadModel)\w*", "MODEL", told)
    told = re.sub(r"transformers\.models\.[\w.]+", "MODEL", told)
    return re.sub(r"(?<![\w:])-?\d+(\.\d+)?(e-?\d+)?", "N", told)


def markdown(rows: Sequence[Row]) -> str:
    """The report: outcomes, failures, near-ties, reasons, and cases by dimension."""
    seconds = sum(row["seconds"] for row in rows)
    mats = [row["mat"] for row in rows if row["mat"]]
    counts = Counter(row["outcome"] for row in rows)
    rate = f"{len(rows) / seconds:.1f} a second on one core" if seconds else "none"
    accepted = f"; {sum(mats) / len(mats):.2f} accepted tokens a step" if mats else ""
    pieces = [
        "# Random campaign",
        f"{len(rows)} cases, {rate}{accepted}.",
        _table(("outcome", "cases"), [(outcome, counts[outcome]) for outcome in OUTCOMES]),
    ]
    failures = _grouped(row for row in rows if row["outcome"] in FAILURES)
    if failures:
        pieces += ["## Failures", _table(("failure", "cases", "case", "script"), map(_failure, failures))]
    ties = [row for row in rows if row["outcome"] == TIE]
    if ties:
        listed = [(row["case"], row["detail"], row["words"]["family"][0]) for row in ties]
        pieces += ["## Near-ties", _table(("case", "margin", "family"), listed)]
    for title, outcome in (
        ("Refused", REFUSED),
        ("Left to transformers", LEFT),
        ("Plain generate alone raises", BETTER),
    ):
        groups = _grouped(row for row in rows if row["outcome"] == outcome)
        if groups:
            pieces += [f"## {title}", _table(("reason", "cases"), _reasons(groups))]
    pieces += ["## Cases by dimension", _table(("dimension", "value: the same / cases"), _by_dimension(rows))]
    return "\n\n".join(pieces) + "\n"


def _failure(group: tuple[str, list[Row]]) -> tuple[str, int, int, str]:
    name, rows = group
    shown = next((row for row in rows if row.get("script")), rows[0])
    return name, len(rows), shown["case"], shown.get("script", "")


def _grouped(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[signature(row)].append(row)
    return sorted(groups.items(), key=lambda group: -len(group[1]))


def _reasons(groups: list[tuple[str, list[Row]]]) -> list[tuple[str, int]]:
    """What was expected, however many things were got instead, with its cases; the most frequent first."""
    cases: Counter[str] = Counter()
    for name, group in groups:
        cases[name.partition(", got ")[0]] += len(group)
    return cases.most_common()


def _by_dimension(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """A line a dimension: every value with its cases, and how many of them were the same."""
    found: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for row in rows:
        for dimension, values in row["words"].items():
            for value in values:
                found[dimension][value][row["outcome"]] += 1
    return [
        (dimension, "; ".join(f"{value} {cases[SAME]}/{cases.total()}" for value, cases in sorted(values.items())))
        for dimension, values in found.items()
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [list(map(str, row)) for row in rows]
    texts = [" | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) for line in lines]
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {text} |" for text in texts)])
