"""The plots of a report: that what is drawn is what was measured, and that every method keeps its look."""

import xml.etree.ElementTree as ElementTree

import pytest
from matplotlib.colors import to_hex
from support.measured import only, row

from token_recycling.bench.report import plots, style


def looks(*names):
    return style.looks(names)


def drawn(axes):
    """Points of the lines of a drawing."""
    return [tuple(map(tuple, zip(*line.get_data(), strict=True))) for line in axes.lines]


# looks


# methods


def test_speedups_are_drawn_where_they_are():
    rows = [row("generate", name, total_seconds=[4.0]) for name in ("qa/1", "qa/2", "rag/1")]
    rows += [row("ours", "qa/1", total_seconds=[1.0]), row("ours", "qa/2", total_seconds=[2.0]), row("ours", "rag/1")]
    plot = plots.speedups(only(rows), looks("generate", "ours"))
    (axes,) = plot.drawing.axes
    dots = [line for line in axes.lines if line.get_marker() == looks("ours")["ours"].marker]
    assert [dot.get_xdata()[0] for dot in dots] == pytest.approx([12 / 5, 8 / 3, 2])
    assert {to_hex(dot.get_color()) for dot in dots} == {looks("ours")["ours"].colour}
    quartiles = [line.get_xdata() for line in axes.lines if line.get_color() == dots[0].get_color()]
    assert list(quartiles[2]) == [2.5, 3.5]
    assert [text.get_text() for text in plot.drawing.legends[0].get_texts()] == ["label of ours: 2.40"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["all prompts", "QA", "RAG"]
    assert plots.speedups(only([row()]), looks("recycling")) is None


def test_the_heat_map_shows_the_share_of_every_place():
    rows = [row(tried=[[1, 0, 100], [1, 1, 40], [2, 0, 50], [20, 0, 1]], accepted=[[1, 0, 75], [1, 1, 2], [2, 0, 6]])]
    plot = plots.places(only(rows))
    axes = plot.drawing.axes[0]
    shares = axes.collections[0].get_array()
    assert [shares[place] for place in ((0, 0), (0, 1), (1, 0))] == [75, 5, 12]
    assert shares.mask[1, 1]
    assert "depths beyond 12" in plot.caption
    assert plots.places(only([row()])) is None


# files


def test_a_file_is_svg_with_text_as_outlines(tmp_path):
    rows = [row("generate", total_seconds=[4.0]), row("a <b> $1 $2")]
    plot, *none = plots.draw(only(rows), ["generate", "a <b> $1 $2"])
    assert none == [None] * 2
    file = plot.save(tmp_path)
    assert file == tmp_path / "speedup_generate.svg"
    text = file.read_text()
    ElementTree.fromstring(text)
    assert "<text" not in text
