"""Names and sentences of a report: headings, environment, settings, how it was measured."""

from __future__ import annotations

from typing import Any

import pandas as pd

from ..row_format import CLOCKS
from . import arithmetic
from .summary import Comparison, Summary

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


def heading(category: str) -> str:
    """The column head of a category."""
    return _HEADINGS.get(category, category.replace("_", " "))


def mode_title(mode: str) -> str:
    """The heading of a mode."""
    return _MODES.get(mode, mode.capitalize())


def place(found: Comparison) -> str:
    """Where in the report a comparison stands."""
    batch = f"{found.batch} prompts" if found.mode == "batch" else ""
    return ", ".join(filter(None, (found.run, mode_title(found.mode), batch)))


def clock_words(clock: str) -> str:
    """What times were measured with."""
    return "by processor time" if clock == "processor" else "by elapsed time"


def timed(clock: str) -> str:
    """What tokens/s are of: processor time is known of whole calls alone."""
    return "decoding" if clock == "wall" else "whole calls"


def count(number: int, thing: str) -> str:
    """A number of things."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def title(summary: Summary) -> str:
    """The heading of a report; it names a clock that is not the usual one."""
    models = dict.fromkeys(str(each.get("model")) for each in summary.environments)
    clock = "" if summary.clock == "wall" else f", {clock_words(summary.clock)}"
    return f"Decoding methods on {' and '.join(models)}{clock}"


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


def settings(summary: Summary) -> list[tuple[str, str]]:
    """The settings of the run, as names and texts."""
    rows = summary.rows
    main = rows[rows["mode"] != "batch"]
    main = main if len(main) else rows
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
