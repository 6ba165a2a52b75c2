"""The tables of a report: speedups, what is behind them, parts of a step, batches, failures, and speedups by job.

The first is in the form of the Token Recycling paper's table 1: a line per method, a column per category. Speedups by
job are in docs/benchmarks.md, and are the picture of the README.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from pandas.api.types import is_numeric_dtype

from . import plots
from .data import BASELINES, COLD, FORCED, HINDSIGHT, REPLAY_BASELINE
from .plots import JobShares, Plot
from .summary import (
    Comparison,
    Summary,
    finished,
    heading,
    interval_of,
    last_turn_speedups,
    overall_speedup,
)

# Words


def clock_words(clock: str) -> str:
    """What times were measured with."""
    return "by processor time" if clock == "processor" else "by elapsed time"


def timed_calls(clock: str) -> str:
    """What tokens/s are of: processor time is known of whole calls alone."""
    return "decoding" if clock == "wall" else "whole calls"


def counted(number: int, thing: str) -> str:
    """A number of things."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


NONE = "-"
"""Where there is no figure."""
_COLUMNS = {
    "drafted": ("drafted", "{:.1f}"),
    "MAT": ("mat", "{:.2f}"),
    "MAT without loops": ("mat_without_loops", "{:.2f}"),
    "first quarter": ("mat_first_quarter", "{:.2f}"),
    "last quarter": ("mat_last_quarter", "{:.2f}"),
    "discard rate": ("discard_rate", "{:.3f}"),
    "repeated": ("repeated_4grams", "{:.1%}"),
    "first token (s)": ("first_token", "{:.3f}"),
    "tokens/s": ("decoding", "{:,.1f}"),
    "whole call": ("whole_call", "{:,.1f}"),
    "largest margin": ("largest_margin", "{:.2g}"),
    "failed": ("failures", "{:.0f}"),
    "overhead": ("overhead", "{:.0%}"),
}
"""Heads of columns, with the figure below each and its form; other heads are those of figures with two digits."""


@dataclass(frozen=True)
class Table:
    """Texts in columns, the first `names` of them words, the others figures."""

    title: str
    frame: pd.DataFrame
    note: str = ""
    names: int = 1

    def markdown(self) -> str:
        """The table and its note; the heading is left to the caller."""
        frame = self.frame.rename(columns=escaped)
        align = ["left"] * self.names + ["right"] * (len(frame.columns) - self.names)
        text = frame.to_markdown(index=False, disable_numparse=True, colalign=align)
        return f"{text}\n\n{self.note}" if self.note else str(text)


def escaped(text: str) -> str:
    """A text as Markdown in one line, none of its signs read as markup, or as the border of a cell."""
    for sign in "\\`*_<[|":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())


def table_of(
    title: str,
    figures: pd.DataFrame,
    heads: Sequence[str],
    note: str,
    names: Mapping[str, str] | None = None,
    best: Sequence[str] = (),
) -> Table:
    """A line for each line of figures: columns of `names`, a head and what stands below it, then those of `heads` that
    hold a figure. The largest figure of the columns in `best` is bold, that of an oracle aside.
    """
    names = names or {"method": "label"}
    cells = {head: [escaped(str(text)) for text in figures[name]] for head, name in names.items()}
    bound = figures.index.astype(str).str.startswith(HINDSIGHT)
    for head in heads:
        name, form = _COLUMNS.get(head, (head, "{:.2f}"))
        if head == "identical":
            column = [
                NONE if not every else f"{same} of {every}" if same == every else f"**{same} of {every}**"
                for same, every in zip(figures["identical"], figures["compared"], strict=True)
            ]
        elif not is_numeric_dtype(figures[name]):
            column = [NONE if pd.isna(text) else escaped(text) for text in figures[name]]
        else:
            raced = figures[name].mask(bound)
            most = raced.max() if head in best and len(figures) > 1 else None
            column = [
                NONE if pd.isna(value) else f"**{form.format(value)}**" if one == most else form.format(value)
                for value, one in zip(figures[name], raced, strict=True)
            ]
        if set(column) - {NONE, "0"}:
            cells[head] = column
    return Table(title, pd.DataFrame(cells), note, len(names))


def speedup_table(comparison: Comparison, clock: str = "wall") -> Table:
    """Speedup by category and over all, the fastest first, MAT, and tokens/s, as in the paper's table 1."""
    against = (
        f"over {comparison.labels[comparison.baseline]}" if comparison.baseline else "unknown: no baseline was measured"
    )
    note = (
        f"Speedup {against}, end to end, {clock_words(clock)}; CI of all prompts. Tokens/s of "
        f"{timed_calls(clock)}. The best of a column is bold; an oracle is a bound, never the best."
    )
    categories = (
        _by_category(comparison, "speedup")
        if len(comparison.categories) > 1
        else pd.DataFrame(index=list(comparison.labels))
    )
    between = {method: interval_of(comparison.pairs_of(method)) for method in comparison.speedups.index}
    texts = [_between(between[method]) if method in between else None for method in comparison.labels]
    figures = comparison.figures.join(categories).assign(**{"95% CI": pd.Series(texts, comparison.figures.index)})
    figures = figures.sort_values("speedup", ascending=False, kind="stable")
    heads = [*categories, "speedup", "95% CI", "MAT", "tokens/s"]
    return table_of("Speedup", figures, heads, note, best=heads)


def _between(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.2f} to {interval[1]:.2f}" if interval[1] < float("inf") else NONE


def category_table(comparison: Comparison) -> Table:
    """Tokens a step of every method, by category and over all."""
    figures = _by_category(comparison, "mat").assign(all=comparison.figures["mat"])
    heads = [*figures]
    figures = figures.assign(label=comparison.figures["label"])
    return table_of("MAT by category", figures, heads, "The best of a column is bold.", best=heads)


def _by_category(comparison: Comparison, figure: str) -> pd.DataFrame:
    """A figure by method, a column for each category under its heading."""
    every = (
        comparison.by_category[figure]
        .unstack("category")
        .reindex(index=list(comparison.labels), columns=comparison.categories)
    )
    return every.rename(columns=heading)


def output_table(comparison: Comparison) -> Table:
    """What stands behind the speedup: loops, learning, spread, first tokens, identity, failures."""
    quartiles = comparison.figures[["lower", "median", "upper"]].map("{:.2f}".format).agg(" ".join, axis=1)
    figures = comparison.figures.assign(quartiles=quartiles.where(comparison.figures["median"].notna()))
    learning = ["first quarter", "last quarter"] if figures["prompts"].max() >= 8 else []
    heads = ["MAT without loops", *learning, "drafted", "discard rate", "repeated", "first token (s)", "whole call"]
    heads += ["quartiles", "identical", "largest margin", "failed"]
    note = (
        "First and last quarter: MAT of the first and last prompts measured. Drafted: mean nodes of a step without the "
        "root; discard rate: rejected ones per emitted token. Repeated: 4-grams that occurred earlier "
        "in the same output. Whole call: tokens/s, prefill included. Quartiles of the speedups of single prompts. "
        "Identical: outputs equal to plain decoding's; margin: between the two logits at the first divergence."
    )
    return table_of("Behind the speedup", figures, heads, note)


def parts_table(comparisons: Sequence[Comparison]) -> Table | None:
    """Milliseconds of each part of a step."""
    parts = 1000 * pd.concat([each.parts for each in comparisons])
    if parts.empty:
        return None
    step = parts.sum(axis=1)
    overhead = step / parts.get("forward", float("nan")) - 1
    labels = [each.labels[method] for each in comparisons for method in each.parts.index]
    note = "Milliseconds per step. Overhead: time outside the model's forward pass / time of the forward pass."
    figures = parts.assign(step=step, overhead=overhead, label=labels)
    return table_of("Time per part of a step", figures, [*parts, "step", "overhead"], note)


def batch_table(sizes: Sequence[Comparison], clock: str = "wall") -> Table:
    """A line for each method at each batch size."""
    figures = pd.concat([each.figures.assign(size=str(each.batch)) for each in sizes])
    note = f"Drafted: mean nodes of a step without the root. Tokens/s of {timed_calls(clock)}, and of the whole call."
    heads = ["speedup", "drafted", "MAT", "tokens/s", "whole call", "identical", "failed"]
    return table_of("Batches by size", figures, heads, note, {"batch size": "size", "method": "label"})


def failure_table(summary: Summary) -> Table | None:
    """Failures by message, the most frequent first."""
    every = summary.rows[summary.rows["failure"].notna()]
    if every.empty:
        return None
    alike = every.groupby(every["failure"].str.replace(r"\d+", "#", regex=True), sort=False)
    failures = alike.agg(
        message=("failure", "first"),
        labels=("label", lambda labels: ", ".join(labels.unique())),
        prompts=("prompt", lambda prompts: str(prompts.nunique())),
        failures=("failure", "size"),
    ).sort_values("failures", ascending=False, kind="stable")
    names = {"failure": "message", "methods": "labels"}
    return table_of(
        "Failures", failures, ["prompts", "failed"], "Messages that differ in numbers only share a line.", names
    )


def with_interval(value: float, interval: tuple[float, float]) -> str:
    """Return a value with its confidence interval, if one is known."""
    known = f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval[1] < float("inf") else ""
    return f"{value:.2f}{known}"


# Speedup by job: the picture of the README, and the tables of docs/benchmarks.md

DIFFERS = "differs"
"""Instead of the speedup of other outputs than the baseline's, as where a method breaks the grammar."""
FAR = 1.0
"""Margin of logits that rounding explains in no dtype: the output is wrong."""
LOOPS = 0.25
"""Share of a baseline's output in loops from which its prompt is left out: loops flatter methods that look back."""
_FEWEST = 3
"""Prompts below which no confidence interval is given."""


def job_page(summary: Summary) -> str | None:
    """Return the tables as a Markdown page; None where no speedups of several jobs were measured."""
    comparisons = _with_jobs(summary)
    if not comparisons:
        return None
    sections = ["# Speedup by job", job_caption(comparisons, summary.clock)]
    for comparison in comparisons:
        sections += [f"## {comparison.run or 'All methods'}", job_table(comparison).markdown()]
        if (shares := share_table(comparison)) is not None:
            sections.append(shares.markdown())
    return "\n\n".join(sections) + "\n"


def job_plot(summary: Summary) -> Plot | None:
    """Return the picture of the run in float32, whose outputs are identical, else of the first; None without plain
    decoding and a drafter.
    """
    runs = {comparison.run: comparison for comparison in reversed(_with_jobs(summary))}
    comparison = runs.get("float32") or next(reversed(runs.values()), None)
    drafter = None if comparison is None else _drafter(comparison)
    if comparison is None or drafter is None or REPLAY_BASELINE not in comparison.labels:
        return None
    ticks = {
        method: comparison.labels[method]
        for method in comparison.labels
        if method.partition(":")[0] in ("prompt_lookup_hf", "suffix")
    }
    shares = {}
    for category in comparison.categories:
        speedups = {method: _speedup(comparison, method, category) for method in (REPLAY_BASELINE, drafter, *ticks)}
        if all(speedups[method] is not None for method in (REPLAY_BASELINE, drafter)):
            others = {
                method: value
                for method in ticks
                if (value := speedups[method]) is not None and category not in _wrong(comparison, method)
            }
            shares[heading(category)] = JobShares(speedups[REPLAY_BASELINE], speedups[drafter], others)  # type: ignore[arg-type]
    return plots.jobs(shares, ticks) if shares else None


def _with_jobs(summary: Summary) -> list[Comparison]:
    return [
        comparison
        for comparison in summary.main
        if comparison.mode == "generate" and comparison.baseline and len(comparison.categories) > 1
    ]


def _drafter(comparison: Comparison) -> str | None:
    """Return the method that stands for this library: the default drafter, warm, else the fastest drafter."""
    own = [method for method in comparison.labels if method not in BASELINES and _is_drafted(comparison, method)]
    return "recycling" if "recycling" in own else next((m for m in comparison.speedups.index if m in own), None)


def _is_drafted(comparison: Comparison, method: str) -> bool:
    return bool(comparison.rows.loc[comparison.rows["method"] == method, "nodes"].astype(bool).any())


def looping_prompts(comparison: Comparison) -> set[str]:
    """Return the prompts whose baseline output is a loop to a good part."""
    rows = finished(comparison.rows)
    rows = rows[rows["method"] == comparison.baseline]
    return set(rows.loc[rows["loop_tokens"] >= LOOPS * rows["tokens"], "prompt"])


def _pairs(comparison: Comparison, method: str, category: str | None = None) -> pd.DataFrame:
    """Return the rows of a method that count: those of prompts whose baseline does not loop."""
    pairs = comparison.pairs_of(method)
    pairs = pairs[~pairs["prompt"].isin(looping_prompts(comparison))]
    return pairs if category is None else pairs[pairs["category"] == category]


def _speedup(comparison: Comparison, method: str, category: str) -> float | None:
    pairs = _pairs(comparison, method, category)
    return None if pairs.empty else overall_speedup(pairs)


def job_table(comparison: Comparison) -> Table:
    """Return the end-to-end speedup of every method over the baseline, by category."""
    methods = [method for method in comparison.labels if method != comparison.baseline]
    names = {method: _column_head(comparison, method) for method in methods}
    looping = looping_prompts(comparison)
    last_turns = last_turn_speedups(comparison.rows, str(comparison.baseline))
    lines = []
    for category in comparison.categories:
        prompts = comparison.rows.loc[comparison.rows["category"] == category, "prompt"].unique()
        kept = [prompt for prompt in prompts if prompt not in looping]
        number = str(len(prompts)) if len(kept) == len(prompts) else f"{len(kept)} of {len(prompts)}"
        name = escaped(heading(category))
        lines.append([name, number, *(_cell(comparison, method, category) for method in methods)])
        ratios = [last_turns.get((category, method)) for method in methods]
        if any(ratio is not None for ratio in ratios):
            cells = [NONE if ratio is None else f"{ratio:.2f}" for ratio in ratios]
            lines.append([f"{name}: time to first token, last turn", "", *cells])
    every = comparison.rows["prompt"].nunique()
    lines.append(["all, with 95% CI", str(every - len(looping)), *(_overall(comparison, m) for m in methods)])
    lines.append(["identical outputs", "", *(_identical(comparison, method) for method in methods)])
    frame = pd.DataFrame(lines, columns=["job", "prompts", *names.values()])
    return Table("Speedup by job", frame)


def share_table(comparison: Comparison) -> Table | None:
    """Return what the loop without drafts gains over the baseline, and what drafts add to it, by category; of methods
    that were also forced only with the baseline's output. None where plain decoding or drafts were not measured.
    """
    plain = [method for method in comparison.labels if method.removeprefix(FORCED) == REPLAY_BASELINE]
    drafted = [
        method
        for method in comparison.labels
        if _bare(method).partition(":")[0] == "recycling"
        and _is_drafted(comparison, method)
        and f"{FORCED}{method}" not in comparison.labels
    ]
    if not plain or not drafted:
        return None
    lines = []
    for category in [*comparison.categories, None]:
        pairs = {method: _pairs(comparison, method, category) for method in (*plain, *drafted)}
        cells: list[str] = [escaped(heading(category)) if category else "all"]
        for method in plain:
            cells.append(_ratio(pairs[method]))
        for method in drafted:
            base = REPLAY_BASELINE if not method.startswith(FORCED) else f"{FORCED}{REPLAY_BASELINE}"
            cells.append(_ratio(pairs[method], pairs[base] if base in pairs else pairs[plain[0]]))
        lines.append(cells)
    heads = [_column_head(comparison, method) for method in plain]
    heads += [f"drafts of {_column_head(comparison, method)}" for method in drafted]
    note = "The loop without drafts / `generate`; with drafts / without. Their product is the speedup."
    return Table("Share of each part", pd.DataFrame(lines, columns=["job", *heads]), note)


def _bare(method: str) -> str:
    return method.removeprefix(FORCED).removeprefix(COLD)


def _ratio(pairs: pd.DataFrame, plain: pd.DataFrame | None = None) -> str:
    """Format a speedup over the baseline, or over that of plain decoding."""
    if pairs.empty or (plain is not None and plain.empty):
        return NONE
    speedup = overall_speedup(pairs)
    return f"{speedup if plain is None else speedup / overall_speedup(plain):.2f}"


def _column_head(comparison: Comparison, method: str) -> str:
    """Return the head of a method's column; a method that was also measured cold is the warm one."""
    label = comparison.labels[method].removeprefix("transformers ").replace("plain decoding in this loop", "no drafts")
    return f"{label}, warm" if f"{COLD}{method}" in comparison.labels else label


def _cell(comparison: Comparison, method: str, category: str) -> str:
    if category in _wrong(comparison, method):
        return DIFFERS
    speedup = _speedup(comparison, method, category)
    return NONE if speedup is None else f"{speedup:.2f}"


def _wrong(comparison: Comparison, method: str) -> set[str]:
    """Return the categories in which a method gave an output that rounding does not explain."""
    rows = comparison.rows
    return set(rows[(rows["method"] == method) & (rows["margin"] > FAR)]["category"])


def _overall(comparison: Comparison, method: str) -> str:
    """Return the speedup over all prompts, with its confidence interval; none where some outputs are wrong."""
    pairs = _pairs(comparison, method)
    return NONE if pairs.empty or _wrong(comparison, method) else _with_interval(pairs)


def _with_interval(pairs: pd.DataFrame) -> str:
    """Return the speedup of some rows, with its confidence interval unless they are too few."""
    speedup = overall_speedup(pairs)
    return f"{speedup:.2f}" if len(pairs) < _FEWEST else with_interval(speedup, interval_of(pairs))


def _identical(comparison: Comparison, method: str) -> str:
    figures = comparison.figures.loc[method]
    return f"{figures['identical']:.0f} of {figures['compared']:.0f}" if figures["compared"] else NONE


def job_caption(comparisons: Sequence[Comparison], clock: str = "wall") -> str:
    """Return the conditions of the tables."""
    return (
        f"Speedup over transformers' `generate`, end to end, prefill included, {clock_words(clock)}. "
        f"{conditions(comparisons[0])}. Cold: a new drafter for every prompt. Warm: the drafter has learned from "
        "all earlier prompts. Forced: the method decodes the tokens of `generate`, so that both have the "
        f"same output in 16 bits. Prompts whose `generate` output is a loop to {LOOPS:.0%} or more are left out of the "
        'speedups ("3 of 4 prompts"). No drafts: what the loop and prepacked weights contribute. '
        f'"{DIFFERS.capitalize()}": the output is wrong by more than floating-point error.'
    )


def conditions(comparison: Comparison) -> str:
    """Return model, machine, releases, commit, and what was decoded."""
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
    runs: Mapping[str, Comparison], names: Mapping[str, str] | None = None, without: Collection[str] = ()
) -> Table | None:
    """Return a line for each method of the first run, the fastest first: its speedup over all prompts, that of its
    slowest and of its fastest job, and its speedup in the other runs.

    `runs` are comparisons by the head of their columns; `names` are words for methods, and leave out those without.
    All cells are of the same prompts: the jobs `without` do not count, nor those in which an output of any method is
    wrong, as the note says. In another run the figure is of the method that decodes the tokens of the baseline, if
    there is one. None without runs.
    """
    if not runs:
        return None
    first, *others = runs.values()
    wrong = {job for run in runs.values() for method in run.labels for job in _wrong(run, method)}
    jobs = [job for job in first.categories if job not in wrong and job not in without]
    head, *heads = runs
    lines, prompts = [], 0
    for method in first.labels if names is None else names:
        pairs = _pairs_of_jobs(first, method, jobs)
        if method == first.baseline or pairs.empty:
            continue
        prompts = max(prompts, pairs["prompt"].nunique())
        by_job = {heading(job): overall_speedup(own) for job, own in pairs.groupby("category")}
        cells = [_with_interval(pairs)]
        for job in (min(by_job, key=by_job.__getitem__), max(by_job, key=by_job.__getitem__)):
            cells.append(f"{by_job[job]:.2f} ({escaped(job)})")
        for run in others:
            same = next((one for one in (f"{FORCED}{method}", method) if one in run.labels), None)
            cells.append(NONE if same is None else _ratio(_pairs_of_jobs(run, same, jobs)))
        name = escaped(_column_head(first, method)) if names is None else names[method]
        lines.append((overall_speedup(pairs), [name, *cells]))
    columns = ["method", f"{head}, 95% CI", "slowest job", "fastest job", *heads]
    lines.sort(key=lambda line: -line[0])
    note = f"{prompts} prompts"
    if left_out := [heading(job) for job in first.categories if job in without]:
        note += f", without {', '.join(left_out)}"
    if left_out := [heading(job) for job in first.categories if job in wrong]:
        note += f", without {', '.join(left_out)}: outputs of a method are wrong there"
    return Table("Side by side", pd.DataFrame([cells for _, cells in lines], columns=columns), f"{note}.")


def _pairs_of_jobs(comparison: Comparison, method: str, jobs: Sequence[str]) -> pd.DataFrame:
    pairs = _pairs(comparison, method)
    return pairs[pairs["category"].isin(jobs)]
