"""The answers of a report: the fastest method, how sure that is, and what is asked of it."""

import re

import numpy as np
import pytest
from support.measured import only, row, summary_of, whole_run, write

from token_recycling.bench.report import arithmetic, tables
from token_recycling.bench.report import write as report
from token_recycling.bench.report.findings import answers


def run(seconds, mode="generate", baseline="generate"):
    """Rows of 10 tokens: the whole call's seconds of each method by prompt; the baseline takes 4 for each."""
    prompts = len(next(iter(seconds.values())))
    rows = [row(baseline, f"set/{number}", mode=mode, total_seconds=[4.0]) for number in range(prompts)]
    return rows + [
        row(method, f"set/{number}", mode=mode, total_seconds=[one])
        for method, every in seconds.items()
        for number, one in enumerate(every)
    ]


def test_the_answer_says_which_by_how_much_on_what_and_how_sure():
    (found,) = answers(summary_of(*run({"slow": [2.0] * 20, "fast": [0.9, 1.1] * 10})))
    assert found.place == "Generated text"
    assert found.who == "label of fast"
    assert found.much == "4.00 times as fast as label of generate"
    assert found.on == "20 prompts, 200 tokens; 2.00 tokens a step"
    assert re.fullmatch(
        r"With prompts drawn anew: 3\.\d\d to 4\.\d\d in 95 draws of 100; surely ahead of label of slow \(2\.00\): "
        r"in 100% of them\.",
        found.sure,
    )


def test_a_lead_that_hangs_on_few_prompts_is_not_sure():
    (found,) = answers(summary_of(*run({"steady": [1.0] * 20, "lucky": [0.1] + [1.04] * 19})))
    assert found.who == "label of lucky"
    assert "; not surely ahead of label of steady (4.00): in 6" in found.sure


@pytest.mark.parametrize("prompts", [2, 19])
def test_few_prompts_say_nothing_of_who_is_ahead(prompts):
    (found,) = answers(summary_of(*run({"slow": [2.0] * prompts, "fast": [1.0] * prompts})))
    assert "surely" not in found.sure
    assert found.sure.endswith(f"; {prompts} prompts cannot say whether it is ahead of label of slow (2.00).")


@pytest.mark.parametrize(("prompts", "said"), [(2, "; 2 prompts cannot say how much it varies."), (20, " of 100.")])
def test_few_prompts_of_one_method_say_little(prompts, said):
    (found,) = answers(summary_of(*run({"fast": [0.9, 1.1] * (prompts // 2)})))
    assert found.sure.endswith(said)


def test_of_one_prompt_nothing_is_known():
    (found,) = answers(summary_of(*run({"fast": [1.0]})))
    assert found.sure == "One prompt: how much it varies is not known."


def test_where_nothing_is_faster_the_answer_says_so():
    (found,) = answers(summary_of(*run({"slow": [8.0, 8.0], "slower": [16.0, 16.0]})))
    assert found.who == "Nothing is faster than label of generate"
    assert found.much == "next is label of slow, 0.50 times as fast"


def test_an_oracle_is_shown_but_never_the_fastest():
    rows = run({"oracle:model=draft": [0.5, 0.5], "fast": [1.0, 1.0]})
    assert list(only(rows).speedups.index) == ["fast"]
    assert answers(summary_of(*rows))[0].who == "label of fast"
    table = tables.speedup_table(only(rows))
    assert [(line[0].text, line[1].text, line[1].best) for line in table.rows] == [
        ("label of oracle:model=draft", "8.00", False),
        ("label of fast", "4.00", True),
        ("label of generate", "1.00", False),
    ]
    assert "an oracle is a bound" in table.note


def test_every_kind_of_text_has_its_answer():
    rows = run({"ours": [2.0, 2.0], "theirs": [1.0, 1.0]})
    rows += run({"ours": [1.0, 2.0]}, mode="replay", baseline="plain")
    assert [(each.place, each.who) for each in answers(summary_of(*rows))] == [
        ("Generated text", "label of theirs"),
        ("Replayed text", "label of ours"),
    ]


def test_without_a_baseline_there_is_no_answer():
    assert answers(summary_of(row("ours"))) == []


def test_draws_are_the_same_for_methods_with_equal_prompts():
    found = only(run({"a": [1.0, 3.0, 2.0], "b": [2.0, 6.0, 4.0]}))
    a, b = (arithmetic.resampled(found.pairs_of(method)) for method in "ab")
    assert np.allclose(a, 2 * b)
    assert len(set(a.round(6))) > 5
    assert arithmetic.interval(found.pairs_of("a")) == pytest.approx(np.quantile(a, (0.025, 0.975)))


def test_the_page_answers_first_and_folds_the_rest(tmp_path):
    wanted = ("generate", "plain", "suffix")
    report.write(write(tmp_path, [each for each in whole_run(prompts=2, tokens=40) if each["method"] in wanted]))
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    first, *folded = re.split(r"<details", text)
    assert first.count('class="answer"') == 2
    titles = [re.search(r"<summary>(.*?)</summary>", part)[1] for part in folded]
    assert titles[:2] == ["Generated text", "Replayed text"]
    assert titles[-1] == "How it was measured"
    assert [part.startswith(" open") for part in folded] == [True] + [False] * (len(folded) - 1)
