"""Tables and plot of speedups by job, from rows alone."""

import pytest
from support.measured import row, write

from scripts.job_tables import DIFFERS, job_plot, job_table, jobs_of, main, method_table, share_table
from token_recycling.bench.summary import summarize


def only_jobs(rows):
    """Return the jobs of the first comparison."""
    return jobs_of(summarize(rows))[0]


def test_jobs_with_unexplained_differences_have_no_speedup():
    rows = [
        {**row(method, f"{job}/{n}", category=job, identical=margin is None, **far), "run": run}
        for run in ("float32", "bfloat16")
        for job in ("chat", "tools")
        for n in range(3)
        for method, margin in (("generate", None), ("suffix", 15.0 if job == "tools" else 0.1))
        for far in ({"divergence": {"margin": margin}} if margin else {},)
    ]
    table = job_table(only_jobs(rows)).frame.set_index("job").drop(columns="prompts")
    assert set(table.loc["tools"]) == {DIFFERS}
    assert all(float(cell) > 0 for cell in table.loc["chat"])
    assert set(table.loc["all, with 95% CI"]) == {"-"}
    assert set(table.loc["identical outputs"]) == {"0 of 6"}


def test_gain_of_a_job_is_split_and_looping_prompts_are_excluded():
    """Of 4 seconds the loop saves 2 and drafts another 1; the third prompt loops, where drafts save 3.9."""
    seconds = {"generate": 4.0, "plain": 2.0, "cold:recycling": 1.5, "recycling": 1.0, "suffix": 1.6}
    rows = [
        row(method, f"{job}/{n}", category=job, total_seconds=[0.1 if n == 2 and method == "recycling" else taken])
        | {"nodes": {"9": 5} if method in ("cold:recycling", "recycling", "suffix") else None}
        | {"loop_tokens": 5 if n == 2 and job == "chat" else 0}
        for job in ("chat", "tools")
        for n in range(3 if job == "chat" else 2)
        for method, taken in seconds.items()
    ]
    jobs = only_jobs(rows)
    table = job_table(jobs).frame.set_index("job")
    assert table.loc["chat", "prompts"] == "2 of 3"
    assert table.loc["all, with 95% CI", "prompts"] == "4"
    assert list(table.loc["chat"])[1:] == ["2.00", "2.67", "4.00", "2.50"]
    shares = share_table(jobs).frame.set_index("job")
    assert list(shares.loc["chat"]) == ["2.00", "1.33", "2.00"]
    assert list(shares) == ["label of plain", "drafts of label of cold:recycling", "drafts of label of recycling, warm"]
    forced = [one | {"method": f"forced:{one['method']}"} for one in rows if one["method"] in ("plain", "recycling")]
    heads = ["label of plain", "label of plain", "drafts of label of cold:recycling", "drafts of label of recycling"]
    assert list(share_table(only_jobs(rows + forced)).frame)[1:] == heads, "the forced method takes precedence"
    picture = job_plot(summarize(rows))
    (axes,) = picture.drawing.axes
    assert [round(bar.get_width(), 2) for bar in axes.patches] == [2.0, 2.0] * 2


def test_methods_are_compared_on_jobs_without_wrong_outputs():
    """The generated table of the README, fastest first. The second run compares methods forced to generate's tokens."""
    seconds = {"generate": 4.0, "suffix": 2.0, "recycling": 1.0, "lookahead": 8.0}
    rows = [
        row(
            method,
            f"{job}/{n}",
            category=job,
            total_seconds=[taken * (2 if job == "code" and method == "suffix" else 1)],
            identical=None if method == "generate" else not wrong,
        )
        | {"run": "float32", "loop_tokens": 5 if job == "code" and n == 3 else 0}
        | ({"divergence": {"margin": 15.0}} if wrong else {})
        for job in ("chat", "code", "tools")
        for n in range(4)
        for method, taken in seconds.items()
        for wrong in (method == "lookahead" and job == "tools",)
    ]
    rows += [
        row(method, f"{job}/{n}", category=job, total_seconds=[taken]) | {"run": "bfloat16"}
        for job in ("chat", "code")
        for n in range(3)
        for method, taken in (("generate", 4.0), ("recycling", 0.5), ("forced:recycling", 2.0))
    ]
    runs = {jobs.comparison.run: jobs for jobs in jobs_of(summarize(rows))}
    runs = {"float32": runs["float32"], "bfloat16": runs["bfloat16"]}
    table = method_table(runs)
    assert list(table.frame) == ["method", "float32, 95% CI", "slowest job", "fastest job", "bfloat16"]
    assert table.note.endswith(" prompts; tools are left out, since one method's outputs are wrong there.")
    assert table.frame["float32, 95% CI"].tolist()[::2] == ["4.00 (4.00 to 4.00)", "0.50 (0.50 to 0.50)"]
    table.frame["float32, 95% CI"] = table.frame["float32, 95% CI"].str.partition(" ")[0]
    assert table.frame.to_numpy().tolist() == [
        ["label of recycling", "4.00", "4.00 (chat)", "4.00 (chat)", "2.00"],
        ["label of suffix", "1.40", "1.00 (code)", "2.00 (chat)", "-"],
        ["label of lookahead", "0.50", "0.50 (chat)", "0.50 (chat)", "-"],
    ]
    named = method_table(runs, {"recycling": "**ours**", "unmeasured": "another"})
    assert named.frame["method"].tolist() == ["**ours**"]
    without = method_table(runs, without=["code"])
    assert ', without "code"; tools are left out, since' in without.note
    assert "code" not in str(without.frame)
    assert method_table({}) is None


def test_tables_and_plot_are_written_next_to_the_rows(tmp_path):
    rows = [
        row(method, f"{job}/1", category=job, total_seconds=[taken]) | {"nodes": {"9": 5} if taken == 1 else None}
        for job in ("chat", "tools")
        for method, taken in (("generate", 4.0), ("plain", 2.0), ("recycling", 1.0))
    ]
    main(write(tmp_path, rows))
    assert "| chat |" in (tmp_path / "jobs.md").read_text(encoding="utf-8")
    assert "<svg" in (tmp_path / "jobs.svg").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="several jobs"):
        main(write(tmp_path, rows[:3]))


def test_method_with_wrong_outputs_has_no_tick():
    rows = [
        row(
            method, f"{job}/1", category=job, total_seconds=[taken], identical=None if method == "generate" else not far
        )
        | {"nodes": {"9": 5} if taken == 1 else None}
        | ({"divergence": {"margin": 15.0}} if far else {})
        for job in ("chat", "tools")
        for method, taken in (("generate", 4.0), ("plain", 2.0), ("recycling", 1.0), ("suffix", 3.0))
        for far in (method == "suffix" and job == "tools",)
    ]
    (axes,) = job_plot(summarize(rows)).drawing.axes
    ticks = [line for line in axes.lines if line.get_marker() == "|"]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in ticks] == [(pytest.approx(4 / 3), 0)]
