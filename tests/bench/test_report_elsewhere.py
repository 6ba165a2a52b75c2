"""What to expect on other machines: reckoned from tokens a step and published costs of a step."""

import pytest
from support.commandline import run, run_json
from support.measured import only, row, write

from token_recycling.bench.report.elsewhere import CURVES, elsewhere_table, reckoned, relative_cost


def test_costs_are_those_of_the_sources_and_straight_between_them():
    assert relative_cost("A100", 81) == pytest.approx(2.73 / 2.22)
    assert relative_cost("RTX 3090", 81) == pytest.approx(2.73 / 1.40)
    assert relative_cost("CPU", 16) == 1.35
    assert relative_cost("CPU", 20) == pytest.approx((1.35 + 1.42) / 2)
    assert relative_cost("CPU", 500) == 2.90
    assert all(curve[1] == 1 and list(curve) == sorted(curve) for curve in CURVES.values())


def measured():
    """Two kinds of text: a tree of 16 nodes, the paper's of 80, and a drafter that adapts itself to the machine."""
    return [
        row(method, f"{category}/1", steps=steps, nodes=nodes)
        for category, factor in (("qa", 1), ("rag", 2))
        for method, steps, nodes in (
            ("recycling:tree=16", 5 * factor, {"17": 5}),
            ("published", 4 * factor, {"81": 4}),
            ("recycling", 4 * factor, {"9": 4}),
            ("generate", 10, {"1": 10}),
        )
    ]


def test_a_speedup_is_tokens_a_step_by_the_cost_of_a_step():
    found = reckoned(only(measured())).set_index(["category", "method"])
    assert set(found.index.get_level_values("method")) == {"recycling:tree=16", "published"}
    assert found.loc[("qa", "published"), "A100"] == pytest.approx(2.5 / (2.73 / 2.22))
    assert found.loc[("rag", "published"), "RTX 3090"] == pytest.approx(1.25 / (2.73 / 1.40))
    assert found.loc[("qa", "recycling:tree=16"), "CPU"] == pytest.approx(2 / relative_cost("CPU", 17))
    assert found.loc[("all", "published"), "MAT"] == pytest.approx(20 / 12)


def test_the_table_says_that_it_is_reckoned_and_from_what():
    table = elsewhere_table(only(measured()))
    assert table.note.startswith("Reckoned, not measured")
    assert "github.com/hemingkx/Spec-Bench" in table.note
    assert [(line[0].text, line[2].text, [cell.best for cell in line[4:]]) for line in table.rows[:2]] == [
        ("QA", "17", [False, True, True]),
        ("QA", "81", [True, False, False]),
    ]
    assert elsewhere_table(only([row(), row("generate")])) is None


def test_it_is_an_option_of_the_report(tmp_path):
    write(tmp_path, measured())
    assert "What to expect elsewhere" not in run("report", tmp_path).stdout
    assert "What to expect elsewhere" in run("report", tmp_path, "--elsewhere").stdout
    assert "### What to expect elsewhere" in (tmp_path / "report.md").read_text()
    assert run_json("report", tmp_path, "--elsewhere")["elsewhere"]["generate"][0]["method"] == "recycling:tree=16"
