"""The tables of the report: their figures, in a terminal and as Markdown."""

import pytest
from support.measured import failed, only, row

from token_recycling.bench.report import tables
from token_recycling.bench.report.summary import summarize
from token_recycling.bench.report.table import Cell, Table, as_markdown, as_text


def texts(table):
    return [[cell.text for cell in line] for line in table.rows]


def test_the_first_table_is_the_papers():
    rows = [
        row("generate", "mt_bench/1", steps=10, total_seconds=[2.0], seconds=[1.0]),
        row("generate", "qa/1", steps=10, total_seconds=[2.0], seconds=[1.0]),
        row("ours", "mt_bench/1", total_seconds=[1.0], seconds=[0.4]),
        row("ours", "qa/1", total_seconds=[3.0], seconds=[0.4]),
    ]
    table = tables.speedup_table(only(rows))
    assert table.columns == ["method", "MT", "QA", "speedup", "middle 95%", "MAT", "tokens/s"]
    assert texts(table) == [
        ["label of generate", "1.00", "1.00", "1.00", "-", "1.00", "10.0"],
        ["label of ours", "2.00", "0.67", "1.00", "0.67 to 2.00", "2.00", "25.0"],
    ]
    best = [[cell.best for cell in line[1:]] for line in table.rows]
    assert best == [[False, True, True, False, False, False], [True, False, True, False, True, True]]


def test_the_second_table_has_losses_and_doubts():
    far = {"turn": 0, "place": 3, "margin": 0.5, "expected": 1, "got": 2}
    rows = [row("generate", f"a/{n}", steps=10) for n in range(3)]
    rows += [row("ours", "a/0", identical=False, divergence=far, loop_tokens=5, loop_steps=1, repeated_4grams=0.12)]
    rows += [row("ours", "a/1", identical=True, total_seconds=[1.0]), failed("ours", "a/2")]
    ours = tables.output_table(only(rows)).rows[1]
    assert [cell.text for cell in ours] == [
        *("label of ours", "1.67", "6.0%", "6.7", "1.25 1.50 1.75", "1 of 2", "0.5", "1")
    ]
    assert [cell.text for cell in ours if cell.alarm] == ["1 of 2", "1"]


def test_tokens_a_step_by_kind_of_text():
    found = only([row("generate", "qa/1", steps=10), row("ours", "rag/1"), row("ours", "qa/1", steps=4)])
    table = tables.category_table(found)
    assert table.columns == ["method", "QA", "RAG", "all"]
    assert texts(table) == [["label of generate", "1.00", "-", "1.00"], ["label of ours", "2.50", "2.00", "2.22"]]


def test_other_tables():
    found = only([row("generate", "a/1"), row("ours", "b/1", parts={"forward": 0.01, "verify": 0.001})])
    assert texts(tables.parts_table([found])) == [["label of ours", "2.00", "0.20", "2.20", "10%"]]
    assert tables.parts_table([only([row()])]) is None
    rows = [row("ours", study="k", point=k, nodes={"9": 5}, identical=True) for k in ("2", "16")]
    table = tables.points_table(summarize(rows).comparisons, "Candidates", "k")
    assert table.columns == [
        *("k", "method", "drafted", "MAT", "MAT without loops", "tokens/s", "whole call", "identical")
    ]
    assert [line[0] for line in texts(table)] == ["2", "16"]
    assert texts(table)[0][2:] == ["8.0", "2.00", "2.00", "10.0", "5.0", "1 of 1"]


@pytest.mark.parametrize("width", [60, 72, 93, 200])
def test_a_terminal_shows_every_figure_and_every_head_whatever_its_width(width):
    heads = ["update cache", "retrieve", "k", "tokens/s whole call", "speedup", "overhead", "identical", "failed"]
    cells = [[Cell("a method of a longer name"), *(Cell(f"{n}.{m:02}") for m in range(len(heads)))] for n in range(3)]
    cells[0][1] = Cell("9.99", best=True)
    text = as_text(Table("Title", ["method", *heads], cells), width)
    assert max(map(len, text.splitlines())) <= width
    for word in " ".join(heads).split():
        assert word in text.split()
    assert "9.99*" in text.split()
    for line in cells[1:]:
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
