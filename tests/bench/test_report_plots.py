"""The plots of a report: that what is drawn is what was measured, and that every method keeps its look."""

import xml.etree.ElementTree as ElementTree
from itertools import combinations

import pytest
from matplotlib.colors import to_hex
from support.measured import only, row, summary_of

from token_recycling.bench.report import plots, style
from token_recycling.bench.report.summary import curves, summarize


def looks(*names):
    return style.looks(names)


def drawn(axes):
    """Points of the lines of a drawing."""
    return [tuple(map(tuple, zip(*line.get_data(), strict=True))) for line in axes.lines]


# looks


def test_a_method_has_one_look_and_no_other_method_has_it():
    found = looks("generate", "plain", *(f"method {number}" for number in range(24)))
    assert found["generate"].colour == found["plain"].colour == style.GREY
    others = [look for name, look in found.items() if name.startswith("method")]
    assert len(set(others)) == len(others)
    assert found["method 3"] == looks("plain", *(f"method {number}" for number in range(4)))["method 3"]


def test_colours_are_told_apart_by_whoever_sees_them():
    """The least distance between any two, in CIELAB, under normal vision and three kinds of colour blindness."""
    for seen in _SEEN:
        colours = [_lab(colour, seen) for colour in style.PALETTE]
        apart = [sum((a - b) ** 2 for a, b in zip(*pair, strict=True)) ** 0.5 for pair in combinations(colours, 2)]
        assert min(apart) > 18


_SEEN = (
    ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    # Machado, Oliveira and Fernandes (2009), severity 1: protanopia, deuteranopia, tritanopia
    ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
)
_XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))


def _lab(colour, seen):
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    visible = [min(1.0, max(0.0, part)) for part in _times(seen, linear)]
    x, y, z = (value / white for value, white in zip(_times(_XYZ, visible), (0.9505, 1, 1.089), strict=True))
    x, y, z = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _times(matrix, vector):
    return [sum(a * b for a, b in zip(line, vector, strict=True)) for line in matrix]


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


def test_lengths_are_shares_of_the_steps_that_gave_as_many():
    lengths = {"1": 60, "2": 30, "3": 9, "40": 1}
    rows = [row("generate", lengths={"1": 10}), row("ours", tokens=187, steps=100, lengths=lengths)]
    plot = plots.lengths(only(rows), looks("generate", "ours"))
    (axes,) = plot.drawing.axes
    ((one, two, three),) = drawn(axes)
    assert (one[0], two[0], three[0]) == (1, 2, 3)
    assert (one[1], two[1], three[1]) == pytest.approx((1.0, 0.4, 0.1))
    assert [text.get_text() for text in plot.drawing.legends[0].get_texts()] == ["label of ours: 1.87"]
    assert plots.lengths(only(rows[:1]), looks("generate")) is None


def test_parts_are_stacked_with_and_without_the_model():
    rows = [row(steps=2, parts={"retrieve": 0.002, "forward": 0.02, "verify": 0.004}), row("generate")]
    plot = plots.parts([only(rows)], "parts_generate")
    whole, outside = plot.drawing.axes
    spans = [[(bar.get_x(), bar.get_width()) for bar in axes.patches] for axes in (whole, outside)]
    assert sum(spans[0], ()) == pytest.approx((0, 1, 1, 10, 11, 2))
    assert sum(spans[1], ()) == pytest.approx((0, 1, 1, 2))
    assert plots.parts([only(rows[1:])], "parts_generate") is None


def test_the_heat_map_shows_the_share_of_every_place():
    rows = [row(tried=[[1, 0, 100], [1, 1, 40], [2, 0, 50], [20, 0, 1]], accepted=[[1, 0, 75], [1, 1, 2], [2, 0, 6]])]
    plot = plots.places(only(rows))
    axes = plot.drawing.axes[0]
    assert {text.get_position(): text.get_text() for text in axes.texts} == {(0, 0): "75", (1, 0): "5", (0, 1): "12"}
    assert [label.get_text() for label in axes.get_yticklabels()][:2] == ["1", "2"]
    assert "depths beyond 12" in plot.caption
    assert plots.places(only([row()])) is None
    none_accepted = plots.places(only([row(tried=[[1, 0, 4]], accepted=[])]))
    assert [text.get_text() for text in none_accepted.drawing.axes[0].texts] == ["0"]


# studies


def test_curves_join_what_differs_by_point_alone():
    rows = [row("a", study="s", point=point) for point in ("1", "2")]
    rows += [row(f"b:size={point}", study="s", point=point) for point in ("1", "2")]
    rows += [row("generate", study="s", point="1")]
    found = curves(summarize(rows).comparisons)
    assert {name: list(curve["point"]) for name, curve in found.items()} == {
        "label of a": ["1", "2"],
        "b": ["1", "2"],
    }


def test_a_study_of_numbers_is_a_line_and_its_baseline_too():
    rows = [row("generate", study="k", steps=10, seconds=[2.0])]
    rows += [row("ours", study="k", point=point, steps=steps) for point, steps in (("2", 5), ("4", 4), ("16", 2))]
    plot = plots.study("k", summarize(rows).comparisons, looks("generate", "ours"))
    top, bottom = plot.drawing.axes
    assert drawn(top) == [((2, 2.0), (4, 2.5), (16, 5.0))]
    assert drawn(bottom) == [((2, 10.0), (4, 10.0), (16, 10.0)), ((2, 5.0), (4, 5.0), (16, 5.0))]
    assert [label.get_text() for label in bottom.get_xticklabels()] == ["2", "4", "16"]
    assert plot.name == "study_k_generate"


def test_a_study_of_words_is_bars_in_the_order_of_the_rows():
    rows = [row("ours", study="update rule", point=point, steps=steps) for point, steps in (("last", 5), ("first", 4))]
    rows += [row("generate", study="update rule", point=point, seconds=[2.0]) for point in ("last", "first")]
    plot = plots.study("update rule", summarize(rows).comparisons, looks("ours", "generate"))
    top, bottom = plot.drawing.axes
    assert [bar.get_height() for bar in top.patches] == [2.0, 2.5]
    assert [bar.get_height() for bar in bottom.patches] == [10.0, 10.0, 5.0, 5.0]
    assert [label.get_text() for label in bottom.get_xticklabels()] == ["last", "first"]
    assert plot.name == "study_update_rule_generate"


def test_the_study_of_when_to_stop_has_verification_over_discard_rate():
    rows = [
        row("ours", study="specdec-pp", point=f"length {length}", steps=steps, discarded=length, drafted=1)
        for length, steps in ((2, 5), (8, 2))
    ]
    plot = plots.study("specdec-pp", summarize(rows).comparisons, looks("ours"))
    (axes,) = plot.drawing.axes
    assert drawn(axes) == [((0.2, 0.5), (0.8, 0.2))]
    assert [text.get_text() for text in axes.texts] == ["length 2", "length 8"]


def test_a_study_without_points_shows_the_parts():
    found = summary_of(row(study="parts", parts={"forward": 0.1, "verify": 0.01}))
    drawn = plots.draw_studies({"parts": found.comparisons}, "generate", found.methods)
    assert [plot.name for plot in drawn] == ["study_parts_generate"]


def test_batches():
    rows = [row("generate", mode="batch", batch=size, total_seconds=[6.0]) for size in (1, 2, 8)]
    rows += [row("ours", mode="batch", batch=size, total_seconds=[float(size)]) for size in (1, 2, 8)]
    plot = plots.batches(summarize(rows).batches, looks("generate", "ours"))
    (axes,) = plot.drawing.axes
    assert drawn(axes)[1] == ((1, 6.0), (2, 3.0), (8, 0.75))
    assert plots.batches(summarize(rows[:1]).batches, looks("generate")) is None


# files


def test_a_file_is_svg_with_text_as_outlines_and_on_a_page_its_ids_are_its_own(tmp_path):
    rows = [row("generate", total_seconds=[4.0]), row("a <b> $1 $2")]
    plot, *none = plots.draw(only(rows), ["generate", "a <b> $1 $2"])
    assert none == [None] * 3
    file = plot.save(tmp_path)
    assert file == tmp_path / "speedup_generate.svg"
    text = file.read_text()
    ElementTree.fromstring(text)
    assert "<text" not in text
    inline = plot.inline()
    ElementTree.fromstring(inline)
    assert inline.startswith('<svg role="img" aria-label="Speedup by category. ')
    assert 'id="speedup_generate-' in inline
