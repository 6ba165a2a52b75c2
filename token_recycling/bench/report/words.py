"""The text of a report: headings, environment, settings, and how it was measured."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, NamedTuple

from ..row_format import STOPPING
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
_SOFTWARE = ("python", "torch", "transformers", "token_recycling", "commit")


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
    STOPPING: StudyWords(
        "When to stop drafting",
        "draft",
        "A draft model at fixed lengths, stopped by a learned head at thresholds h, and by an oracle.",
    ),
}
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
    """The words of a study; of one that is not known its own name."""
    return _STUDIES.get(name, StudyWords(name.replace("_", " ").capitalize(), name.replace("_", " "), ""))


def mode_title(mode: str) -> str:
    """The heading of a mode."""
    return _MODES.get(mode, mode.capitalize())


def environment(known: dict[str, Any]) -> list[tuple[str, str]]:
    """An environment as names and texts; unknown values are left out."""
    size = known.get("parameters")
    fingerprint, cores, threads = (known.get(name) for name in ("model_fingerprint", "cores", "threads"))
    parts: dict[str, list[Any]] = {
        "model": [
            known.get("model"),
            size and f"{_short(size)} parameters",
            known.get("dtype"),
            fingerprint and f"fingerprint {fingerprint}",
        ],
        "machine": [
            known.get("cpu") or known.get("machine"),
            cores and count(cores, "core"),
            threads and count(threads, "thread"),
            known.get("accelerator") or "no accelerator",
        ],
        "software": [f"{name.replace('_', '-')} {known[name]}" for name in _SOFTWARE if known.get(name)],
    }
    return [(name, ", ".join(str(part) for part in said if part)) for name, said in parts.items()]


def title(summary: Summary) -> str:
    """What a report is called."""
    models = dict.fromkeys(str(each.get("model")) for each in summary.environments)
    return f"Decoding methods on {' and '.join(models)}"


def where(summary: Summary) -> str:
    """Model, machine and date in one line, as far as all rows agree; how many environments there are if they differ."""
    said = [dict(environment(known)) for known in summary.environments]
    several = f"{len(said)} environments" if len(said) > 1 else ""
    model, machine = ({each[name].partition(", fingerprint")[0] for each in said} for name in ("model", "machine"))
    agreed = ["".join(found) if len(found) == 1 else "" for found in (model, machine)]
    return " · ".join(part for part in (*agreed, several, dict(settings(summary)).get("date")) if part)


def settings(summary: Summary) -> list[tuple[str, str]]:
    """The settings of the run, as names and texts."""
    main = [row for each in summary.main for result in each.results for row in result.rows] or summary.rows
    finished = arithmetic.finished(summary.rows)
    # The prompts of a row are several in that of a batch.
    names = [row["prompt"].split("+") if row["batch"] > 1 else [row["prompt"]] for row in main]
    prompts = dict.fromkeys(itertools.chain(*names))
    sets = Counter(name.rpartition("/")[0] for name in prompts)
    repeats = sorted({len(row["total_seconds"]) for row in finished})
    apart = arithmetic.repeat_spread(finished)
    spread = "" if apart is None else f"; slowest and fastest of a prompt lie {apart:.1%} apart (median)"
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
        ("repeats", " or ".join(map(str, repeats)) + spread),
    ]
    return [line for line in lines if line[1]]


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


def count(number: int, thing: str) -> str:
    """A number of things."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def rate(value: float) -> str:
    """Tokens per second."""
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _short(number: int) -> str:
    for size, name in ((1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return f"{number:,}"
