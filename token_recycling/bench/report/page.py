"""The report as one HTML page that needs nothing else: plots are in it, styles are in it, there is no script."""

from __future__ import annotations

from importlib.resources import files

import jinja2
from markupsafe import Markup

from . import findings, words
from .plots import style
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
        findings=findings.findings(summary),
        warnings=findings.warnings(summary),
        sections=sections,
        environments=[words.environment(each) for each in summary.environments],
        settings=words.settings(summary),
        how=words.HOW,
        light=Markup(style.css(dark=False)),
        dark=Markup(style.css(dark=True)),
        inline=lambda plot: Markup(plot.inline()),
    )
