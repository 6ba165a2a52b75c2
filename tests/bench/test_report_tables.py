"""The tables of the report: their figures, in a terminal and as Markdown."""

import io

import pytest
from rich.console import Console
from support.measured import failed, only, row, summary_of

from token_recycling.bench.report import tables
from token_recycling.bench.report.reading import compare
from token_recycling.bench.report.table import Cell, Table, as_markdown, as_rich


def test_the_first_table_is_the_papers():
    rows = [
        row("generate", "mt_bench/1", steps=10, total_seconds=[2.0], seconds=[1.0]),
        row("generate", "qa/1", steps=10, total_seconds=[2.0], seconds=[1.0]),
        row("ours", "mt_bench/1", total_seconds=[1.0], seconds=[0.4]),
        row("ours", "qa/1", total_seconds=[3.0], seconds=[0.4]),
    ]
    table = tables.speedup_table(only(rows))
    assert table.columns == ["method", "MT", "QA", "speedup", "MAT", "tokens/s"]
    assert [[cell.text for cell in line] for line in table.rows] == [
        ["label of generate", "1.00", "1.00", "1.00", "1.00", "10.0"],
        ["label of ours", "2.00", "0.67", "1.00", "2.00", "25.0"],
    ]
    best = [[cell.best for cell in line[1:]] for line in table.rows]
    assert best == [[False, True, True, False, False], [True, False, True, True, True]]


def test_the_second_table_has_losses_and_doubts():
    far = {"turn": 0, "place": 3, "margin": 0.5, "expected": 1, "got": 2}
    rows = [row("generate", f"a/{n}", steps=10) for n in range(3)]
    rows += [row("ours", "a/0", identical=False, divergence=far, loop_tokens=5, loop_steps=1, repeated_4grams=0.12)]
    rows += [row("ours", "a/1", identical=True, total_seconds=[1.0]), failed("ours", "a/2")]
    ours = tables.output_table(only(rows)).rows[1]
    texts = [cell.text for cell in ours]
    assert texts == ["label of ours", "1.67", "6.0%", "6.7", "1.25 1.50 1.75", "1 of 2", "0.5", "1"]
    assert [cell.text for cell in ours if cell.alarm] == ["1 of 2", "1"]


def test_other_tables():
    found = only([row("generate", "a/1"), row("ours", "b/1", parts={"forward": 0.01, "verify": 0.001})])
    by_category = tables.category_table(found, "MAT by category", "mat")
    assert [[cell.text for cell in line] for line in by_category.rows] == [
        ["label of generate", "2.00", "-", "2.00"],
        ["label of ours", "-", "2.00", "2.00"],
    ]
    parts = tables.parts_table(found.results)
    assert [cell.text for cell in parts.rows[0]] == ["label of ours", "2.000", "0.200", "2.200", "10%"]
    assert tables.parts_table(found.results[:1]) is None
    points = compare([row("ours", study="k", point=k, nodes={"9": 5}, identical=True) for k in ("2", "16")])
    table = tables.points_table(points, "Candidates", "k")
    assert table.columns == [
        "k",
        "method",
        "drafted",
        "MAT",
        "MAT without loops",
        "tokens/s",
        "whole call",
        "identical",
    ]
    assert [line[0].text for line in table.rows] == ["2", "16"]
    assert [cell.text for cell in table.rows[0]][2:] == ["8.0", "2.00", "2.00", "10.0", "5.0", "1 of 1"]


def test_divergences_are_listed_and_those_beyond_are_counted():
    near = {"turn": 1, "place": 17, "margin": 0.00002, "expected": 5, "got": 7}
    rows = [row(prompt=f"a/{n}", identical=False, divergence=near) for n in range(5)]
    table = tables.divergence_table(summary_of(*rows), most=3)
    assert [cell.text for cell in table.rows[0]] == [
        "label of recycling",
        "generate",
        "a/0",
        "1",
        "17",
        "5",
        "7",
        "2e-05",
    ]
    assert len(table.rows) == 3
    assert "2 more" in table.note
    assert tables.divergence_table(summary_of(row(identical=True))) is None


@pytest.mark.parametrize("width", [40, 60, 72, 80, 93, 120, 200])
def test_a_terminal_shows_every_figure_and_every_head_whatever_its_width(width):
    heads = ["update cache", "retrieve", "k", "tokens/s whole call", "speedup", "overhead", "identical", "failed"]
    cells = [[Cell("a method of a longer name"), *(Cell(f"{n}.{m:02}") for m in range(len(heads)))] for n in range(3)]
    console = Console(width=width, record=True, file=io.StringIO())
    for shown in as_rich(Table("Title", ["method", *heads], cells), width):
        console.print(shown)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    for word in " ".join(heads).split():
        assert word in text.split()
    for line in cells:
        for cell in line[1:]:
            assert text.split().count(cell.text) == 1


def test_markdown_of_a_table_is_escaped():
    table = Table("T", ["method", "speedup"], [[Cell("a|b_c\nd"), Cell("2.00", best=True)]], "A note.")
    assert as_markdown(table).splitlines() == [
        "| method | speedup |",
        "| --- | ---: |",
        "| a\\|b\\_c d | **2.00** |",
        "",
        "A note.",
    ]
