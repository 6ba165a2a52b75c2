"""The parts of a report: which tables and plots stand under which heading, in every format."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..row_format import STOPPING
from . import findings, tables, words
from .summary import Comparison, Summary
from .table import Table

if TYPE_CHECKING:
    from .plots import Plot


@dataclass
class Section:
    """A part of a report: what was measured in one way."""

    title: str
    text: str = ""
    tables: list[Table] = field(default_factory=list)
    """What everyone reads."""
    plots: list[Plot] = field(default_factory=list)
    details: list[Table] = field(default_factory=list)
    """Folded on a page, and left out in a terminal."""
    findings: list[str] = field(default_factory=list)
    """What a page says here; elsewhere they stand with all others."""
    plots_first: bool = False
    """On a page the plots come first, and the tables are folded."""


def sections_of(summary: Summary, plots: Any = None) -> list[Section]:
    """All parts of a report; with plots if the module that draws them is given: it needs matplotlib."""
    found = [_of_methods(each, plots.of_methods(each, summary) if plots else []) for each in summary.main]
    if summary.batches:
        table = tables.points_table(summary.batches, "Batches by size", "texts at once")
        drawn = plots.of_batches(summary) if plots else []
        found.append(Section(words.mode_title("batch"), words.ABOUT["batch"], [table], drawn))
    of_studies = plots.of_studies(summary) if plots else {}
    for mode in dict.fromkeys(mode for mode, _ in summary.studies):
        found.append(_of_studies(summary, mode, of_studies))
    wrong = [tables.divergence_table(summary), tables.failure_table(summary)]
    if kept := [table for table in wrong if table is not None]:
        found.append(Section("What went wrong", tables=kept))
    return found


def _of_methods(found: Comparison, drawn: list[Plot]) -> Section:
    shown = [tables.speedup_table(found), tables.output_table(found)]
    section = Section(words.mode_title(found.mode), words.ABOUT.get(found.mode, ""), shown, drawn)
    if len(found.categories) > 1:
        section.details = [
            tables.category_table(found, "MAT by category", "mat"),
            tables.category_table(found, "MAT without loops by category", "mat_without_loops"),
            tables.category_table(found, "Tokens/s by category", "decoding", "Decoding alone."),
        ]
    if (timed := tables.parts_table(found.results)) is not None:
        section.details.append(timed)
    return section


def _of_studies(summary: Summary, mode: str, drawn: dict[tuple[str, str], list[Plot]]) -> Section:
    title = f"Studies: {words.mode_title(mode).lower()}"
    section = Section(title, "One setting changes, everything else stays.", plots_first=True)
    section.findings = findings.of_studies(summary, mode)
    section.plots += drawn.get((mode, ""), [])
    for (of_mode, name), points in summary.studies.items():
        if of_mode != mode:
            continue
        said, timed = words.study_words(name), None
        if name == "parts":
            pairs = [(each.point, result) for each in points for result in each.results]
            labels = [f"{result.label}, {point}" if point else result.label for point, result in pairs]
            timed = tables.parts_table([result for _, result in pairs], labels)
        table = tables.rates_table if name == STOPPING else tables.points_table
        section.tables.append(timed or table(points, said.title, said.axis))
        section.plots += drawn.get((mode, name), [])
    return section
