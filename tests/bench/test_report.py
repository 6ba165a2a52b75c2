"""The report: what is compared with what, what is read, and what is said about it, from rows alone."""

import json

import pytest
from support.measured import ENVIRONMENT, failed, only, row, summary_of, write

from token_recycling.bench.report import findings, tables, words
from token_recycling.bench.report.summary import read, summarize

# what is compared with what


def speedups(found):
    return found.figures["speedup"].dropna().to_dict()


def compare(rows, baseline=None):
    return summarize(rows, baseline).comparisons


def test_the_baseline_is_generate_or_else_plain_decoding_or_the_one_asked_for():
    rows = [row("ours"), row("plain", total_seconds=[4.0]), row("generate", total_seconds=[6.0])]
    found = only(rows)
    assert list(speedups(found).items()) == [("generate", 1), ("ours", 3), ("plain", 1.5)]
    assert found.baseline == "generate"
    assert speedups(only(rows[:2])) == {"plain": 1, "ours": 2}
    assert speedups(only(rows, "ours"))["plain"] == 0.5
    assert only(rows[:1]).baseline is None
    assert speedups(only(rows[:1])) == {}
    with pytest.raises(ValueError, match=r"one of ours, plain, generate; got 'nothing'"):
        compare(rows, "nothing")


def test_only_rows_under_the_same_conditions_are_compared():
    rows = [row("generate", total_seconds=[4.0]), row()]
    rows += [row(mode="replay"), row("plain", mode="replay", total_seconds=[8.0])]
    rows += [row(mode="batch", batch=2), row("generate", mode="batch", batch=2, total_seconds=[1.0])]
    rows += [row(study="k", point="4")]
    found = {(c.mode, c.study, c.batch): speedups(c).get("recycling") for c in compare(rows)}
    assert found == {
        ("generate", None, 1): 2.0,
        ("replay", None, 1): 4.0,
        ("batch", None, 2): 0.5,
        ("generate", "k", 1): None,
    }


def test_a_study_measures_its_baseline_at_every_point_or_once():
    once = row("generate", study="k", point=None, total_seconds=[6.0])
    there = row("generate", study="k", point="4", total_seconds=[4.0])
    rows = [once, there, row(study="k", point="4"), row(study="k", point="8")]
    found = {each.point: speedups(each) for each in compare(rows)}
    assert found == {None: {"generate": 1.0}, "4": {"generate": 1.0, "recycling": 2.0}, "8": {"recycling": 3.0}}


def test_failures_are_counted_and_change_nothing_else():
    rows = [row("generate", "a/1"), row("generate", "a/2"), row("ours", "a/1"), failed("ours", "a/2")]
    ours = only(rows).figures.loc["ours"]
    assert (ours["prompts"], ours["failures"], ours["speedup"], ours["mat"]) == (1, 1, 1.0, 2.0)
    assert "1 run failed." in findings.findings(summary_of(*rows))
    table = tables.failure_table(summary_of(*rows))
    assert [cell.text for cell in table.rows[0]] == ["RuntimeError: out of memory", "label of ours", "1", "1"]
    assert tables.failure_table(summary_of(*rows[:3])) is None


def test_failures_alike_but_for_numbers_stand_in_one_line():
    rows = [
        failed("a", "x/1", "E: got 12"),
        failed("b", "x/1", "E: got 7"),
        failed("b", "x/2", "F"),
        failed("b", "x/3", "E: got 3"),
    ]
    found = tables.failure_table(summary_of(*rows)).rows
    assert [[cell.text for cell in line] for line in found] == [
        ["E: got 12", "label of a, label of b", "2", "3"],
        ["F", "label of b", "1", "1"],
    ]


def test_categories_stand_in_the_order_of_the_paper_and_others_follow():
    rows = [row(prompt=f"{name}/1") for name in ("letters", "rag", "mbpp", "mt_bench", "poems")]
    assert only(rows).categories == ["mt_bench", "rag", "mbpp", "letters", "poems"]
    assert only(rows).by_category.loc["rag", "recycling"]["prompts"] == 1


def test_methods_keep_their_order_whatever_order_they_ran_in():
    rows = [row("b", "x/1"), row("generate", "x/1"), row("a", "x/1"), row("a", "x/2"), row("b", "x/2")]
    assert list(summary_of(*rows).methods) == ["generate", "b", "a"]
    assert list(only(rows).labels) == ["generate", "b", "a"]


def test_the_clock_can_be_processor_time_and_the_heading_says_so():
    rows = [row("generate", processor_seconds=[6.0]), row()]
    assert speedups(summarize(rows).comparisons[0])["recycling"] == 1.0
    found = summarize(rows, clock="processor")
    assert speedups(found.comparisons[0])["recycling"] == 4.0
    assert words.title(found) == "Decoding methods on models/target, by processor time"
    assert dict(words.settings(found))["time"] == "by processor time"
    del rows[1]["processor_seconds"]
    with pytest.raises(ValueError, match="expected the key processor_seconds in all rows"):
        summarize(rows, clock="processor")
    assert speedups(summarize(rows).comparisons[0])["recycling"] == 1.0


# reading


def test_reading_refuses_what_is_not_a_folder_of_measurements(tmp_path):
    with pytest.raises(ValueError, match=r"expected a folder with rows\.jsonl"):
        read(tmp_path)
    write(tmp_path, [])
    with pytest.raises(ValueError, match="got none"):
        read(tmp_path)
    write(tmp_path, [row(version=2)])
    with pytest.raises(ValueError, match="version 1, got 2 in line 1"):
        read(tmp_path)
    write(tmp_path, [{"version": 1}])
    with pytest.raises(ValueError, match="expected the keys mode"):
        read(tmp_path)
    (tmp_path / "rows.jsonl").write_text("half of a ro\n" + json.dumps(row()) + "\n")
    with pytest.raises(ValueError, match=r"line 1 of .*'half of a ro'"):
        read(tmp_path)


def test_an_interrupted_last_line_is_left_out_with_a_warning(tmp_path):
    write(tmp_path, [row(prompt="a/1"), row(prompt="a/2")])
    whole = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(whole[:-30])
    found = read(tmp_path)
    assert list(found.rows["prompt"]) == ["a/1"]
    assert "incomplete" in findings.warnings(found)[0]


def test_of_rows_measured_twice_the_later_counts(tmp_path):
    found = read(write(tmp_path, [row(steps=5), row(prompt="set/2"), row(steps=10)]))
    assert list(found.rows["steps"]) == [10, 5]
    assert "1 rows were measured again" in findings.warnings(found)[0]
    batches = [row(mode="batch", batch=4, steps=5), row(mode="batch", batch=4, steps=10)]
    found = read(write(tmp_path, batches))
    assert (list(found.rows["steps"]), found.notes) == ([10], [])


# words


def test_findings_name_the_fastest_the_slower_and_what_differs():
    rows = [
        row("generate", total_seconds=[4.0]),
        row("ours", loop_tokens=5, loop_steps=1, identical=True),
        row("slow", total_seconds=[5.0], identical=False),
    ]
    assert findings.findings(summary_of(*rows)) == [
        "Generated text: label of ours: 2.00 times as fast as label of generate. 1 prompt, 10 tokens; 2.00 tokens a "
        "step, 1.25 outside loops. One prompt: how much it varies is not known.",
        "Generated text, slower than label of generate: label of slow.",
        "1 of 2 outputs that were compared differ from plain decoding's.",
    ]
    assert findings.findings(summary_of(*rows[:2]))[1] == (
        "All 1 outputs that were compared are identical to plain decoding's."
    )


def test_findings_say_it_where_nothing_is_faster():
    rows = [row("generate", total_seconds=[1.0]), row("ours"), row("slow", total_seconds=[4.0])]
    (found,) = findings.findings(summary_of(*rows))
    assert found.startswith(
        "Generated text: Nothing is faster than label of generate: next is label of ours, 0.50 times as fast."
    )


def test_findings_of_a_study_say_where_it_is_fastest_and_where_most_is_accepted():
    rows = [
        row("ours", study="k", point=k, steps=n, seconds=[t]) for k, n, t in (("2", 5, 1), ("4", 2, 2), ("8", 4, 9))
    ]
    assert findings.findings(summary_of(*rows)) == [
        "Candidates kept, generated text: label of ours is fastest at 2 (10.0 tokens/s), "
        "and most is accepted at 4 (MAT 5.00)."
    ]


def test_rows_of_different_environments_are_warned_of():
    there = {**ENVIRONMENT, "cpu": "Another", "threads": 8, "date": "2026-12-01T00:00:00"}
    rows = [row("generate"), row(environment=there)]
    found = findings.warnings(summary_of(*rows))
    assert found[0].startswith(
        "Rows come from 2 environments (cpu: Some Processor @ 2.0 GHz or Another; threads: 2 or 8)"
    )
    only_later = {**ENVIRONMENT, "date": "2026-12-01T00:00:00"}
    assert not any(
        "environments" in line for line in findings.warnings(summary_of(row("generate"), row(environment=only_later)))
    )


@pytest.mark.parametrize(
    ("rows", "warning"),
    [
        ([row()], "no baseline was measured"),
        (
            [row("generate"), row("generate", "set/2"), row()],
            "not every method has all 2 prompts yet: label of recycling (1)",
        ),
        ([row("generate"), row(repeated_4grams=0.6)], "60% of the 4-grams"),
        ([row("generate"), row(max_new_tokens=64)], "rows differ in max_new_tokens (128, 64)"),
        ([row("generate"), row()], "No replay was measured"),
        (
            [row("generate"), row(identical=False)],
            "(margin above 0.001): label of recycling; most on set/1.",
        ),
        (
            [row("generate", total_seconds=[1.12]), row(tokens=103, steps=100, total_seconds=[10.3])],
            "time and tokens a step disagree: label of recycling (1.12 times as fast, 1.03 tokens a step)",
        ),
    ],
)
def test_warnings(rows, warning):
    assert any(warning in line for line in findings.warnings(summary_of(*rows)))


def test_nothing_is_warned_of_without_reason():
    near = {"turn": 0, "place": 3, "margin": 0.00001, "expected": 1, "got": 2}
    rows = [row("generate"), row(identical=False, divergence=near)]
    rows += [row("plain", mode="replay"), row(mode="replay"), row(study="k", point="4")]
    assert findings.warnings(summary_of(*rows)) == []


def test_environment_and_settings_in_words():
    said = dict(words.environment(ENVIRONMENT))
    assert said == {
        "model": "models/target, 8.4 million parameters, float32, 0123456789abcdef",
        "machine": "Some Processor @ 2.0 GHz, cores 2, threads 2, accelerator none",
        "software": "python 3.11.9, torch 2.13.0, transformers 5.23.0, token-recycling 0.1.0, commit abc1234",
    }
    rows = [row(prompt="a/1", total_seconds=[1.0, 1.1, 1.0]), row(prompt="b/1", total_seconds=[1.0, 1.0, 1.0])]
    rows[1]["environment"] = {**ENVIRONMENT, "date": "2026-11-22T00:00:00"}
    assert dict(words.settings(summary_of(*rows))) == {
        "date": "2026-11-21 to 2026-11-22",
        "prompts": "1 of a, 1 of b",
        "decoding": "greedy",
        "most new tokens": "128",
        "time": "by elapsed time",
        "repeats": "3",
        "spread of repeats": "5.0% of the median, slowest less fastest",
    }


def test_the_prompts_of_batches_are_counted_one_by_one():
    names = {"set/1": 1, "set/1+set/2+other/1+other/2": 4, "a+b/1": 1}
    rows = [row(prompt=name, mode="batch", batch=size) for name, size in names.items()]
    assert dict(words.settings(summary_of(*rows)))["prompts"] == "2 of set, 2 of other, 1 of a+b"


def test_what_the_report_does_not_know_is_shown_under_its_own_name():
    assert words.heading("short_stories") == "short stories"
    assert words.study_words("length_of_text").title == "Length of text"
    assert words.mode_title("speech") == "Speech"
