"""A report of what was measured, from `rows.jsonl` alone, as Markdown: in the terminal and as `report.md` with plots.

The same rows give the same files, byte by byte. The first table is in the form of the Token Recycling paper's table 1:
a line per method, a column per category.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from pandas.api.types import is_numeric_dtype

from . import plots
from .data import HINDSIGHT
from .plots import Plot
from .store import CLOCKS
from .summary import (
    TERMS,
    Comparison,
    Summary,
    finished,
    heading,
    interval_of,
    overall_speedup,
    read,
    repeat_spread,
)

# Tables


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
                NONE if pd.isna(value) else f"**{form.format(value)}**" if figure == most else form.format(value)
                for value, figure in zip(figures[name], raced, strict=True)
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
    limits = f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval[1] < float("inf") else ""
    return f"{value:.2f}{limits}"


# Names and sentences


_MODES = {"generate": "Generated output", "replay": "Teacher-forced replay", "batch": "Batches"}
ABOUT = {
    "generate": "The model's own output. Repetition in it flatters methods that copy from earlier tokens.",
    "replay": "Reference text is taken as the output; candidates still come from the model's logits.",
    "batch": "Several prompts in one call.",
}
HOW = (
    "MAT: emitted tokens per step, the target's own token included, over all prompts. Without loops: outside stretches "
    "that repeat themselves exactly.",
    "Speedup: time per token of the baseline / of the method, end to end, over the prompts that both finished. "
    "Tokens/s: all tokens / the time of all prompts, with the median of a prompt's repeats.",
    "95% CI: bootstrap over prompts, 2,000 resamples.",
    "The order of the methods rotates from prompt to prompt, after a warm-up on a prompt that is not measured. Failed "
    "runs are counted and left out of the other figures.",
)


def mode_title(mode: str) -> str:
    """The heading of a mode."""
    return _MODES.get(mode, mode.capitalize())


def condition_title(comparison: Comparison) -> str:
    """Where in the report a comparison stands."""
    batch = f"{comparison.batch} prompts" if comparison.mode == "batch" else ""
    return ", ".join(filter(None, (comparison.run, mode_title(comparison.mode), batch)))


def title_of(summary: Summary) -> str:
    """The heading of a report; it names a clock that is not the usual one."""
    models = dict.fromkeys(str(each.get("model")) for each in summary.environments)
    clock = "" if summary.clock == "wall" else f", {clock_words(summary.clock)}"
    return f"Decoding methods on {' and '.join(models)}{clock}"


def environment_of(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """An environment as names and texts; unknown values are left out."""
    facts = {"accelerator": "none", **{key: value for key, value in facts.items() if value is not None}}

    def named(*names: str) -> list[str]:
        return [f"{name.replace('_', '-')} {facts[name]}" for name in names if name in facts]

    size = f"{facts['parameters'] / 1e6:,.3g} million parameters" if "parameters" in facts else ""
    parts: dict[str, list[Any]] = {
        "model": [facts.get("model"), size, facts.get("dtype"), facts.get("model_fingerprint")],
        "machine": [facts.get("cpu", facts.get("machine")), *named("cores", "threads", "accelerator")],
        "software": named("python", "torch", "transformers", "token_recycling", "commit"),
    }
    return [(name, ", ".join(str(text) for text in texts if text)) for name, texts in parts.items()]


def settings_of(summary: Summary) -> list[tuple[str, str]]:
    """The settings of the run, as names and texts."""
    rows = summary.rows
    main = rows[rows["mode"] != "batch"]
    main = main if len(main) else rows
    names = main["prompt"].str.split("+").where(main["batch"] > 1, main["prompt"]).explode().drop_duplicates()
    sets = names.str.rpartition("/")[0].value_counts(sort=False)
    times = finished(rows)[CLOCKS[summary.clock][1]]
    apart = repeat_spread(times)
    dates = sorted({str(environment.get("date", ""))[:10] for environment in rows["environment"]} - {""})
    temperatures = sorted(set(main["temperature"].astype(float).fillna(0.0)))
    lines = {
        "date": " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "",
        "prompts": ", ".join(f"{number} of {name}" if name else str(number) for name, number in sets.items()),
        "decoding": ", ".join(f"sampled at temperature {each:g}" if each else "greedy" for each in temperatures),
        "seed": _listed(main["seed"]),
        "most new tokens": _listed(main["max_new_tokens"]),
        "time": clock_words(summary.clock),
        "repeats": _listed(times.map(len)),
        "spread of repeats": "" if apart is None else f"{apart:.1%} of the median, slowest less fastest",
    }
    return [(name, text) for name, text in lines.items() if text]


def _listed(values: pd.Series) -> str:
    return ", ".join(map(str, sorted(values.dropna().unique())))


# Findings, and what a reader must know before believing them


CHEAPER = 1.05
"""Times MAT above which a speedup is questioned: steps then cost less than the baseline's."""
REPETITIVE = 0.5
"""Share of repeated 4-grams above which a report says that the output flatters methods that look back."""
CLOSE = 1e-3
"""Margin of logits up to which a divergence in float32 can be a matter of rounding."""


def findings_table(summary: Summary) -> Table | None:
    """The fastest method of each comparison: by how much, on what, and whether it is ahead of the second."""
    lines = [_fastest(each) for each in summary.main if each.baseline is not None and len(each.speedups)]
    note = (
        "Speedup end to end. Ahead of the next: speedup over the second-fastest method on the prompts of both; an "
        "interval that includes 1 does not decide."
    )
    return Table("Fastest method", pd.DataFrame(lines), note, names=2) if lines else None


def _fastest(comparison: Comparison) -> dict[str, str]:
    best, speedup = comparison.speedups.index[0], comparison.speedups.iloc[0]
    pairs = comparison.pairs_of(best)
    line = {
        "output": escaped(condition_title(comparison)),
        "fastest": escaped(comparison.labels[best]),
        "speedup": with_interval(speedup, interval_of(pairs)),
        "MAT": f"{comparison.figures['mat'][best]:.2f}",
        "prompts": f"{len(pairs):,}",
        "tokens": f"{int(pairs['tokens'].sum()):,}",
        "ahead of the next": "-",
    }
    if len(comparison.speedups) > 1:
        second = comparison.speedups.index[1]
        rival = comparison.pairs_of(second).set_index("prompt")[["tokens", "call_seconds"]]
        both = pairs.drop(columns=TERMS[2:]).join(rival.rename(columns=lambda name: f"base_{name}"), "prompt", "inner")
        ahead = overall_speedup(both)
        line["ahead of the next"] = (
            f"{with_interval(ahead, interval_of(both))} times {escaped(comparison.labels[second])}"
        )
    return line


def findings_of(summary: Summary) -> list[str]:
    """What the table of the fastest does not say: losses, and whether outputs are identical."""
    lines = []
    for comparison in summary.main:
        slower = "; ".join(
            comparison.labels[method] for method in comparison.labels if comparison.speedups.get(method, 1.0) < 1
        )
        if slower and comparison.speedups.max() > 1:
            lines.append(
                f"{condition_title(comparison)}: slower than {comparison.labels[str(comparison.baseline)]}: {slower}."
            )
    identical = summary.rows["identical"].dropna()
    if different := int(identical.eq(False).sum()):
        lines.append(f"{different:,} of {len(identical):,} compared outputs differ from plain decoding's.")
    elif len(identical):
        lines.append(f"All {len(identical):,} compared outputs are identical to plain decoding's.")
    if failed := len(summary.rows) - len(finished(summary.rows)):
        lines.append(f"{counted(failed, 'run')} failed.")
    return lines


def warnings_of(summary: Summary) -> list[str]:
    """What a reader must know before believing the numbers."""
    lines = [*summary.notes]
    for comparison in summary.comparisons:
        lines += _conditions(comparison)
    for comparison in summary.main:
        lines += _questions(comparison)
    lines += _far_divergences(summary)
    return lines


def _conditions(comparison: Comparison) -> Iterator[str]:
    """What differs between the rows of a comparison, and what is missing."""
    place = condition_title(comparison)
    environments = pd.DataFrame(
        [{**environment, "date": ""} for environment in comparison.rows["environment"]], dtype=object
    ).astype(str)
    if differing := [
        f"{key}: {' or '.join(environments[key].unique())}" for key in environments if environments[key].nunique() > 1
    ]:
        yield f"{place}: rows of several environments ({'; '.join(differing)}), whose times do not compare."
    for key in ("temperature", "max_new_tokens", "seed"):
        if len(values := sorted(comparison.rows[key].astype(str).unique())) > 1:
            yield f"{place}: rows differ in {key} ({', '.join(values)})."
    if comparison.baseline is None:
        yield f"{place}: no baseline was measured, so there are no speedups."
    counts = comparison.rows["method"].value_counts()
    every = counts.max()
    if short := [
        f"{label} ({counts[method]})" for method, label in comparison.labels.items() if counts[method] < every
    ]:
        yield f"{place}: not every method has all {every} prompts yet: {', '.join(short)}."


def _questions(comparison: Comparison) -> Iterator[str]:
    """Figures that do not mean what they seem to."""
    odd = [
        f"{comparison.labels[method]} ({speedup:.2f}, MAT {comparison.figures['mat'][method]:.2f})"
        for method, speedup in comparison.speedups.items()
        if speedup > CHEAPER * max(1.0, comparison.figures["mat"][method])
    ]
    if odd:
        yield (
            f"{condition_title(comparison)}: speedup above MAT: {'; '.join(odd)}. Their steps cost less than the "
            "baseline's, as with prepacked weights, or other programs ran: see `--baseline plain` and "
            "`--clock processor`."
        )
    if comparison.mode == "generate" and (share := comparison.figures["repeated_4grams"].max()) > REPETITIVE:
        yield (
            f"{condition_title(comparison)}: up to {share:.0%} of the 4-grams are repetitions, which flatters methods "
            "that copy from earlier tokens: see MAT without loops, and replay."
        )


def _far_divergences(summary: Summary) -> Iterator[str]:
    far = summary.rows[summary.rows["margin"] > CLOSE]
    exact = far["environment"].map(lambda environment: environment.get("dtype") == "float32").astype(bool)
    far = far[exact].sort_values("margin")
    if len(far):
        yield (
            f"{counted(len(far), 'output')} in float32 {'differs' if len(far) == 1 else 'differ'} from plain "
            f"decoding's by more than rounding explains (margin above {CLOSE:g}): {', '.join(far['label'].unique())}; "
            f"most on {far['prompt'].iloc[-1]}. This is a bug of the method: report it."
        )


# The page


@dataclass
class Section:
    """A part of a report: what was measured in one way."""

    title: str
    text: str
    tables: list[Table]
    plots: list[Plot]


def write(folder: Path, baseline: str | None = None, clock: str = "wall") -> tuple[str, list[Path]]:
    """Write the report of a folder of measurements into it; returns its text and the files written.

    `baseline` is the method that speedups refer to; otherwise transformers' `generate`, or plain decoding where that
    was not measured. `clock` is "wall" or "processor". Raises ValueError for a folder without measurements.
    """
    summary = read(folder, baseline, clock)
    sections = sections_of(summary)
    page, text = folder / "report.md", markdown(summary, sections)
    page.write_text(text, encoding="utf-8")
    written = [page]
    for plot in (plot for section in sections for plot in section.plots):
        (folder / "plots").mkdir(exist_ok=True)
        written.append(plot.save(folder / "plots"))
    return text, written


def as_dict(summary: Summary) -> dict[str, Any]:
    """Every figure as a plain value, for JSON."""
    fastest = findings_table(summary)
    return {
        "environments": summary.environments,
        "settings": dict(settings_of(summary)),
        "fastest": [] if fastest is None else fastest.frame.to_dict("records"),
        "findings": findings_of(summary),
        "warnings": warnings_of(summary),
        "comparisons": [comparison.as_dict() for comparison in summary.comparisons],
    }


def sections_of(summary: Summary) -> list[Section]:
    """Return all parts of a report."""
    clock, sections = summary.clock, []
    for comparison in summary.main:
        tables = (
            speedup_table(comparison, clock),
            output_table(comparison),
            category_table(comparison) if len(comparison.categories) > 1 else None,
            parts_table([comparison]),
        )
        drawings = []
        if not comparison.run:
            drawings = [plots.speedups(comparison, summary.methods), plots.acceptance(comparison)]
        sections.append(_section(condition_title(comparison), ABOUT.get(comparison.mode, ""), tables, drawings))
    for run in dict.fromkeys(comparison.run for comparison in summary.batches):
        sizes = [comparison for comparison in summary.batches if comparison.run == run]
        title = ", ".join(filter(None, (run, mode_title("batch"))))
        sections.append(_section(title, ABOUT["batch"], [batch_table(sizes, clock)], []))
    if (failures := failure_table(summary)) is not None:
        sections.append(Section("Failures", "", [failures], []))
    return sections


def _section(title: str, text: str, tables: Iterable[Table | None], drawings: Iterable[Plot | None]) -> Section:
    """Return a section without the tables and plots that the rows have no figures for."""
    return Section(title, text, [table for table in tables if table], [plot for plot in drawings if plot])


def markdown(summary: Summary, sections: Sequence[Section]) -> str:
    """The report. Everything from the rows is escaped: labels and messages of errors are other people's text."""
    return "\n\n".join(_paragraphs(summary, sections)) + "\n"


def _paragraphs(summary: Summary, sections: Sequence[Section]) -> Iterator[str]:
    yield f"# {escaped(title_of(summary))}"
    if (fastest := findings_table(summary)) is not None:
        yield fastest.markdown()
    if findings := findings_of(summary):
        yield _list(findings)
    if warnings := warnings_of(summary):
        yield "**Before believing it**"
        yield _list(warnings)
    for section in sections:
        yield f"## {escaped(section.title)}"
        if section.text:
            yield section.text
        for table in section.tables:
            yield f"### {table.title}"
            yield table.markdown()
        for plot in section.plots:
            yield f"### {plot.title}"
            yield escaped(plot.caption)
            yield f"![{plot.title}](plots/{plot.name}.svg)"
    yield "## How it was measured"
    for facts in [*map(environment_of, summary.environments), settings_of(summary)]:
        yield "\n".join(f"- {name}: {escaped(text)}" for name, text in facts)
    yield "\n".join(f"- {line}" for line in HOW)


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {escaped(line)}" for line in lines)
