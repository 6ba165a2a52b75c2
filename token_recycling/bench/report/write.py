"""A report of what was measured, from `rows.jsonl` alone: in the terminal, as Markdown, and as one HTML page.

`write(folder)` makes `report.md`, `report.html` and the files of `plots/`. The same rows give the same
files, byte by byte.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ..._util.extras import lacking
from . import findings, tables, words
from .reading import read
from .sections import Section, sections_of
from .summary import Summary
from .table import as_markdown, as_rich, escaped


def write(folder: Path, console: Console | None = None, baseline: str | None = None) -> list[Path]:
    """Writes the report of a folder of measurements into it; with a console, prints the tables there first.

    `baseline` is the method that speedups refer to; otherwise transformers' `generate`, or plain decoding where that
    was not measured. Returns the files written. Raises ValueError for a folder without measurements, and where
    matplotlib is missing.
    """
    summary = read(folder, baseline)
    if console is not None:
        print_table(summary, console)
    if missing := lacking("bench", "matplotlib", "jinja2"):
        raise ValueError(f"writing a report {missing}")
    from . import page, plots

    sections = sections_of(summary, plots)
    drawn = folder / "plots"
    drawn.mkdir(exist_ok=True)
    files = [plot.save(drawn) for section in sections for plot in section.plots]
    for name, text in (("report.md", markdown(summary, sections)), ("report.html", page.html(summary, sections))):
        files.append(folder / name)
        files[-1].write_text(text, encoding="utf-8")
    return files


def print_table(summary: Summary | Path, console: Console) -> None:
    """The findings, the tables and the warnings for a terminal."""
    if isinstance(summary, Path):
        summary = read(summary)
    for section in sections_of(summary):
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
    """The report as Markdown, with links to the files of the plots."""
    lines = [f"# {escaped(words.title(summary))}", ""]
    lines += [f"- {escaped(line)}" for line in findings.findings(summary)]
    if found := findings.warnings(summary):
        lines += ["", "**To be careful about**", "", *(f"- {escaped(line)}" for line in found)]
    if (overview := tables.overview_table(summary)) is not None:
        lines += ["", f"## {overview.title}", "", as_markdown(overview)]
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
