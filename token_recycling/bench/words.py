"""What a report says in words: what came out, under which conditions, how it was measured, what to be careful about."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from . import arithmetic
from .arithmetic import Row
from .summary import Comparison, Result, Summary

_HEADINGS = {
    "mt_bench": "MT",
    "translation": "Trans",
    "summarization": "Sum",
    "qa": "QA",
    "math_reasoning": "Math",
    "rag": "RAG",
    "mbpp": "MBPP",
}
"""As in the paper's table 1."""
_SOFTWARE = ("python", "torch", "transformers", "token_recycling")
REPETITIVE = 0.5
"""Share of repeated 4-grams above which a report says that the output flatters methods that look back."""
CLOSE = 1e-3
"""Margin of logits up to which a divergence in float32 can be a matter of rounding."""


class StudyWords(NamedTuple):
    """A study's title, what its points are, and what to see."""

    title: str
    axis: str
    what: str


_STUDIES = {
    "breadth": StudyWords("Tree breadth", "nodes", "The tree gets broader, its depth stays."),
    "depth": StudyWords("Tree depth", "depth", "The tree gets deeper, its number of nodes stays."),
    "update": StudyWords("Update rule", "rule", "Which node's candidates are kept where a token stands at several."),
    "order": StudyWords("Order of the prompts", "order", "Prompts of one category after another, or shuffled."),
    "hot": StudyWords("Hot and cold start", "start", "Hot: what was learned is kept from prompt to prompt. Cold: not."),
    "parts": StudyWords("Time per part of a step", "part", "Where the time of a step goes."),
    "k": StudyWords("Candidates kept", "k", "How many candidates are kept after every token."),
    "temperature": StudyWords("Temperature", "temperature", "From greedy decoding to sampling."),
}
_MODES = {"generate": "Generated text", "replay": "Replayed text", "batch": "Batches"}
_ABOUT = {
    "generate": "The model's own output. Where it repeats itself, methods that look back gain more than on other text.",
    "replay": "Held-out text is taken as the output, whatever the model would have said, so that loops of a small "
    "model flatter nobody. Candidates still come from the model's logits.",
    "batch": "Several prompts in one call.",
}


def heading(category: str) -> str:
    """A category as the head of a column."""
    return _HEADINGS.get(category, category.replace("_", " "))


def study_words(name: str) -> StudyWords:
    """The words of a study; of one that is not known its own name."""
    return _STUDIES.get(name, StudyWords(name.replace("_", " ").capitalize(), name.replace("_", " "), ""))


def mode_title(mode: str) -> str:
    """A mode as a heading."""
    return _MODES.get(mode, mode.capitalize())


def about(mode: str) -> str:
    """What the numbers of a mode are."""
    return _ABOUT.get(mode, "")


def findings(summary: Summary) -> list[str]:
    """The report in a few sentences, losses included."""
    found = [sentence for each in summary.main for sentence in _main_findings(each)]
    results = [result for each in summary.comparisons for result in each.results]
    checked = sum(result.compared for result in results)
    if checked:
        different = sum(len(result.divergences) for result in results)
        found.append(
            f"All {checked:,} outputs that were compared are identical to plain decoding's."
            if not different
            else f"{different:,} of {checked:,} outputs that were compared differ from plain decoding's."
        )
    failed = sum(len(result.failures) for result in results)
    return [*found, f"{_count(failed, 'run')} failed."] if failed else found


def _main_findings(found: Comparison) -> list[str]:
    raced = [each for each in found.results if each.speedup is not None and not each.is_baseline]
    if not raced or found.baseline is None:
        return []
    best = max(raced, key=lambda each: each.speedup or 0)
    won = (best.speedup or 0) > 1
    text = f"{mode_title(found.mode)}: "
    text += (
        f"{best.label} is fastest" if won else f"nothing is faster than {found.baseline.label}; next is {best.label}"
    )
    text += f", {best.speedup:.2f} times as fast" + (f" as {found.baseline.label}" if won else "")
    if best.mat is not None:
        text += f", with {best.mat:.2f} tokens a step"
    if best.mat_without_loops is not None and f"{best.mat_without_loops:.2f}" != f"{best.mat:.2f}":
        text += f" ({best.mat_without_loops:.2f} outside loops)"
    if best.spread is not None and len(best.pairs) > 1:
        text += f"; the prompts range from {best.spread.least:.2f} to {best.spread.most:.2f}"
    slower = [each.label for each in raced if (each.speedup or 0) < 1]
    return [f"{text}.", *([f"Slower than {found.baseline.label}: {'; '.join(slower)}."] if slower and won else [])]


def environment(known: dict[str, Any]) -> list[tuple[str, str]]:
    """An environment as names and texts; what is not known is left out."""
    size = known.get("parameters")
    model = [
        known.get("model"),
        f"{_short(size)} parameters" if size else None,
        known.get("dtype"),
        f"fingerprint {known['model_fingerprint']}" if known.get("model_fingerprint") else None,
    ]
    machine = [
        known.get("cpu") or known.get("machine"),
        _count(known["cores"], "core") if known.get("cores") else None,
        _count(known["threads"], "thread") if known.get("threads") else None,
        known.get("accelerator") or "no accelerator",
    ]
    software = [f"{name.replace('_', '-')} {known[name]}" for name in _SOFTWARE if known.get(name)]
    if known.get("commit"):
        software.append(f"commit {known['commit']}")
    return [
        (name, ", ".join(str(part) for part in parts if part))
        for name, parts in (("model", model), ("machine", machine), ("software", software))
    ]


def where(summary: Summary) -> str:
    """Model, machine and date in one line; how many environments there are if they differ."""
    if len(summary.environments) > 1:
        return f"{len(summary.environments)} environments"
    (known,) = summary.environments
    said = dict(environment(known))
    date = dict(settings(summary)).get("date")
    return " · ".join(part for part in (said["model"].partition(", fingerprint")[0], said["machine"], date) if part)


def settings(summary: Summary) -> list[tuple[str, str]]:
    """What was asked for, as names and texts."""
    main = [row for each in summary.main for result in each.results for row in result.rows] or summary.rows
    sets = Counter(prompt.rpartition("/")[0] for prompt in dict.fromkeys(row["prompt"] for row in main))
    repeats = sorted({len(row["total_seconds"]) for row in arithmetic.finished(summary.rows)})
    temperatures = sorted({row.get("temperature") or 0.0 for row in main})
    dates = sorted({str(row["environment"].get("date", ""))[:10] for row in summary.rows} - {""})
    lengths = sorted({row["max_new_tokens"] for row in main if row.get("max_new_tokens")})
    seeds = sorted({row["seed"] for row in main if row.get("seed") is not None})
    lines = [
        ("date", " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else ""),
        ("prompts", ", ".join(f"{count} of {name}" if name else str(count) for name, count in sets.items())),
        ("decoding", ", ".join("greedy" if not each else f"sampled at temperature {each:g}" for each in temperatures)),
        ("seed", ", ".join(map(str, seeds))),
        ("new tokens", "at most " + " or ".join(map(str, lengths)) if lengths else ""),
        ("repeats", " or ".join(map(str, repeats)) + _repeat_spread(summary)),
    ]
    return [line for line in lines if line[1]]


def _repeat_spread(summary: Summary) -> str:
    apart = arithmetic.repeat_spread(arithmetic.finished(summary.rows))
    return "" if apart is None else f"; slowest and fastest of a prompt lie {apart:.1%} apart (median)"


HOW = (
    "MAT is the mean number of tokens a step, the model's own token included: all tokens by all steps of the prompts "
    "together. Without loops: the same outside looping stretches of the output.",
    "Tokens/s: all tokens by the time of all prompts, of each prompt the median of its repeats; once for decoding "
    "alone, once for the whole call with the prompt's forward pass.",
    "Speedup: the baseline's time per token by the method's, whole call, over the prompts that both finished. "
    "Quartiles are those of the speedups prompt by prompt.",
    "Repeated 4-grams: share of the 4-grams that stood in the same output before.",
    "Identical: outputs equal to plain decoding's, token by token. Margin: the difference of the two logits where "
    "an output first differs.",
    "Methods took turns on every prompt, after a warm-up on prompts that are not measured. Failed runs are counted, "
    "and left out of the other figures.",
)


def warnings(summary: Summary) -> list[str]:
    """What a reader must know before believing the numbers."""
    found = [*summary.notes, *_environments_differ(summary), *_settings_differ(summary)]
    for each in summary.comparisons:
        place = _place(each)
        if each.study is None and each.baseline is None:
            found.append(f"{place}: no baseline was measured, so there are no speedups.")
        found += _incomplete(each, place)
    for each in summary.main:
        found += _repetitive(each)
    found += _far_divergences(summary)
    if summary.main and {each.mode for each in summary.main} == {"generate"}:
        found.append("No replay was measured: `--replay` shows what methods gain on text that the model did not write.")
    return found


def _place(found: Comparison) -> str:
    name = mode_title(found.mode)
    if found.study is not None:
        name += f", study {found.study}" + (f" at {found.point}" if found.point is not None else "")
    return name + (f" of {found.batch}" if found.mode == "batch" else "")


def _environments_differ(summary: Summary) -> list[str]:
    every = summary.environments
    if len(every) < 2:
        return []
    keys = dict.fromkeys(key for each in every for key in each)
    different = {key: list(dict.fromkeys(str(each.get(key)) for each in every)) for key in keys}
    named = "; ".join(f"{key}: {' or '.join(values)}" for key, values in different.items() if len(values) > 1)
    return [f"Rows come from {len(every)} environments ({named}). Times of different environments do not compare."]


def _settings_differ(summary: Summary) -> list[str]:
    found = []
    for each in summary.comparisons:
        rows = [row for result in each.results for row in result.rows]
        for key in ("temperature", "max_new_tokens", "seed"):
            values = sorted({str(row.get(key)) for row in rows})
            if len(values) > 1:
                found.append(f"{_place(each)}: rows differ in {key} ({', '.join(values)}).")
    return found


def _incomplete(found: Comparison, place: str) -> list[str]:
    counts = {each.label: len(each.rows) + len(each.failures) for each in found.results}
    most = max(counts.values())
    short = [f"{label} ({count})" for label, count in counts.items() if count < most]
    if not short:
        return []
    return [f"{place}: not every method has all {most} prompts yet: {', '.join(short)}. Their figures cover less."]


def _repetitive(found: Comparison) -> list[str]:
    share = max((each.repeated_4grams or 0.0 for each in found.results), default=0.0)
    if found.mode != "generate" or share <= REPETITIVE:
        return []
    return [
        f"Up to {share:.0%} of the 4-grams of the generated text are repetitions. This flatters every method that "
        "looks back: see MAT without loops, and replay."
    ]


def _far_divergences(summary: Summary) -> list[str]:
    far = [
        row
        for each in summary.comparisons
        for result in each.results
        for row in result.divergences
        if row["environment"].get("dtype") == "float32" and arithmetic.margin(row) > CLOSE
    ]
    if not far:
        return []
    names = ", ".join(dict.fromkeys(row["label"] for row in far))
    return [
        f"{_count(len(far), 'output')} in float32 {'differs' if len(far) == 1 else 'differ'} from plain decoding's by "
        f"more than rounding explains (margin above {CLOSE:g}): {names}. This is a mistake of the method: report it."
    ]


class Failure(NamedTuple):
    """Runs that failed alike: their messages differ in numbers only."""

    message: str
    """That of the first."""
    methods: list[str]
    """Labels."""
    prompts: int
    runs: int


def failures(results: Iterable[Result]) -> list[Failure]:
    """What failed, the most frequent first."""
    alike: dict[str, list[Row]] = {}
    for result in results:
        for row in result.failures:
            alike.setdefault(re.sub(r"\d+", "#", row["failure"]), []).append(row)
    found = [
        Failure(
            rows[0]["failure"],
            list(dict.fromkeys(row["label"] for row in rows)),
            len({row["prompt"] for row in rows}),
            len(rows),
        )
        for rows in alike.values()
    ]
    return sorted(found, key=lambda each: -each.runs)


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _short(number: int) -> str:
    for size, name in ((1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return f"{number:,}"
