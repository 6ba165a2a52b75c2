"""How long a run takes at most: every method as slow as plain decoding, every output as long as it may be."""

from __future__ import annotations

import torch

from .items import arguments
from .plan import BenchmarkPlan
from .prompts import BenchmarkConfig
from .runners import TransformersRunner

_PROMPT, _NEW = 256, 9


def seconds_of(config: BenchmarkConfig, plan: BenchmarkPlan, done: int) -> float:
    """Seconds for what follows the first `done` items, from the speed of `generate` as measured now."""
    left = list(plan.items())[done:]
    if not left:
        return 0.0
    per_prompt_token, per_new_token = _speeds(config)
    seconds = 0.0
    warm_up = [(workload, item) for workload in {id(one): one for one, _ in left}.values() for item in workload.warm_up]
    for workload, item in (*warm_up, *left):
        read = sum(len(config.ids(turn)) for question in item.questions for turn in question.turns)
        turns = max(len(question.turns) for question in item.questions)
        one = read * per_prompt_token + turns * config.max_new_tokens * per_new_token
        learning = sum(one.method.remembers and not one.cold for one in workload.entries)
        seconds += one * (learning if item in workload.warm_up else len(workload.entries))
    return seconds * config.repeats


def _speeds(config: BenchmarkConfig) -> tuple[float, float]:
    """Seconds of `generate` for a token of the prompt, and for a new one, after a first call, which costs extra."""
    length = min(_PROMPT, (config.context or 2 * _PROMPT) - _NEW)
    ids = torch.randint(0, config.model.get_input_embeddings().weight.shape[0], (max(1, length),))
    runner = TransformersRunner(config.model, {})
    asked = {**arguments(config, [ids], _NEW, {"do_sample": False}), "min_new_tokens": _NEW}
    runner.generate(asked)
    found = runner.generate(asked)
    return found.prefill_seconds / len(ids), found.seconds / max(1, found.steps - 1)
