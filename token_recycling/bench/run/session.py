"""From the options of a user to a plan, and the settings that a resumed run must share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from .data import Question, digest
from .methods import DEFAULT, Method, parse
from .plan import BenchmarkPlan, Entry, batches, comparison
from .prompts import BenchmarkConfig, PromptTooLongError, prompt
from .studies import study

_SHARED = (
    *("machine", "cpu", "threads", "accelerator", "python", "torch", "transformers", "token_recycling"),
    *("model_fingerprint", "dtype", "commit"),
)
"""What of the environment must be the same."""
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NO_CHOICES = {"_from_model_config", "transformers_version", "use_cache", "output_attentions", "output_hidden_states"}
"""Of a generation configuration, what says nothing of how tokens are chosen."""


def methods(specs: Sequence[str]) -> list[Method]:
    """The methods that a user names; raises ValueError for one named twice, and as `parse` does."""
    doubled = next((spec for place, spec in enumerate(specs) if spec in specs[:place]), None)
    if doubled is not None:
        raise ValueError(f"expected every method once, got {doubled!r} twice")
    return [parse(spec) for spec in specs]


def plan(
    named: Sequence[Method],
    questions: Sequence[Question],
    replay: bool | None = None,
    studies: Sequence[str] = (),
    sizes: Sequence[int] = (),
    seed: int = 0,
) -> BenchmarkPlan:
    """The workloads of the studies and batches, if any, else of the main comparison; raises ValueError.

    `replay` None means where it is possible: everywhere but in batches.
    """
    if sizes and not studies and replay:
        raise ValueError("expected --replay without --batch: texts are replayed one at a time")
    made = BenchmarkPlan()
    for name in dict.fromkeys(studies):
        made.add(study(name, named, questions, replay is not False, seed))
    if sizes:
        made.add(batches(named or [one for one in map(parse, DEFAULT) if one.batches], questions, sizes))
    if not studies and not sizes:
        entries = [Entry(method) for method in named or map(parse, DEFAULT)]
        made.add(comparison(None, entries, questions, replay is not False))
    return made


def without_own_choices(model: PreTrainedModel) -> list[str]:
    """Takes all but the ids of tokens from the model's generation configuration; returns what else it said.

    Penalties and filters of a model's maker change which tokens are chosen, for all methods alike. Figures would be of
    these too, and not comparable with those of other models and of papers, which decode by the temperature alone.
    """
    own = model.generation_config.to_diff_dict()
    model.generation_config = GenerationConfig(**{name: own.pop(name, None) for name in _IDS})
    return [f"{name}={value}" for name, value in sorted(own.items()) if name not in _NO_CHOICES]


def what_does_not_fit(config: BenchmarkConfig, questions: Sequence[Question]) -> list[str]:
    """Sentences on the questions that will fail because their first turn is too long, and texts that are cut."""
    if config.context is None:
        return []
    failing = cut = 0
    for question in questions:
        try:
            ids, _ = prompt(config, question)
            cut += question.form == "text" and len(ids) < len(config.ids(question.turns[0]))
        except PromptTooLongError:
            failing += 1
    said = []
    if failing:
        said.append(
            f"{failing} of {len(questions)} questions are longer than the model's context of {config.context} tokens "
            "and count as failures"
        )
    if cut:
        said.append(f"{cut} of {len(questions)} texts are continued from an earlier place, so that they fit")
    return said


def settings(
    config: BenchmarkConfig, questions: Sequence[Question], made: BenchmarkPlan, environment: dict[str, Any]
) -> dict[str, Any]:
    """What must be equal for rows of two runs to stand in one folder; their file keeps its older names of keys."""
    return {
        "questions": f"{len(questions)}, {digest(questions)}",
        "courses": {
            f"{workload.mode}, {place}": {
                "study": workload.study,
                "contenders": [
                    " ".join(filter(None, (one.method.spec, one.point and f"at {one.point}")))
                    for one in workload.entries
                ],
                "items": len(workload.items),
            }
            for place, workload in enumerate(made.workloads)
        },
        "max_new_tokens": config.max_new_tokens,
        "repeats": config.repeats,
        "chat": config.chat,
        "seed": config.seed,
        **{name: environment[name] for name in _SHARED},
    }
