"""The report as one HTML page that needs nothing else: plots are in it, styles are in it, there is no script."""

from __future__ import annotations

from importlib.resources import files

import jinja2
from markupsafe import Markup

from . import findings, tables, words
from .answers import answers
from .plots import Plot, style
from .sections import Section
from .summary import Summary


def html(summary: Summary, sections: list[Section]) -> str:
    """The page. Everything from the rows is escaped: labels and messages of errors are other people's text."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(
        title=words.title(summary),
        where=words.where(summary),
        answers=answers(summary),
        overview=tables.overview_table(summary),
        pictures=_pictures(sections),
        findings=findings.of_outputs(summary),
        warnings=findings.warnings(summary),
        sections=sections,
        environments=[words.environment(each) for each in summary.environments],
        settings=words.settings(summary),
        how=words.HOW,
        light=Markup(style.css(dark=False)),
        dark=Markup(style.css(dark=True)),
        inline=lambda plot: Markup(plot.inline()),
    )


def _pictures(sections: list[Section]) -> list[tuple[str, Plot]]:
    """The two plots of the first screen, each with its part's title: the first of each kind of text, or the first two
    of the only one.
    """
    compared = [section for section in sections if section.plots and not section.plots_first]
    if len(compared) == 1:
        return [(compared[0].title, plot) for plot in compared[0].plots[:2]]
    return [(section.title, section.plots[0]) for section in compared[:2]]
