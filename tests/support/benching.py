"""Benchmarks in tests: a tiny model, a few texts, and rows in a folder, with or without their measured times."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from transformers import PreTrainedModel

from token_recycling.bench.data import Question, RunOptions
from token_recycling.bench.environment import environment
from token_recycling.bench.measure import BenchmarkPlan, Hook, measure
from token_recycling.bench.measure import plan as plan_of
from token_recycling.bench.methods import Call, Outcome, parse
from token_recycling.bench.prompts import BenchmarkConfig
from token_recycling.bench.session import settings
from token_recycling.bench.store import Store, delete_rows
from token_recycling.model.target import Target

TEXTS = (
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))",
    "import os\nimport sys\n\nfor index in range(10):\n    print(index)",
    "for index in range(10):\n    for index in range(10):\n        print(index)",
    "import sys\n\ndef add(a, b):\n    return a + b\n",
)
NEW = 8
TIMES = {"last_prefill_seconds", "seconds", "prefill_seconds", "total_seconds", "processor_seconds", "parts"}


def questions(number: int = len(TEXTS), form: str = "text", references: tuple[str, ...] = ()) -> list[Question]:
    return [Question(f"texts/{place}", "texts", (text,), form, references) for place, text in enumerate(TEXTS[:number])]


def plan(
    methods: Sequence[str],
    asked: Sequence[Question],
    replay: bool | None = None,
    sizes: Sequence[int] = (),
) -> BenchmarkPlan:
    """Return the plan of `token-recycling bench`."""
    options = RunOptions(("texts",), None, tuple(methods), replay=replay, batches=tuple(sizes))
    return plan_of(options, asked)


def inject_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make token 65 the most probable one in every forward pass of the library."""

    def wrong(right: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def logits(self: Target, *inputs: Any, **more: Any) -> torch.Tensor:
            made = right(self, *inputs, **more).clone()
            made[..., 65] += 1000
            return made

        return logits

    for name in ("forward", "read"):
        monkeypatch.setattr(Target, name, wrong(getattr(Target, name)))


def setup(**options: Any) -> BenchmarkConfig:
    tokenizer = tiny.tokenizer()
    model = tiny.llama(vocab_size=len(tokenizer), **{"num_hidden_layers": 1, **options.pop("config", {})})
    return BenchmarkConfig(model, tokenizer, options.pop("max_new_tokens", NEW), **options)


def decoded(spec: str, model: PreTrainedModel, *prompts: torch.Tensor, tokens: int = 30, **sampling: Any) -> Outcome:
    """Return the outcome of a method for prompts (1, length)."""
    given = [prompt[0] for prompt in prompts]
    arguments = BenchmarkConfig(model, None, tokens).arguments(given, tokens)
    return parse(spec).decode(model, Call({**arguments, **sampling}))


def run(
    where: BenchmarkConfig, plan: BenchmarkPlan, folder: Path, hook: Hook = lambda _: None, fresh: bool = False
) -> list[dict]:
    """Measure the rows that are missing in the folder, and return all rows."""
    here = environment(where.model, "tiny")
    if fresh:
        delete_rows(folder)
    store = Store(folder, settings(where, [], plan, here), plan.keys())
    measure(where, plan, store, here, hook)
    return rows(folder)


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def without_times(found: list[dict]) -> list[dict]:
    """Return rows without the fields that differ from run to run."""
    return [{key: value for key, value in row.items() if key not in TIMES | {"environment"}} for row in found]


def by_method(found: list[dict], mode: str = "generate") -> dict[str, list[dict]]:
    kept: dict[str, list[dict]] = {}
    for row in found:
        if row["mode"] == mode:
            kept.setdefault(row["method"], []).append(row)
    return kept
