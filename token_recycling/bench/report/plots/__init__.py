"""The plots of a report, with matplotlib. Import it only where plots are wanted: it needs the extra `bench`."""

from __future__ import annotations

from ...row_format import STOPPING
from ..summary import Comparison, Summary
from . import methods, places, studies, style
from .style import Plot

__all__ = ["Plot", "of_batches", "of_methods", "of_studies"]


def of_methods(found: Comparison, summary: Summary) -> list[Plot]:
    """What compares methods on the same prompts."""
    looks = style.looks(summary.methods)
    with style.styled():
        plots = [
            methods.speedups(found, looks),
            methods.lengths(found, looks),
            methods.parts(found.results, f"parts_{found.mode}"),
            places.grids(found),
            places.trees(found),
        ]
    return [plot for plot in plots if plot is not None]


def of_studies(summary: Summary) -> dict[tuple[str, str], list[Plot]]:
    """The plots of every study, and under the study ("", mode) those of several together."""
    looks = style.looks(summary.methods)
    found: dict[tuple[str, str], list[Plot]] = {}
    with style.styled():
        for (mode, name), points in summary.studies.items():
            draw = studies.pareto if name == STOPPING else studies.study
            results = [result for each in points for result in each.results]
            plot = draw(points, looks) or methods.parts(results, f"study_{name}_{mode}")
            found[mode, name] = [plot] if plot else []
        for mode in dict.fromkeys(mode for mode, _ in summary.studies):
            plot = studies.trade_off(summary.studies, mode)
            found[mode, ""] = [plot] if plot else []
    return found


def of_batches(summary: Summary) -> list[Plot]:
    """What compares methods at several batch sizes."""
    with style.styled():
        plot = studies.batches(summary.batches, style.looks(summary.methods))
    return [plot] if plot else []
