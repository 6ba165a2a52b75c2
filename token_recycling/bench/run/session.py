"""One run: its options become a plan, an estimate of its time, and rows in a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from transformers import GenerationConfig, PreTrainedModel

from ...model import loading
from ..scenario import RunOptions
from .data import Question, digest, load
from .environment import environment
from .estimate import seconds_of
from .measure import Hook, measure
from .methods import DEFAULT, Assisted, Cold, Method, Oracle, parse
from .plan import BenchmarkPlan, Entry, batches, comparison, replays
from .prompts import BenchmarkConfig, PromptTooLongError, prompt
from .store import Store, whole_items

_SHARED = (
    *("machine", "cpu", "threads", "accelerator", "python", "torch", "transformers", "token_recycling"),
    *("model_fingerprint", "dtype", "commit"),
)
"""Facts of the environment that must not change within a folder."""
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NO_CHOICES = {"_from_model_config", "transformers_version", "use_cache", "output_attentions", "output_hidden_states"}
"""Keys of a generation configuration that do not affect token selection."""


class Prepared(NamedTuple):
    """A run with its model loaded."""

    config: BenchmarkConfig
    plan: BenchmarkPlan
    environment: dict[str, Any]
    settings: dict[str, Any]


class Session:
    """One run. Its model is loaded for the estimate and again for the measurement, and cached while the next run shares
    it: models of several dtypes are never held at once.
    """

    def __init__(
        self, model: str, options: RunOptions, folder: Path, device: str | None = None, fresh: bool = False
    ) -> None:
        """Raise ValueError or OSError for what cannot be measured, and for a folder with rows of another run."""
        self.folder, self.options = folder, options
        self._model, self._device, self._fresh = model, device, fresh
        self.notes: list[str] = []
        """What was chosen or left out, for the user."""
        found = self._prepared()
        self.items = sum(1 for _ in found.plan.items())
        self.done = 0 if fresh else whole_items(folder, found.settings, found.plan)
        self.seconds_left = seconds_of(found.config, found.plan, self.done)
        """An upper bound: no method is faster than plain decoding."""

    def measure(self, hook_of: Callable[[BenchmarkPlan, int], Hook] = lambda plan, done: lambda event: None) -> None:
        """Measure what is missing in the folder; `hook_of` makes the hook called before and after every call."""
        found = self._prepared()
        store = Store(self.folder, found.settings, found.plan, self._fresh)
        try:
            measure(found.config, found.plan, store, found.environment, hook_of(found.plan, store.done))
        finally:
            self.done = store.done

    def _prepared(self) -> Prepared:
        options = self.options
        named = [parse(spec) for spec in options.methods]
        limit = None if options.limit is None else options.limit + options.warm_up
        for one in named:
            if isinstance(one, (Assisted, Oracle)):
                loading.check_source(one.folder)
        # Check data and plan before the model is loaded.
        plan(options, named, load(options.data, limit))
        loaded = _loaded(self._model, options.dtype, self._device, options.threads, options.prepack)
        chat = loading.uses_chat(loaded, options.chat)
        questions = load(options.data, limit, files="prompt" if chat else "text")
        made = plan(options, named, questions)
        config = BenchmarkConfig(loaded.model, loaded.tokenizer, options.max_new_tokens, chat, options.repeats)
        if chat and options.chat is None:
            self.notes.append("prompts go through the tokenizer's chat template; --raw gives them as they are")
        if own := without_own_choices(loaded.model):
            self.notes.append(f"left out of the model's own generation configuration: {', '.join(own)}")
        self.notes += [*made.notes, *what_does_not_fit(config, questions)]
        where = environment(loaded.model, self._model)
        return Prepared(config, made, where, settings(config, questions, made, where))


@lru_cache(maxsize=1)
def _loaded(
    model: str, dtype: str | None, device: str | None, threads: int | None, prepack: bool | None
) -> loading.Loaded:
    return loading.load(model, dtype, device, threads, prepack)


def plan(options: RunOptions, named: Sequence[Method], questions: Sequence[Question]) -> BenchmarkPlan:
    """Return the workloads: batches, if any are given, else the main comparison."""
    if options.batches:
        return batches(named or [one for one in map(parse, DEFAULT) if one.batches], questions, options.batches)
    entries = [
        Entry(one, options.cold or isinstance(one, Cold), options.temperature) for one in named or map(parse, DEFAULT)
    ]
    if not options.generate:
        return replays(entries, questions)
    return comparison(entries, questions, options.replay is not False and not options.temperature, options.warm_up)


def without_own_choices(model: PreTrainedModel) -> list[str]:
    """Remove everything but token ids from the model's generation configuration; return what it stated.

    A model's default penalties and filters change token selection for all methods alike. Figures would depend on them,
    and not compare with those of other models and of papers, which decode by temperature only.
    """
    own = model.generation_config.to_diff_dict()
    model.generation_config = GenerationConfig(**{name: own.pop(name, None) for name in _IDS})
    return [f"{name}={value}" for name, value in sorted(own.items()) if name not in _NO_CHOICES]


def what_does_not_fit(config: BenchmarkConfig, questions: Sequence[Question]) -> list[str]:
    """Return notes on questions whose first turn is too long, which will fail, and on texts that are cut."""
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
    """Return the settings that rows of one folder must share."""
    return {
        "questions": f"{len(questions)}, {digest(questions)}",
        "workloads": [
            [workload.mode, len(workload.items), *(one.method.spec + " cold" * one.cold for one in workload.entries)]
            for workload in made.workloads
        ],
        "max_new_tokens": config.max_new_tokens,
        "repeats": config.repeats,
        "chat": config.chat,
        "seed": config.seed,
        **{name: environment[name] for name in _SHARED},
    }
