"""The report: comparisons, reading of rows, findings and files, from rows alone."""

import json
import re
import subprocess
import sys

import pytest
from support.commandline import assert_refused, run, run_json
from support.measured import ENVIRONMENT, failed, only, row, summary_of, whole_run, write

from token_recycling.bench import report, tables
from token_recycling.bench.findings import findings_of, findings_table, warnings_of
from token_recycling.bench.summary import read, summarize
from token_recycling.bench.tables import escaped

HOSTILE = '<script>alert("1")</script> a|b\n*c*'


def speedups(found):
    return found.figures["speedup"].dropna().to_dict()


def run_of(seconds, mode="generate", baseline="generate"):
    """Return rows of 10 tokens with each method's seconds per prompt; the baseline takes 4 for each."""
    prompts = len(next(iter(seconds.values())))
    rows = [row(baseline, f"set/{number}", mode=mode, total_seconds=[4.0]) for number in range(prompts)]
    return rows + [
        row(method, f"set/{number}", mode=mode, total_seconds=[one])
        for method, every in seconds.items()
        for number, one in enumerate(every)
    ]


# Comparisons


def test_baseline_is_generate_else_plain_unless_given():
    rows = [row("ours"), row("plain", total_seconds=[4.0]), row("generate", total_seconds=[6.0])]
    assert list(speedups(only(rows)).items()) == [("generate", 1), ("ours", 3), ("plain", 1.5)]
    assert speedups(only(rows[:2])) == {"plain": 1, "ours": 2}
    assert speedups(only(rows, "ours"))["plain"] == 0.5
    assert speedups(only(rows[:1])) == {}
    with pytest.raises(ValueError, match="'nothing'"):
        summarize(rows, "nothing")


def test_only_rows_under_the_same_conditions_are_compared(tmp_path):
    rows = [row("generate", total_seconds=[4.0]), row()]
    rows += [row(mode="replay"), row("plain", mode="replay", total_seconds=[8.0])]
    rows += [row(mode="batch", batch=2), row("generate", mode="batch", batch=2, total_seconds=[1.0])]
    found = {(c.mode, c.batch): speedups(c).get("recycling") for c in summarize(rows).comparisons}
    assert found == {("generate", 1): 2.0, ("replay", 1): 4.0, ("batch", 2): 0.5}
    for dtype, seconds in (("bfloat16", 2.5), ("float32", 4.0)):
        own = {**ENVIRONMENT, "dtype": dtype}
        write(tmp_path / dtype, [row("generate", total_seconds=[seconds], environment=own), row(environment=own)])
    runs = read(tmp_path)
    assert {each.run: speedups(each)["recycling"] for each in runs.main} == {"bfloat16": 1.25, "float32": 2.0}
    assert warnings_of(runs) == []


def test_failures_are_counted_and_excluded_from_figures():
    rows = [row("generate", "a/1"), row("generate", "a/2"), row("ours", "a/1"), failed("ours", "a/2", "E: got 12")]
    rows.append(failed("ours", "a/3", "E: got 7"))
    ours = only(rows).figures.loc["ours"]
    assert (ours["prompts"], ours["failures"], ours["speedup"], ours["mat"]) == (1, 2, 1.0, 2.0)
    table = tables.failure_table(summary_of(*rows)).frame
    assert table.to_numpy().tolist() == [["E: got 12", "label of ours", "2", "2"]]
    assert tables.failure_table(summary_of(*rows[:3])) is None


# Reading


def test_folder_without_measurements_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"rows\.jsonl"):
        read(tmp_path)
    for rows, value in (([], "rows.jsonl"), ([row(version=2)], "2 in line 1"), ([{"version": 1}], "mode")):
        with pytest.raises(ValueError, match=value):
            read(write(tmp_path, rows))
    (tmp_path / "rows.jsonl").write_text("half of a ro\n" + json.dumps(row()) + "\n")
    with pytest.raises(ValueError, match=r"line 1 of .*'half of a ro'"):
        read(tmp_path)


def test_later_of_duplicate_rows_counts_and_incomplete_rows_are_skipped(tmp_path):
    write(tmp_path, [row(steps=5), row(prompt="set/2"), row(steps=10), row(prompt="set/3")])
    whole = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(whole[:-30].replace("\n", "\n\n", 1))
    found = read(tmp_path)
    assert list(found.rows["steps"]) == [10, 5]
    said = " ".join(warnings_of(found))
    assert "incomplete" in said
    assert "1 rows were measured again" in said


# Findings


def fastest(*rows):
    return findings_table(summary_of(*rows)).frame.to_dict("records")


def test_fastest_method_has_an_interval_and_a_lead():
    (found,) = fastest(*run_of({"slow": [2.0] * 20, "fast": [0.9, 1.1] * 10}))
    assert found["fastest"] == "label of fast"
    assert re.fullmatch(r"4\.00 \(3\.[89]\d to 4\.[01]\d\)", found["speedup"])
    assert re.fullmatch(r"2\.00 \(1\.9\d to 2\.0\d\) times label of slow", found["ahead of the next"])
    assert (found["prompts"], found["tokens"], found["MAT"]) == ("20", "200", "2.00")
    (lucky,) = fastest(*run_of({"steady": [1.0] * 20, "lucky": [0.1] + [1.04] * 19}))
    low, high = map(float, re.search(r"\((.*) to (.*)\) times", lucky["ahead of the next"]).groups())
    assert low < 1 < high, "a lead due to one prompt is not significant"
    assert fastest(*run_of({"fast": [1.0]}))[0]["speedup"] == "4.00", "one prompt gives no interval"


def test_every_mode_has_a_fastest_method_which_is_never_an_oracle():
    rows = run_of({"oracle:model=draft": [0.5, 0.5], "theirs": [1.0, 1.0]})
    rows += run_of({"ours": [1.0, 2.0]}, mode="replay", baseline="plain")
    assert [each["fastest"] for each in fastest(*rows)] == ["label of theirs", "label of ours"]
    table = tables.speedup_table(summary_of(*rows).main[0]).frame
    assert list(table["speedup"]) == ["8.00", "**4.00**", "1.00"]


def test_findings_name_slower_methods_and_different_outputs():
    slow = row("slow", total_seconds=[5.0], identical=False)
    rows = [row("generate", total_seconds=[4.0]), row("ours", identical=True), slow]
    slower, differing = findings_of(summary_of(*rows))
    assert slower.endswith("slower than label of generate: label of slow.")
    assert differing.startswith("1 of 2 ")
    assert findings_of(summary_of(*rows[:2]))[0].startswith("All 1 ")


NEAR = {"turn": 0, "place": 3, "margin": 0.00001, "expected": 1, "got": 2}
LATER, IN_16_BITS = {**ENVIRONMENT, "date": "2026-12-01"}, {**ENVIRONMENT, "dtype": "float16"}


@pytest.mark.parametrize(
    ("rows", "warning"),
    [
        ([row()], "no baseline"),
        ([row("generate"), row("generate", "set/2"), row()], "label of recycling (1)"),
        ([row("generate"), row(repeated_4grams=0.6)], "60% of the 4-grams"),
        ([row("generate"), row(max_new_tokens=64)], "max_new_tokens (128, 64)"),
        ([row("generate"), row(identical=False)], "margin above 0.001"),
        ([row("generate", total_seconds=[1.12]), row(tokens=103, steps=100, total_seconds=[10.3])], "(1.12, MAT 1.03)"),
        ([row("generate"), row(environment={**ENVIRONMENT, "threads": 8})], "threads: 2 or 8"),
        ([row("generate"), row(identical=False, divergence=NEAR, environment=LATER)], None),
        ([row("generate", environment=IN_16_BITS), row(identical=False, environment=IN_16_BITS)], None),
    ],
)
def test_warnings(rows, warning):
    found = warnings_of(summary_of(*rows))
    assert any(warning in line for line in found) if warning else found == []


# Files and the command


def test_first_table_has_the_papers_format():
    rows = [
        row("generate", "mt_bench/1", steps=10, total_seconds=[2.0], seconds=[1.0]),
        row("generate", "qa/1", steps=10, total_seconds=[2.0], seconds=[1.0]),
        row("ours", "mt_bench/1", total_seconds=[1.0], seconds=[0.4]),
        row("ours", "qa/1", total_seconds=[3.0], seconds=[0.4]),
    ]
    table = tables.speedup_table(only(rows)).frame
    assert [list(table), *table.to_numpy().tolist()] == [
        ["method", "MT", "QA", "speedup", "95% CI", "MAT", "tokens/s"],
        ["label of generate", "1.00", "**1.00**", "**1.00**", "-", "1.00", "9.0"],
        ["label of ours", "**2.00**", "0.67", "**1.00**", "0.67 to 2.00", "**2.00**", "**22.5**"],
    ]


def test_page_is_escaped_complete_and_deterministic(tmp_path):
    """So an interrupted and resumed run ends with the same report."""
    rows = whole_run("generate", "recycling", "suffix")
    rows.append(failed("suffix", "qa/999", f"RuntimeError: {HOSTILE}", category="qa"))
    for each in rows:
        if each["method"] == "suffix":
            each["label"] = HOSTILE
    first, again = (report.write(write(tmp_path / name, rows))[1] for name in ("first", "again"))
    for one, other in zip(first, again, strict=True):
        assert one.read_bytes() == other.read_bytes()
    folder = tmp_path / "first"
    text = (folder / "report.md").read_text(encoding="utf-8")
    named = re.findall(r"!\[.*?\]\((plots/.*?)\)", text)
    assert sorted(named) == sorted(f"plots/{file.name}" for file in (folder / "plots").iterdir()) != []
    assert "label of recycling" in text
    assert escaped(HOSTILE) in text
    assert "\n" not in escaped(HOSTILE), "a cell is one line"
    assert "<script>" not in text.replace("\\<", "")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert all(re.sub(r"\\.", "", line).count("|") == line.replace("\\|", "").count("|") for line in lines)


def test_json_output_has_every_figure_and_writes_nothing(tmp_path):
    write(tmp_path, [row("generate", total_seconds=[4.0]), row("plain", total_seconds=[3.0]), row("ours", "set/1")])
    (comparison,) = run_json("report", tmp_path)["comparisons"]
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]
    ours = comparison["results"][2]
    assert (ours["method"], ours["speedup"], ours["mat"], ours["median"]) == ("ours", 2.0, 2.0, 2.0)
    (category,) = ours["categories"]
    assert (category["category"], category["decoding"], category["whole_call"]) == ("set", 9.0, 5.0)
    for options, speedup in ((("--baseline", "plain"), 1.5), (("--clock", "processor"), 1.0)):
        (comparison,) = run_json("report", tmp_path, *options)["comparisons"]
        assert comparison["results"][2]["speedup"] == speedup


def test_command_errors_are_one_line(tmp_path):
    assert_refused(run("report", tmp_path), "rows.jsonl")
    write(tmp_path, [row()])
    assert_refused(run("report", tmp_path, "--baseline", "generate"), "recycling", "'generate'")


def test_command_names_the_extra_of_a_missing_module(tmp_path, monkeypatch):
    write(tmp_path, [row("generate"), row()])
    monkeypatch.setitem(sys.modules, "tabulate", None)
    assert_refused(run("report", tmp_path), "tabulate; pip install 'token-recycling[bench]'")


def test_report_command_does_not_import_torch(tmp_path):
    write(tmp_path, [row("generate"), row()])
    code = f"""
import sys
from token_recycling.cli.app import app
try:
    app(["report", {str(tmp_path)!r}])
finally:
    print(sorted({{"torch", "transformers"}} & set(sys.modules)))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    report, said = found.stdout.rsplit("\n", 2)[:2]
    assert (report.rstrip(), said) == ((tmp_path / "report.md").read_text(encoding="utf-8").rstrip(), "[]")


@pytest.mark.parametrize("sign", "\\`*_<[|")
def test_signs_of_markdown_are_escaped(sign):
    assert escaped(f"one{sign}two\nthree") == f"one\\{sign}two three"
