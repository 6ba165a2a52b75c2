"""A report of what was measured, from `rows.jsonl` alone: in the terminal, as Markdown, and as one HTML page.

`write(folder)` makes `report.md`, `report.html` and the files of `plots/`. The same rows give the same
files, byte by byte.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from . import findings, tables, words
from .reading import read
from .summary import Comparison, Summary
from .table import Table, as_markdown, as_rich, escaped

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
    """What a page shows when asked to, and a terminal does not."""
    plots_first: bool = False
    """On a page the plots say it; the tables are shown when asked for."""


def write(folder: Path, console: Console | None = None, baseline: str | None = None) -> list[Path]:
    """Writes the report of a folder of measurements into it; with a console, prints the tables there first.

    `baseline` is the method that speedups refer to; otherwise transformers' `generate`, or plain decoding where that
    was not measured. Returns the files written. Raises ValueError for a folder without measurements, and where
    matplotlib is missing.
    """
    summary = read(folder, baseline)
    if console is not None:
        print_table(summary, console)
    try:
        from . import page, plots
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        raise ValueError(
            f"expected matplotlib and jinja2, which draw and write a report, got no {missing}: "
            "pip install matplotlib jinja2"
        ) from None
    every = _sections(summary, plots)
    drawn = folder / "plots"
    drawn.mkdir(exist_ok=True)
    files = [plot.save(drawn) for section in every for plot in section.plots]
    for name, text in (
        ("report.md", markdown(summary, every)),
        ("report.html", page.html(title(summary), summary, every)),
    ):
        files.append(folder / name)
        files[-1].write_text(text, encoding="utf-8")
    return files


def print_table(summary: Summary | Path, console: Console) -> None:
    """The findings, the tables and the warnings for a terminal."""
    if isinstance(summary, Path):
        summary = read(summary)
    for section in _sections(summary):
        console.print(Text(section.title, "bold"))
        if section.text:
            console.print(Text(section.text, "dim"))
        console.print()
        for table in section.tables:
            for shown in as_rich(table, console.width):
                console.print(shown, "")
            if table.note:
                console.print(Text(f"{table.note}\n", "dim"))
    for line in findings.findings(summary):
        console.print(Text(line))
    for line in findings.warnings(summary):
        console.print(Text.assemble(("careful: ", "bold yellow"), line))


def as_dict(summary: Summary) -> dict[str, Any]:
    """Every figure as a plain value, for JSON."""
    return {
        "environments": summary.environments,
        "settings": dict(words.settings(summary)),
        "findings": findings.findings(summary),
        "warnings": findings.warnings(summary),
        "comparisons": [each.as_dict() for each in summary.comparisons],
    }


def markdown(summary: Summary, sections: list[Section]) -> str:
    """The report as Markdown, with the plots by their files."""
    lines = [f"# {escaped(title(summary))}", ""]
    lines += [f"- {escaped(line)}" for line in findings.findings(summary)]
    if found := findings.warnings(summary):
        lines += ["", "**To be careful about**", "", *(f"- {escaped(line)}" for line in found)]
    for section in sections:
        lines += ["", f"## {section.title}", *(["", section.text] if section.text else [])]
        for table in section.tables + section.details:
            lines += ["", f"### {table.title}", "", as_markdown(table)]
        for plot in section.plots:
            lines += ["", f"### {plot.title}", "", escaped(plot.caption), "", f"![{plot.title}](plots/{plot.name}.svg)"]
    lines += ["", "## How it was measured", ""]
    for known in [*(words.environment(each) for each in summary.environments), words.settings(summary)]:
        lines += [*(f"- {name}: {escaped(text)}" for name, text in known), ""]
    return "\n".join([*lines, *(f"- {line}" for line in words.HOW), ""])


def title(summary: Summary) -> str:
    """What a report is called."""
    models = dict.fromkeys(str(each.get("model")) for each in summary.environments)
    return f"Decoding methods on {' and '.join(models)}"


def _sections(summary: Summary, plots: Any = None) -> list[Section]:
    """All parts of a report; with plots if the module that makes them is given."""
    found = [_of_methods(each, plots.of_methods(each, summary) if plots else []) for each in summary.main]
    if summary.batches:
        table = tables.points_table(summary.batches, "Batches by size", "texts at once")
        found.append(
            Section(
                words.mode_title("batch"), words.about("batch"), [table], plots.of_batches(summary) if plots else []
            )
        )
    drawn = plots.of_studies(summary) if plots else {}
    for mode in dict.fromkeys(mode for mode, _ in summary.studies):
        found.append(_of_studies(summary, mode, drawn))
    wrong = [tables.divergence_table(summary), tables.failure_table(summary)]
    if kept := [table for table in wrong if table is not None]:
        found.append(Section("What went wrong", "", kept))
    return found


def _of_methods(found: Comparison, drawn: list[Plot]) -> Section:
    details = []
    if len(found.categories) > 1:
        details.append(tables.category_table(found, "MAT by category", "mat"))
        details.append(tables.category_table(found, "MAT without loops by category", "mat_without_loops"))
        details.append(tables.category_table(found, "Tokens/s by category", "decoding", "Decoding alone."))
    if (timed := tables.parts_table(found.results)) is not None:
        details.append(timed)
    shown = [tables.speedup_table(found), tables.output_table(found)]
    return Section(words.mode_title(found.mode), words.about(found.mode), shown, drawn, details)


def _of_studies(summary: Summary, mode: str, drawn: dict[tuple[str, str], list[Plot]]) -> Section:
    section = Section(
        f"Studies: {words.mode_title(mode).lower()}", "One setting changes, everything else stays.", plots_first=True
    )
    section.plots += drawn.get((mode, ""), [])
    for (of_mode, name), points in summary.studies.items():
        if of_mode != mode:
            continue
        said = words.study_words(name)
        table = tables.rates_table if name == words.STOPPING else tables.points_table
        section.tables.append(table(points, said.title, said.axis))
        section.plots += drawn.get((mode, name), [])
        pairs = [(each.point, result) for each in points for result in each.results]
        labels = [f"{result.label}, {point}" if point else result.label for point, result in pairs]
        if name == "parts" and (timed := tables.parts_table([result for _, result in pairs], labels)) is not None:
            section.tables[-1:] = [timed]
    return section
