"""A report of what was measured, from `rows.jsonl` alone: in the terminal, as Markdown, and as one HTML page.

`write(folder)` makes `report.md`, `report.html` and the files of `plots/`. The same rows give the same files, byte by
byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from rich.console import Console
from rich.text import Text

from ..row_format import STOPPING
from . import findings, plots, tables, words
from .elsewhere import elsewhere_table, reckoned
from .style import Plot
from .summary import Comparison, Summary, read
from .table import Table, as_markdown, as_text, escaped


@dataclass
class Section:
    """A part of a report: what was measured in one way."""

    title: str
    text: str
    tables: list[Table]
    plots: list[Plot]


def write(
    folder: Path,
    console: Console | None = None,
    baseline: str | None = None,
    clock: str = "wall",
    elsewhere: bool = False,
) -> list[Path]:
    """Write the report of a folder of measurements into it; with a console, print the tables there first.

    `baseline` is the method that speedups refer to; otherwise transformers' `generate`, or plain decoding where that
    was not measured. `clock` is "wall" or "processor". With `elsewhere` there is a table of what to expect on other
    machines. Returns the files written. Raises ValueError for a folder without measurements.
    """
    summary = read(folder, baseline, clock)
    sections = sections_of(summary, elsewhere)
    if console is not None:
        _print(summary, sections, console)
    drawn = folder / "plots"
    drawn.mkdir(exist_ok=True)
    written = [plot.save(drawn) for section in sections for plot in section.plots]
    for ending in ("md", "html"):
        written.append(folder / f"report.{ending}")
        written[-1].write_text(rendered(f"page.{ending}", summary, sections), encoding="utf-8")
    return written


def as_dict(summary: Summary, elsewhere: bool = False) -> dict[str, Any]:
    """Every figure as a plain value, for JSON."""
    found = {
        "environments": summary.environments,
        "settings": dict(words.settings(summary)),
        "findings": findings.findings(summary),
        "warnings": findings.warnings(summary),
        "comparisons": [each.as_dict() for each in summary.comparisons],
    }
    if elsewhere:
        found["elsewhere"] = {each.mode: reckoned(each).to_dict("records") for each in summary.main}
    return found


def sections_of(summary: Summary, elsewhere: bool = False) -> list[Section]:
    """All parts of a report."""
    clock, found = summary.clock, []
    for each in summary.main:
        of_methods = (
            tables.speedup_table(each, clock),
            tables.output_table(each),
            tables.category_table(each) if len(each.categories) > 1 else None,
            elsewhere_table(each) if elsewhere else None,
            tables.parts_table([each]),
        )
        about = words.ABOUT.get(each.mode, "")
        found.append(_section(words.mode_title(each.mode), about, of_methods, plots.draw(each, summary.methods)))
    if summary.batches:
        by_size = tables.points_table(summary.batches, "Batches by size", "texts at once", clock)
        drawn = plots.draw_batches(summary.batches, summary.methods)
        found.append(_section(words.mode_title("batch"), words.ABOUT["batch"], [by_size], drawn))
    for mode in dict.fromkeys(mode for mode, _ in summary.studies):
        studies = {name: points for (of_mode, name), points in summary.studies.items() if of_mode == mode}
        title = f"Studies: {words.mode_title(mode).lower()}"
        by_point = [_study_table(name, points, clock) for name, points in studies.items()]
        drawn = plots.draw_studies(studies, mode, summary.methods)
        found.append(_section(title, "One setting changes, everything else stays.", by_point, drawn))
    if (failures := tables.failure_table(summary)) is not None:
        found.append(Section("What went wrong", "", [failures], []))
    return found


def _section(title: str, text: str, tables: Iterable[Table | None], plots: Iterable[Plot | None]) -> Section:
    """Without the tables and plots that the rows have no figures for."""
    return Section(title, text, [each for each in tables if each], [each for each in plots if each])


def _study_table(name: str, points: Sequence[Comparison], clock: str) -> Table:
    said, timed = words.study_words(name), tables.parts_table(points) if name == "parts" else None
    return timed or tables.points_table(points, said.title, said.axis, clock, name == STOPPING)


def _print(summary: Summary, sections: list[Section], console: Console) -> None:
    """Tables, findings and warnings for a terminal."""
    console.print(Text(f"{words.title(summary)}\n", "bold"))
    for section in sections:
        console.print(Text(section.title, "bold"), Text(section.text, "dim"), "", sep="\n")
        for table in section.tables:
            # A table is as wide as the terminal at most, but for names that are wider alone.
            console.print(Text(f"{table.title}\n{as_text(table, console.width)}"), soft_wrap=True)
            console.print(Text(f"{table.note}\n", "dim"))
    for line in findings.findings(summary):
        console.print(Text(line))
    for line in findings.warnings(summary):
        console.print(Text.assemble(("careful: ", "bold yellow"), line))


def rendered(template: str, summary: Summary, sections: list[Section]) -> str:
    """The report by one of the templates beside this file.

    Everything from the rows is escaped: labels and messages of errors are other people's text.
    """
    environment = jinja2.Environment(
        autoescape=template.endswith(".html"), trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["md"] = lambda text: escaped(str(text))
    text = files(__package__).joinpath(template).read_text(encoding="utf-8")
    return environment.from_string(text, {"as_markdown": as_markdown}).render(
        title=words.title(summary),
        answers=findings.answers(summary),
        findings=findings.others(summary),
        warnings=findings.warnings(summary),
        sections=sections,
        facts=[*map(words.environment, summary.environments), words.settings(summary)],
        how=words.HOW,
    )
