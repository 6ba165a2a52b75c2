"""The text of a report: headings, environment, settings, and how it was measured."""

from __future__ import annotations

from typing import Any, NamedTuple

import pandas as pd

from ..row_format import CLOCKS, STOPPING
from . import arithmetic
from .summary import Summary

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
    STOPPING: StudyWords("When to stop drafting", "draft", "Fixed lengths, thresholds h of a learned head, an oracle."),
}
"""Of studies whose name does not say enough."""
_MODES = {"generate": "Generated text", "replay": "Replayed text", "batch": "Batches"}
ABOUT = {
    "generate": "The model's own output. Where it repeats itself, methods that look back gain more than on other text.",
    "replay": "Held-out text is taken as the output, whatever the model would have said, so that loops of a small "
    "model flatter nobody. Candidates still come from the model's logits.",
    "batch": "Several prompts in one call.",
}
"""What the numbers of a mode mean."""


def heading(category: str) -> str:
    """The column head of a category."""
    return _HEADINGS.get(category, category.replace("_", " "))


def study_words(name: str) -> StudyWords:
    """The words of a study; its own name if it is not known."""
    return _STUDIES.get(name, StudyWords(name.replace("_", " ").capitalize(), name.replace("_", " "), ""))


def mode_title(mode: str) -> str:
    """The heading of a mode."""
    return _MODES.get(mode, mode.capitalize())


def clock_words(clock: str) -> str:
    """What times were measured with."""
    return "by processor time" if clock == "processor" else "by elapsed time"


def timed(clock: str) -> str:
    """What tokens/s are of: processor time is known of whole calls alone."""
    return "decoding" if clock == "wall" else "whole calls"


def environment(known: dict[str, Any]) -> list[tuple[str, str]]:
    """An environment as names and texts; unknown values are left out."""
    known = {"accelerator": "none", **{key: value for key, value in known.items() if value is not None}}

    def named(*names: str) -> list[str]:
        return [f"{name.replace('_', '-')} {known[name]}" for name in names if name in known]

    size = f"{known['parameters'] / 1e6:,.3g} million parameters" if "parameters" in known else ""
    parts: dict[str, list[Any]] = {
        "model": [known.get("model"), size, known.get("dtype"), known.get("model_fingerprint")],
        "machine": [known.get("cpu", known.get("machine")), *named("cores", "threads", "accelerator")],
        "software": named("python", "torch", "transformers", "token_recycling", "commit"),
    }
    return [(name, ", ".join(str(text) for text in texts if text)) for name, texts in parts.items()]


def title(summary: Summary) -> str:
    """The heading of a report; it names a clock that is not the usual one."""
    models = dict.fromkeys(str(each.get("model")) for each in summary.environments)
    clock = "" if summary.clock == "wall" else f", {clock_words(summary.clock)}"
    return f"Decoding methods on {' and '.join(models)}{clock}"


def settings(summary: Summary) -> list[tuple[str, str]]:
    """The settings of the run, as names and texts."""
    rows = summary.rows
    main = rows[rows["study"].isna() & (rows["mode"] != "batch")]
    main = main if len(main) else rows
    # The prompts of a row are several in that of a batch.
    names = main["prompt"].str.split("+").where(main["batch"] > 1, main["prompt"]).explode().drop_duplicates()
    sets = names.str.rpartition("/")[0].value_counts(sort=False)
    times = arithmetic.finished(rows)[CLOCKS[summary.clock][1]]
    apart = arithmetic.repeat_spread(times)
    dates = sorted({str(known.get("date", ""))[:10] for known in rows["environment"]} - {""})
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


HOW = (
    "MAT: tokens a step, the model's own included; all tokens by all steps of the prompts together. Without loops: the "
    "same outside looping stretches of the output.",
    "Tokens/s: all tokens by the time of all prompts, of each prompt the median of its repeats. Speedup: the "
    "baseline's time per token by the method's, whole call, over the prompts that both finished.",
    "Methods took turns on every prompt, after a warm-up on prompts that are not measured. Failed runs are counted, "
    "and left out of the other figures.",
)


def count(number: int, thing: str) -> str:
    """A number of things."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
