"""Speedup by job: generate the tables of docs/benchmarks.md, and the README's picture and table, from measured rows.

    python -m scripts.job_tables            updates them from docs/results/quick; a test fails if they are stale
    python -m scripts.job_tables FOLDER     writes jobs.md and jobs.svg into a folder of measurements

`make bench-quick` measures the rows.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.patches import Patch

from token_recycling.bench.data import BASELINES, COLD, FORCED, REPLAY_BASELINE
from token_recycling.bench.plots import Plot, canvas, legend, styled
from token_recycling.bench.summary import (
    TERMS,
    Comparison,
    Summary,
    finished,
    heading,
    interval_of,
    overall_speedup,
    read,
    speedup_of,
)
from token_recycling.bench.tables import NONE, Table, clock_words, counted, escaped, with_interval

ROOT = Path(__file__).parent.parent
README, PAGE, PICTURE = ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "jobs.svg"
ROWS = ROOT / "docs" / "results" / "quick"
AGAIN = "same prompt again"
"""A job excluded from the table of methods: a drafter that has learned the output need not draft well."""
NAMES = {
    "recycling": "**`recycling`, the default**",
    "cold:recycling": "`recycling`, drafter cold",
    "suffix": "suffix decoding",
    "prompt_lookup_hf:n=10": "prompt lookup of transformers",
    "published:tree=static:8": "Token Recycling as published, 8 nodes",
    "cold:lookahead:window=1,guesses=2,pool_from_prompt=true": "Lookahead, sized for a CPU",
    "assistant:model=models/draft": "draft model of 1M parameters",
    "plain": "this loop without drafts",
}
"""Methods of the README's table, if measured, with their names in the table."""
DIFFERS = "differs"
"""Replaces the speedup if outputs differ from the baseline's, as when a method violates the grammar."""
FAR = 1.0
"""Logit margin that rounding cannot explain in any dtype: the output is wrong."""
LOOPS = 0.25
"""Share of loops in a baseline's output from which the prompt is excluded: loops favor methods that copy."""
FEWEST = 3
"""Minimum number of prompts for a confidence interval."""
LIGHT, DARK = "#a9c1f0", "#2f5fc4"


class Jobs:
    """The jobs of a comparison (its categories), and the speedups of its methods in each."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison, self.labels = comparison, comparison.labels
        self.names = comparison.categories

    @cached_property
    def looping_prompts(self) -> set[str]:
        """Prompts whose baseline output consists of loops to `LOOPS` or more."""
        rows = finished(self.comparison.rows)
        rows = rows[rows["method"] == self.comparison.baseline]
        return set(rows.loc[rows["loop_tokens"] >= LOOPS * rows["tokens"], "prompt"])

    @cached_property
    def pairs(self) -> pd.DataFrame:
        """Rows of the prompts whose baseline does not loop; only these rows count."""
        pairs = self.comparison.pairs
        return pairs[~pairs["prompt"].isin(self.looping_prompts)]

    @cached_property
    def speedups(self) -> pd.DataFrame:
        """Speedups with one row per job and one column per method; NaN if there is none."""
        speedups = speedup_of(self.pairs.groupby(["category", "method"])[TERMS].sum()).unstack("method")
        return speedups.reindex(index=self.names, columns=list(self.labels))

    @cached_property
    def overall(self) -> pd.Series:
        """Speedups over all jobs, by method."""
        return speedup_of(self.pairs.groupby("method")[TERMS].sum()).reindex(list(self.labels))

    @cached_property
    def wrong(self) -> set[tuple[str, str]]:
        """Pairs of method and job with an output that rounding cannot explain."""
        rows = self.comparison.rows
        return set(rows.loc[rows["margin"] > FAR, ["method", "category"]].itertuples(index=False, name=None))

    @cached_property
    def last_turns(self) -> pd.DataFrame:
        """Speedups of the time to first token in the last turn of conversations, in the form of `speedups`."""
        rows = finished(self.comparison.rows)
        rows = rows[rows["turns"].fillna(1).astype(int) > 1]
        seconds = rows.groupby(["category", "method"])["last_first_token_seconds"].sum().unstack("method")
        seconds = seconds.reindex(index=self.names, columns=list(self.labels))
        return 1 / seconds.div(seconds[self.comparison.baseline], axis=0)

    def pairs_of(self, method: str, jobs: Collection[str] | None = None) -> pd.DataFrame:
        """Return the rows of a method that count, of all jobs or of some."""
        pairs = self.pairs[self.pairs["method"] == method]
        return pairs if jobs is None else pairs[pairs["category"].isin(jobs)]

    def is_drafted(self, method: str) -> bool:
        """Return whether the method drafted in our loop."""
        rows = self.comparison.rows
        return bool(rows.loc[rows["method"] == method, "nodes"].astype(bool).any())

    def head(self, method: str) -> str:
        """Return the heading of a method's column; a method that was also measured cold is labeled warm."""
        label = self.labels[method].removeprefix("transformers ").replace("plain decoding in this loop", "no drafts")
        return f"{label}, warm" if f"{COLD}{method}" in self.labels else label


def jobs_of(summary: Summary) -> list[Jobs]:
    """Return the jobs of each comparison of generated outputs that has speedups of several jobs."""
    return [
        Jobs(comparison)
        for comparison in summary.main
        if comparison.mode == "generate" and comparison.baseline and len(comparison.categories) > 1
    ]


# Tables


def _figure(value: float) -> str:
    return NONE if pd.isna(value) else f"{value:.2f}"


def job_table(jobs: Jobs) -> Table:
    """Return the end-to-end speedup of every method over the baseline, by job."""
    comparison = jobs.comparison
    methods = [method for method in jobs.labels if method != comparison.baseline]
    prompts = comparison.rows.drop_duplicates("prompt")
    lines = []
    for job in jobs.names:
        of_job = prompts.loc[prompts["category"] == job, "prompt"]
        counting = len(of_job) - int(of_job.isin(jobs.looping_prompts).sum())
        number = str(len(of_job)) if counting == len(of_job) else f"{counting} of {len(of_job)}"
        cells = [
            DIFFERS if (method, job) in jobs.wrong else _figure(jobs.speedups.at[job, method]) for method in methods
        ]
        lines.append([escaped(heading(job)), number, *cells])
        if (ratios := jobs.last_turns.loc[job, methods]).notna().any():
            lines.append([f"{escaped(heading(job))}: time to first token, last turn", "", *map(_figure, ratios)])
    every = str(len(prompts) - len(jobs.looping_prompts))
    lines.append(["all, with 95% CI", every, *(_overall(jobs, method) for method in methods)])
    lines.append(["identical outputs", "", *(_identical(comparison, method) for method in methods)])
    return Table("Speedup by job", pd.DataFrame(lines, columns=["job", "prompts", *map(jobs.head, methods)]))


def _overall(jobs: Jobs, method: str) -> str:
    """Return the speedup over all prompts, with its confidence interval, or `NONE` if some outputs are wrong."""
    pairs = jobs.pairs_of(method)
    return NONE if pairs.empty or any(wrong == method for wrong, _ in jobs.wrong) else _with_interval(pairs)


def _with_interval(pairs: pd.DataFrame) -> str:
    """Return the speedup over some rows, with its confidence interval unless there are too few rows."""
    speedup = overall_speedup(pairs)
    return f"{speedup:.2f}" if len(pairs) < FEWEST else with_interval(speedup, interval_of(pairs))


def _identical(comparison: Comparison, method: str) -> str:
    figures = comparison.figures.loc[method]
    return f"{figures['identical']:.0f} of {figures['compared']:.0f}" if figures["compared"] else NONE


def share_table(jobs: Jobs) -> Table | None:
    """Return, by job, the speedup of the loop without drafts over the baseline, and of drafts over this loop. A method
    that was also measured forced counts only forced. None if plain decoding or drafts were not measured.
    """
    plain = [method for method in jobs.labels if method.removeprefix(FORCED) == REPLAY_BASELINE]
    drafted = [
        method
        for method in jobs.labels
        if method.removeprefix(FORCED).removeprefix(COLD).partition(":")[0] == "recycling"
        and jobs.is_drafted(method)
        and f"{FORCED}{method}" not in jobs.labels
    ]
    if not plain or not drafted:
        return None
    speedups = pd.concat([jobs.speedups, jobs.overall.to_frame("all").T])
    columns = [speedups[method] for method in plain]
    for method in drafted:
        base = FORCED * method.startswith(FORCED) + REPLAY_BASELINE
        columns.append(speedups[method] / speedups[base if base in plain else plain[0]])
    cells = pd.concat(columns, axis=1, keys=range(len(columns))).map(_figure)
    cells.insert(0, "job", [escaped(heading(job)) for job in jobs.names] + ["all"])
    heads = [jobs.head(method) for method in plain] + [f"drafts of {jobs.head(method)}" for method in drafted]
    note = "The loop without drafts / `generate`; with drafts / without. Their product is the speedup."
    return Table("Share of each part", cells.set_axis(["job", *heads], axis=1), note)


def job_caption(jobs: Jobs, clock: str = "wall") -> str:
    """Return the conditions of the tables."""
    return (
        f"Speedup over transformers' `generate`, end to end, prefill included, {clock_words(clock)}. "
        f"{conditions(jobs.comparison)}. Cold: a new drafter for every prompt. Warm: the drafter has learned from "
        "all earlier prompts. Forced: the method decodes the tokens of `generate`, so that both have the "
        f"same output in 16 bits. Prompts whose `generate` output is a loop to {LOOPS:.0%} or more are left out of the "
        'speedups ("3 of 4 prompts"). No drafts: what the loop and prepacked weights contribute. '
        f'"{DIFFERS.capitalize()}": the output is wrong by more than floating-point error.'
    )


def conditions(comparison: Comparison) -> str:
    """Return model, machine, releases, commit, and the decoding settings."""
    rows = comparison.rows
    where = rows["environment"].iloc[-1]
    facts = {name: escaped(str(where.get(name, "unknown"))) for name in ("cpu", "torch", "transformers", "commit")}
    model = escaped(Path(str(where.get("model", "unknown"))).name)
    threads = counted(int(where.get("threads", 1)), "thread")
    limit, prompts = rows["max_new_tokens"].iloc[-1], rows["prompt"].nunique()
    return (
        f"{model} on {facts['cpu']}, {threads}, torch {facts['torch']}, transformers {facts['transformers']}, commit "
        f"{facts['commit']}, {str(where.get('date', ''))[:10]}; {prompts} prompts, batch size 1, greedy, at most "
        f"{limit} new tokens per turn"
    )


def method_table(
    runs: Mapping[str, Jobs], names: Mapping[str, str] | None = None, without: Collection[str] = ()
) -> Table | None:
    """Return a row for each method of the first run, fastest first: its speedup over all prompts, in its slowest and in
    its fastest job, and its speedup in the other runs. None without runs.

    `runs` maps column headings to jobs. `names` maps methods to names; other methods are omitted. All cells cover the
    same prompts: the note lists the excluded jobs, which are those in `without` and those with a wrong output of any
    method. In other runs the figure is that of the forced method, if it was measured.
    """
    if not runs:
        return None
    first, *others = runs.values()
    wrong = {job for run in runs.values() for _, job in run.wrong}
    counting = [job for job in first.names if job not in wrong and job not in without]
    head, *heads = runs
    lines, prompts = [], 0
    for method in first.labels if names is None else names:
        pairs = first.pairs_of(method, counting)
        if method == first.comparison.baseline or pairs.empty:
            continue
        prompts = max(prompts, pairs["prompt"].nunique())
        by_job = first.speedups.loc[counting, method].dropna().sort_index()
        cells = [_with_interval(pairs)]
        for job in (by_job.idxmin(), by_job.idxmax()):
            cells.append(f"{by_job[job]:.2f} ({escaped(heading(str(job)))})")
        for run in others:
            same = next((name for name in (f"{FORCED}{method}", method) if name in run.labels), "")
            theirs = run.pairs_of(same, counting)
            cells.append(NONE if theirs.empty else f"{overall_speedup(theirs):.2f}")
        name = escaped(first.head(method)) if names is None else names[method]
        lines.append((overall_speedup(pairs), [name, *cells]))
    columns = ["method", f"{head}, 95% CI", "slowest job", "fastest job", *heads]
    lines.sort(key=lambda line: -line[0])
    note = f"{prompts} prompts"
    if left_out := [f'"{heading(job)}"' for job in first.names if job in without]:
        note += f", without {', '.join(left_out)}"
    if left_out := [heading(job) for job in first.names if job in wrong]:
        note += f"; {' and '.join(left_out)} are left out, since one method's outputs are wrong there"
    return Table("Side by side", pd.DataFrame([cells for _, cells in lines], columns=columns), f"{note}.")


# Picture


def job_plot(summary: Summary) -> Plot | None:
    """Return the picture of the float32 run, whose outputs are identical, or else of the first run; None without plain
    decoding and a drafter.
    """
    runs = {jobs.comparison.run: jobs for jobs in reversed(jobs_of(summary))}
    jobs = runs.get("float32") or next(reversed(runs.values()), None)
    drafter = None if jobs is None else _drafter(jobs)
    if jobs is None or drafter is None or REPLAY_BASELINE not in jobs.labels:
        return None
    ticks = {
        method: jobs.labels[method]
        for method in jobs.labels
        if method.partition(":")[0] in ("prompt_lookup_hf", "suffix")
    }
    speedups = jobs.speedups.dropna(subset=[REPLAY_BASELINE, drafter])
    for method, job in jobs.wrong:
        if method in ticks and job in speedups.index:
            speedups.loc[job, method] = float("nan")
    return None if speedups.empty else _drawn(speedups.rename(index=heading), drafter, ticks)


def _drafter(jobs: Jobs) -> str | None:
    """Return the method that represents this library: the default drafter, warm, or else the fastest drafter."""
    own = [method for method in jobs.labels if method not in BASELINES and jobs.is_drafted(method)]
    return "recycling" if "recycling" in own else next((m for m in jobs.comparison.speedups.index if m in own), None)


@styled
def _drawn(speedups: pd.DataFrame, drafter: str, ticks: Mapping[str, str]) -> Plot:
    """Draw a bar for each job: light for the loop without drafts, dark for the drafts, with a tick for each method in
    `ticks`, which maps methods to labels. The picture is readable at 400 pixels, and has a background for dark pages.
    """
    figure, (axes,) = canvas(0.75 + 0.3 * len(speedups))
    markers, labelled = dict(zip(ticks, "|d", strict=False)), set[str]()
    for row, (_, job) in enumerate(speedups.iterrows()):
        plain, drafted = job[REPLAY_BASELINE], job[drafter]
        axes.barh(row, plain, color=LIGHT, height=0.62)
        if drafted > plain:
            axes.barh(row, drafted - plain, left=plain, color=DARK, height=0.62)
        axes.text(max(plain, drafted) + 0.05, row, f"{drafted:.2f}x", va="center", fontsize=10)
        for method, speedup in job[list(ticks)].dropna().items():
            label = None if method in labelled else ticks[method]
            labelled.add(method)
            size, width = (15, 2.5) if markers[method] == "|" else (5, 1)
            look: dict[str, Any] = {"linestyle": "none", "markersize": size, "markeredgewidth": width}
            axes.plot(speedup, row, color="black", marker=markers[method], label=label, **look)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(speedups)), list(speedups.index), fontsize=10)
    axes.set(ylim=(len(speedups) - 0.4, -0.6), xlabel="speedup over transformers' generate")
    axes.set_xlim(0, 1.12 * speedups[[REPLAY_BASELINE, drafter, *ticks]].max().max())
    axes.grid(False, axis="y")
    legend(figure, axes, [Patch(color=LIGHT, label="loop without drafts"), Patch(color=DARK, label="drafts")])
    caption = "Light: what the loop and prepacked weights contribute. Dark: what drafts add."
    return Plot("jobs", "Speedup by job", caption, figure)


# Pages


def between(marks: str, page: str, text: str) -> str:
    """Return a page with `text` between the comments named `marks`."""
    marked = re.compile(rf"(?<=<!-- {marks} -->\n).*?(?=<!-- end of {marks} -->)", re.S)
    assert marked.search(page), f"the page has no <!-- {marks} -->"
    return marked.sub(lambda _: f"\n{text}\n", page)


def short(markdown: str) -> str:
    """Return Markdown tables without cell padding."""
    return re.sub(r"(:?)-{3,}(:?)", r"\1--\2", re.sub(r" {2,}", " ", markdown))


def tables(summary: Summary) -> str:
    """Return the tables by job of all runs, with their caption."""
    runs = jobs_of(summary)
    if not runs:
        raise ValueError("no speedups of several jobs were measured")
    sections = [job_caption(runs[0], summary.clock)]
    for jobs in runs:
        shares = share_table(jobs)
        sections += [f"#### {jobs.comparison.run or 'All methods'}", job_table(jobs).markdown()]
        sections += [] if shares is None else [shares.markdown()]
    return short("\n\n".join(sections) + "\n")


def with_tables(page: str) -> str:
    """Return docs/benchmarks.md with up-to-date tables and caption."""
    return between("jobs", page, tables(read(ROWS)))


def with_methods(page: str) -> str:
    """Return the README with an up-to-date table of methods and its conditions."""
    runs = {jobs.comparison.run: jobs for jobs in jobs_of(read(ROWS))}
    first = runs["float32"]
    table = method_table({"float32": first, **runs}, NAMES, without=[AGAIN])
    assert table is not None
    caption = conditions(first.comparison)
    if left_out := len(first.looping_prompts):
        caption += f"; {left_out} whose output loops to {LOOPS:.0%} or more are left out"
    return between("methods", page, f"{short(table.markdown())}\n\n{caption}.\n")


def picture(folder: Path = PICTURE.parent, rows: Path = ROWS) -> bytes:
    """Draw the picture of the rows, save it in a folder, and return the file's bytes."""
    plot = job_plot(read(rows))
    return b"" if plot is None else plot.save(folder).read_bytes()


def main(folder: Path | None) -> None:
    """Write jobs.md and jobs.svg into a folder of measurements, or update the documentation if it is None."""
    if folder is not None:
        (folder / "jobs.md").write_text(f"# Speedup by job\n\n{tables(read(folder))}", encoding="utf-8")
        picture(folder, folder)
        return
    for file, filled in ((PAGE, with_tables), (README, with_methods)):
        file.write_text(filled(file.read_text(encoding="utf-8")), encoding="utf-8")
    picture()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
