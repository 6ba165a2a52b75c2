"""A report of what was measured, from `rows.jsonl` alone, as Markdown: in the terminal and as `report.md` with plots.

The same rows give the same files, byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import findings, jobs, plots, tables, words
from .plots import Plot
from .summary import Summary, read
from .tables import Table, escaped


@dataclass
class Section:
    """A part of a report: what was measured in one way."""

    title: str
    text: str
    tables: list[Table]
    plots: list[Plot]


def write(folder: Path, baseline: str | None = None, clock: str = "wall") -> tuple[str, list[Path]]:
    """Write the report of a folder of measurements into it; returns its text and the files written.

    `baseline` is the method that speedups refer to; otherwise transformers' `generate`, or plain decoding where that
    was not measured. `clock` is "wall" or "processor". Raises ValueError for a folder without measurements.
    """
    summary = read(folder, baseline, clock)
    sections = sections_of(summary)
    drawn, page = folder / "plots", folder / "report.md"
    written = [page]
    for plot in (plot for section in sections for plot in section.plots):
        drawn.mkdir(exist_ok=True)
        written.append(plot.save(drawn))
    text = markdown(summary, sections)
    page.write_text(text, encoding="utf-8")
    if (by_job := jobs.page(summary)) is not None:
        written.append(folder / "jobs.md")
        written[-1].write_text(by_job, encoding="utf-8")
    return text, written


def as_dict(summary: Summary) -> dict[str, Any]:
    """Every figure as a plain value, for JSON."""
    fastest = findings.findings_table(summary)
    return {
        "environments": summary.environments,
        "settings": dict(words.settings(summary)),
        "fastest": [] if fastest is None else fastest.frame.to_dict("records"),
        "findings": findings.findings(summary),
        "warnings": findings.warnings(summary),
        "comparisons": [each.as_dict() for each in summary.comparisons],
    }


def sections_of(summary: Summary) -> list[Section]:
    """All parts of a report."""
    clock, found = summary.clock, []
    for each in summary.main:
        of_methods = (
            tables.speedup_table(each, clock),
            tables.output_table(each),
            tables.category_table(each) if len(each.categories) > 1 else None,
            tables.parts_table([each]),
        )
        drawn = plots.draw(each, summary.methods) if not each.run else []
        found.append(_section(words.place(each), words.ABOUT.get(each.mode, ""), of_methods, drawn))
    for run in dict.fromkeys(each.run for each in summary.batches):
        sizes = [each for each in summary.batches if each.run == run]
        by_size = tables.batch_table(sizes, clock)
        drawn = plots.draw_batches(sizes, summary.methods) if not run else []
        title = ", ".join(filter(None, (run, words.mode_title("batch"))))
        found.append(_section(title, words.ABOUT["batch"], [by_size], drawn))
    if (failures := tables.failure_table(summary)) is not None:
        found.append(Section("Failures", "", [failures], []))
    return found


def _section(title: str, text: str, tables: Iterable[Table | None], plots: Iterable[Plot | None]) -> Section:
    """Without the tables and plots that the rows have no figures for."""
    return Section(title, text, [each for each in tables if each], [each for each in plots if each])


def markdown(summary: Summary, sections: Sequence[Section]) -> str:
    """The report. Everything from the rows is escaped: labels and messages of errors are other people's text."""
    return "\n\n".join(_paragraphs(summary, sections)) + "\n"


def _paragraphs(summary: Summary, sections: Sequence[Section]) -> Iterator[str]:
    yield f"# {escaped(words.title(summary))}"
    if (fastest := findings.findings_table(summary)) is not None:
        yield fastest.markdown()
    if said := findings.findings(summary):
        yield _list(said)
    if careful := findings.warnings(summary):
        yield "**Before believing it**"
        yield _list(careful)
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
    yield "## How it was measured"
    for facts in [*map(words.environment, summary.environments), words.settings(summary)]:
        yield "\n".join(f"- {name}: {escaped(text)}" for name, text in facts)
    yield "\n".join(f"- {line}" for line in words.HOW)


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {escaped(line)}" for line in lines)
