"""Upper bound of a run's time: every method as slow as plain decoding, every output as long as allowed."""

from __future__ import annotations

import torch

from .items import Item, arguments
from .plan import BenchmarkPlan
from .prompts import BenchmarkConfig
from .runners import TransformersRunner

_PROMPT, _NEW = 256, 9


def seconds_of(config: BenchmarkConfig, plan: BenchmarkPlan, done: int) -> float:
    """Return the seconds for everything after the first `done` items, from the measured speed of `generate`."""
    left = list(plan.items())[done:]
    if not left:
        return 0.0
    per_prompt_token, per_new_token = _speeds(config)

    def once(item: Item) -> float:
        read = sum(len(config.ids(turn)) for question in item.questions for turn in question.turns)
        turns = max(len(question.turns) for question in item.questions)
        return read * per_prompt_token + turns * config.max_new_tokens * per_new_token

    seconds = sum(once(item) * len(workload.entries) for workload, item in left)
    for workload in plan.workloads:
        if any(one is workload for one, _ in left):
            learning = sum(entry.method.remembers and not entry.cold for entry in workload.entries)
            seconds += learning * sum(map(once, workload.warm_up))
    return seconds * config.repeats


def _speeds(config: BenchmarkConfig) -> tuple[float, float]:
    """Measure seconds of `generate` per prompt token and per new token, after a warm-up call."""
    length = min(_PROMPT, (config.context or 2 * _PROMPT) - _NEW)
    ids = torch.randint(0, config.model.get_input_embeddings().weight.shape[0], (max(1, length),))
    runner = TransformersRunner(config.model, {})
    asked = {**arguments(config, [ids], _NEW, {"do_sample": False}), "min_new_tokens": _NEW}
    runner.generate(asked)
    found = runner.generate(asked)
    return found.prefill_seconds / len(ids), found.seconds / max(1, found.steps - 1)
