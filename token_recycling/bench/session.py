"""One run: converts its options to a plan and a time estimate, and writes rows into a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..model import loading
from .data import BASELINE, Question, RunOptions, digest, load
from .environment import environment
from .measure import BenchmarkPlan, Hook, Item, measure, plan
from .methods import Call, parse
from .prompts import BenchmarkConfig, PromptTooLongError, prompt
from .store import Store, delete_rows

_SHARED = (
    *("machine", "cpu", "threads", "accelerator", "python", "torch", "transformers", "token_recycling"),
    *("model_fingerprint", "dtype", "commit"),
)
"""Keys of the environment that must not change within a folder."""
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NO_CHOICES = {"_from_model_config", "transformers_version", "use_cache", "output_attentions", "output_hidden_states"}
"""Keys of a generation configuration that do not affect token selection."""


class Prepared(NamedTuple):
    """A run with its model loaded."""

    config: BenchmarkConfig
    plan: BenchmarkPlan
    environment: dict[str, Any]
    store: Store


class Session:
    """One run. The model is loaded for the estimate and again for the measurement, and cached while the next run uses
    the same model: models of several dtypes are never in memory simultaneously.
    """

    def __init__(
        self, model: str, options: RunOptions, folder: Path, device: str | None = None, fresh: bool = False
    ) -> None:
        """Prepare the run; raises ValueError or OSError if it cannot be measured, or if the folder has rows of another
        run, which `fresh` deletes.
        """
        self.folder, self.options = folder, options
        self._model, self._device, self._fresh = model, device, fresh
        self.notes: list[str] = []
        """Notes for the user on automatic choices and omissions."""
        prepared = self._prepared()
        self.items, self.done = len(prepared.plan.keys()), prepared.store.done
        self.seconds_left = seconds_of(prepared.config, prepared.plan, self.done)
        """Upper bound, which assumes that no method is faster than plain decoding."""

    def measure(
        self, hook_of: Callable[[BenchmarkPlan, int], Hook] = lambda benchmark, done: lambda event: None
    ) -> None:
        """Measure items missing in the folder; `hook_of` creates the hook that is called before and after each call."""
        config, benchmark, where, store = self._prepared()
        try:
            measure(config, benchmark, store, where, hook_of(benchmark, store.done))
        finally:
            self.done = store.done

    def _prepared(self) -> Prepared:
        options = self.options
        limit = None if options.limit is None else options.limit + options.warm_up
        for spec in options.methods:
            if draft_model := parse(spec).draft_model:
                loading.check_source(draft_model)
        # Check data and plan before loading the model.
        plan(options, load(options.data, limit))
        loaded = _loaded(self._model, options.dtype, self._device, options.threads, options.prepack)
        chat = loading.uses_chat(loaded, options.chat)
        questions = load(options.data, limit, files="prompt" if chat else "text")
        benchmark = plan(options, questions)
        config = BenchmarkConfig(
            loaded.model,
            loaded.tokenizer,
            options.max_new_tokens,
            chat,
            options.repeats,
            temperature=options.temperature,
        )
        if chat and options.chat is None:
            self.notes.append("prompts go through the tokenizer's chat template; --raw passes them unchanged")
        if own := without_own_choices(loaded.model):
            self.notes.append(f"ignored settings of the model's own generation configuration: {', '.join(own)}")
        self.notes += [*benchmark.notes, *notes_on_length(config, questions)]
        where = environment(loaded.model, self._model)
        if self._fresh:
            delete_rows(self.folder)
        store = Store(self.folder, settings(config, questions, benchmark, where), benchmark.keys())
        return Prepared(config, benchmark, where, store)


@lru_cache(maxsize=1)
def _loaded(
    model: str, dtype: str | None, device: str | None, threads: int | None, prepack: bool | None
) -> loading.Loaded:
    return loading.load(model, dtype, device, threads, prepack)


def without_own_choices(model: PreTrainedModel) -> list[str]:
    """Remove everything except token ids from the model's generation configuration; return the removed settings.

    A model's default penalties and filters change token selection for all methods alike. Figures would depend on them
    and would not be comparable with other models and with papers, which decode with a temperature only.
    """
    own = model.generation_config.to_diff_dict()
    model.generation_config = GenerationConfig(**{name: own.pop(name, None) for name in _IDS})
    return [f"{name}={value}" for name, value in sorted(own.items()) if name not in _NO_CHOICES]


def notes_on_length(config: BenchmarkConfig, questions: Sequence[Question]) -> list[str]:
    """Return notes on questions that will fail because their first turn is too long, and on texts that are cut."""
    if config.context is None:
        return []
    failing = cut = 0
    for question in questions:
        try:
            ids, _ = prompt(config, question)
            cut += question.form == "text" and len(ids) < len(config.ids(question.turns[0]))
        except PromptTooLongError:
            failing += 1
    notes = []
    if failing:
        notes.append(
            f"{failing} of {len(questions)} questions are longer than the model's context of {config.context} tokens "
            "and count as failures"
        )
    if cut:
        notes.append(f"{cut} of {len(questions)} texts are cut and continued from an earlier token to fit the context")
    return notes


def settings(
    config: BenchmarkConfig, questions: Sequence[Question], benchmark: BenchmarkPlan, environment: dict[str, Any]
) -> dict[str, Any]:
    """Return the settings that all rows of a folder must share."""
    return {
        "questions": f"{len(questions)}, {digest(questions)}",
        "workloads": [[workload.mode, len(workload.items), *workload.specs] for workload in benchmark.workloads],
        "max_new_tokens": config.max_new_tokens,
        "repeats": config.repeats,
        "chat": config.chat,
        "seed": config.seed,
        "temperature": config.temperature,
        **{name: environment[name] for name in _SHARED},
    }


_ESTIMATED_PROMPT, _ESTIMATED_TOKENS = 256, 9


def seconds_of(config: BenchmarkConfig, benchmark: BenchmarkPlan, done: int) -> float:
    """Return an upper bound of the seconds for all items after the first `done`, if every method is as slow as
    `generate` and every output has the maximum length.
    """
    remaining = list(benchmark.items())[done:]
    if not remaining:
        return 0.0
    per_prompt_token, per_new_token = _speeds(config)

    def once(item: Item) -> float:
        prompt_tokens = sum(len(config.ids(turn)) for question in item.questions for turn in question.turns)
        turns = max(len(question.turns) for question in item.questions)
        return prompt_tokens * per_prompt_token + turns * config.max_new_tokens * per_new_token

    seconds = sum(once(item) * len(workload.specs) for workload, item in remaining)
    for workload in benchmark.workloads:
        if any(other is workload for other, _ in remaining):
            methods = map(parse, workload.specs)
            learning = sum(method.remembers and not method.cold for method in methods)
            seconds += learning * sum(map(once, workload.warm_up))
    return seconds * config.repeats


def _speeds(config: BenchmarkConfig) -> tuple[float, float]:
    """Measure seconds of `generate` per prompt token and per new token, after a warm-up call."""
    length = max(1, min(_ESTIMATED_PROMPT, (config.context or 2 * _ESTIMATED_PROMPT) - _ESTIMATED_TOKENS))
    ids = torch.randint(0, config.model.get_input_embeddings().weight.shape[0], (length,))
    greedy = replace(config, temperature=0.0)
    call = Call(
        {**greedy.arguments([ids], _ESTIMATED_TOKENS), "min_new_tokens": _ESTIMATED_TOKENS},
    )
    parse(BASELINE).decode(config.model, call)
    outcome = parse(BASELINE).decode(config.model, call)
    return outcome.prefill_seconds / len(ids), outcome.seconds / max(1, outcome.steps - 1)
