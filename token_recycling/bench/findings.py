"""Text of a report: measurements and their conditions, the fastest method, and caveats about the figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from .store import CLOCKS
from .summary import TERMS, Comparison, Summary, finished, interval_of, overall_speedup, repeat_spread
from .tables import NONE, Table, clock_words, counted, escaped, with_interval

_MODES = {"generate": "Generated output", "replay": "Teacher-forced replay", "batch": "Batches"}
ABOUT = {
    "generate": "The model's own output. Its repetitions favor methods that copy from earlier tokens.",
    "replay": "Reference text is teacher-forced as the output; candidates still come from the model's logits.",
    "batch": "Several prompts in one call.",
}
HOW = (
    "MAT: emitted tokens per step, the target's own token included, over all prompts. Without loops: excluding "
    "passages that repeat exactly.",
    "Speedup: time per token of the baseline / of the method, end to end, over the prompts that both finished. "
    "Tokens/s: all tokens / the time of all prompts, with the median of a prompt's repeats.",
    "95% CI: bootstrap over prompts, 2,000 resamples.",
    "After a warm-up on a prompt that is not measured, the order of the methods rotates from prompt to prompt. Failed "
    "runs are counted and excluded from the other figures.",
)


def mode_title(mode: str) -> str:
    """Return the heading of a mode."""
    return _MODES.get(mode, mode.capitalize())


def condition_title(comparison: Comparison) -> str:
    """Return the heading of a comparison's section."""
    batch = f"{comparison.batch} prompts" if comparison.mode == "batch" else ""
    return ", ".join(filter(None, (comparison.run, mode_title(comparison.mode), batch)))


def title_of(summary: Summary) -> str:
    """Return the heading of a report, with the clock if it is not the default."""
    models = dict.fromkeys(str(each.get("model")) for each in summary.environments)
    clock = "" if summary.clock == "wall" else f", {clock_words(summary.clock)}"
    return f"Decoding methods on {' and '.join(models)}{clock}"


def environment_of(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return an environment as names and texts; unknown values are omitted."""
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
    """Return the settings of the run, as names and texts."""
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
        "spread of repeats": "" if apart is None else f"{apart:.1%} of the median, slowest minus fastest",
    }
    return [(name, text) for name, text in lines.items() if text]


def _listed(values: pd.Series) -> str:
    return ", ".join(map(str, sorted(values.dropna().unique())))


# Findings and caveats


CHEAPER = 1.05
"""Factor of MAT above which a speedup gets a caveat: steps then cost less than the baseline's."""
REPETITIVE = 0.5
"""Share of repeated 4-grams above which a caveat says that the output favors methods that copy."""
CLOSE = 1e-3
"""Largest logit margin of a divergence that rounding can explain in float32."""


def findings_table(summary: Summary) -> Table | None:
    """Return the fastest method of each comparison, its speedup, its measurements, and its lead over the second."""
    lines = [_fastest(each) for each in summary.main if each.baseline is not None and len(each.speedups)]
    note = (
        "End-to-end speedup. Ahead of the next: speedup over the second-fastest method on the prompts of both; if the "
        "interval includes 1, neither is significantly faster."
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
        "ahead of the next": NONE,
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
    """Return findings beyond the fastest method: slower methods, identical or different outputs, failures."""
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
        lines.append(f"{different:,} of {len(identical):,} compared outputs differ from those of plain decoding.")
    elif len(identical):
        lines.append(f"All {len(identical):,} compared outputs are identical to those of plain decoding.")
    if failed := len(summary.rows) - len(finished(summary.rows)):
        lines.append(f"{counted(failed, 'run')} failed.")
    return lines


def warnings_of(summary: Summary) -> list[str]:
    """Return the caveats about the figures."""
    lines = [*summary.notes]
    for comparison in summary.comparisons:
        lines += _conditions(comparison)
    for comparison in summary.main:
        lines += _questions(comparison)
    lines += _far_divergences(summary)
    return lines


def _conditions(comparison: Comparison) -> Iterator[str]:
    """Yield caveats about rows of a comparison that differ in their conditions or are missing."""
    place = condition_title(comparison)
    environments = pd.DataFrame(
        [{**environment, "date": ""} for environment in comparison.rows["environment"]], dtype=object
    ).astype(str)
    if differing := [
        f"{key}: {' or '.join(environments[key].unique())}" for key in environments if environments[key].nunique() > 1
    ]:
        yield f"{place}: rows of several environments ({'; '.join(differing)}), whose times are not comparable."
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
        yield f"{place}: some methods do not have all {every} prompts yet: {', '.join(short)}."


def _questions(comparison: Comparison) -> Iterator[str]:
    """Yield caveats about misleading figures."""
    odd = [
        f"{comparison.labels[method]} ({speedup:.2f}, MAT {comparison.figures['mat'][method]:.2f})"
        for method, speedup in comparison.speedups.items()
        if speedup > CHEAPER * max(1.0, comparison.figures["mat"][method])
    ]
    if odd:
        yield (
            f"{condition_title(comparison)}: speedup above MAT: {'; '.join(odd)}. Either their steps cost less than "
            "the baseline's, as with prepacked weights, or other programs were running: use `--baseline plain` or "
            "`--clock processor`."
        )
    if comparison.mode == "generate" and (share := comparison.figures["repeated_4grams"].max()) > REPETITIVE:
        yield (
            f"{condition_title(comparison)}: up to {share:.0%} of the 4-grams are repetitions, which favors methods "
            "that copy from earlier tokens: see MAT without loops, and replay."
        )


def _far_divergences(summary: Summary) -> Iterator[str]:
    far = summary.rows[summary.rows["margin"] > CLOSE]
    exact = far["environment"].map(lambda environment: environment.get("dtype") == "float32").astype(bool)
    far = far[exact].sort_values("margin")
    if len(far):
        yield (
            f"{counted(len(far), 'output')} in float32 {'differs' if len(far) == 1 else 'differ'} from plain "
            f"decoding by more than rounding explains (margin above {CLOSE:g}): {', '.join(far['label'].unique())}; "
            f"most on {far['prompt'].iloc[-1]}. This is a bug in the method: please report it."
        )
