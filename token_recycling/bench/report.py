"""Report of a benchmark, from `rows.jsonl` only, as Markdown: in the terminal and as `report.md` with plots.

The same rows give byte-identical files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import plots
from .findings import (
    ABOUT,
    HOW,
    condition_title,
    environment_of,
    findings_of,
    findings_table,
    mode_title,
    settings_of,
    title_of,
    warnings_of,
)
from .plots import Plot
from .summary import Summary, read
from .tables import (
    Table,
    batch_table,
    category_table,
    escaped,
    failure_table,
    output_table,
    parts_table,
    speedup_table,
)


@dataclass
class Section:
    """A section of a report: measurements of one kind."""

    title: str
    text: str
    tables: list[Table]
    plots: list[Plot]


def write(folder: Path, baseline: str | None = None, clock: str = "wall") -> tuple[str, list[Path]]:
    """Write the report of a folder of measurements into the folder; returns the text and the files written.

    `baseline` is the method that speedups refer to, by default transformers' `generate`, or plain decoding if that was
    not measured. `clock` is "wall" or "processor". Raises ValueError for a folder without measurements.
    """
    summary = read(folder, baseline, clock)
    sections = sections_of(summary)
    page, text = folder / "report.md", markdown(summary, sections)
    page.write_text(text, encoding="utf-8")
    written = [page]
    for plot in (plot for section in sections for plot in section.plots):
        (folder / "plots").mkdir(exist_ok=True)
        written.append(plot.save(folder / "plots"))
    return text, written


def as_dict(summary: Summary) -> dict[str, Any]:
    """Return every figure as a plain value, for JSON."""
    fastest = findings_table(summary)
    return {
        "environments": summary.environments,
        "settings": dict(settings_of(summary)),
        "fastest": [] if fastest is None else fastest.frame.to_dict("records"),
        "findings": findings_of(summary),
        "warnings": warnings_of(summary),
        "comparisons": [comparison.as_dict() for comparison in summary.comparisons],
    }


def sections_of(summary: Summary) -> list[Section]:
    """Return all sections of a report."""
    clock, sections = summary.clock, []
    for comparison in summary.main:
        tables = (
            speedup_table(comparison, clock),
            output_table(comparison),
            category_table(comparison) if len(comparison.categories) > 1 else None,
            parts_table([comparison]),
        )
        drawings = []
        if not comparison.run:
            drawings = [plots.speedups(comparison, summary.methods), plots.acceptance(comparison)]
        sections.append(_section(condition_title(comparison), ABOUT.get(comparison.mode, ""), tables, drawings))
    for run in dict.fromkeys(comparison.run for comparison in summary.batches):
        sizes = [comparison for comparison in summary.batches if comparison.run == run]
        title = ", ".join(filter(None, (run, mode_title("batch"))))
        sections.append(_section(title, ABOUT["batch"], [batch_table(sizes, clock)], []))
    if (failures := failure_table(summary)) is not None:
        sections.append(Section("Failures", "", [failures], []))
    return sections


def _section(title: str, text: str, tables: Iterable[Table | None], drawings: Iterable[Plot | None]) -> Section:
    """Return a section; tables and plots without figures are omitted."""
    return Section(title, text, [table for table in tables if table], [plot for plot in drawings if plot])


def markdown(summary: Summary, sections: Sequence[Section]) -> str:
    """Return the report. Everything from the rows is escaped, since labels and error messages are untrusted text."""
    return "\n\n".join(_paragraphs(summary, sections)) + "\n"


def _paragraphs(summary: Summary, sections: Sequence[Section]) -> Iterator[str]:
    yield f"# {escaped(title_of(summary))}"
    if (fastest := findings_table(summary)) is not None:
        yield fastest.markdown()
    if findings := findings_of(summary):
        yield _list(findings)
    if warnings := warnings_of(summary):
        yield "**Caveats**"
        yield _list(warnings)
    for section in sections:
        yield f"## {escaped(section.title)}"
        if section.text:
            yield section.text
        for table in section.tables:
            yield f"### {table.title}"
            yield table.markdown()
        for plot in section.plots:
            yield f"### {plot.title}"
            yield escaped(plot.caption)
            yield f"![{plot.title}](plots/{plot.name}.svg)"
    yield "## Method"
    for facts in [*map(environment_of, summary.environments), settings_of(summary)]:
        yield "\n".join(f"- {name}: {escaped(text)}" for name, text in facts)
    yield "\n".join(f"- {line}" for line in HOW)


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {escaped(line)}" for line in lines)
