"""Measures one scenario: the bench of the package on its workload, prompt by prompt, until the time is over.

A folder with rows is gone on with, as `token-recycling bench` does; how many prompts were measured is no part of its
settings.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from token_recycling.bench.run import session
from token_recycling.bench.run.environment import environment
from token_recycling.bench.run.measure import WorkloadRun
from token_recycling.bench.run.methods import parse
from token_recycling.bench.run.plan import BenchmarkPlan, Entry, Workload
from token_recycling.bench.run.store import Store

from . import models, texts
from .first_token import FirstTokens
from .scenarios import METHODS, Scenario

_LEFT_OUT = dict.fromkeys(("tried", "accepted", "paths"))
"""Of the rows: what of a tree was accepted is not asked here, and would be the most of a row."""


def run(
    scenario: Scenario, folder: Path, data: Sequence[str], prompts: int | None, until: float, fresh: bool = False
) -> int:
    """Measures up to `prompts` prompts, until the time `until` of `time.monotonic`; returns how many items have rows.

    An item is a prompt, and where first tokens are timed a prompt of one length. Raises ValueError if the folder has
    rows of another run.
    """
    config = models.configured(scenario)
    entries = tuple(Entry(parse(spec), temperature=scenario.temperature) for spec in METHODS[scenario.mode])
    workload = Workload(scenario.mode, None, entries, texts.items(scenario, config, data))
    plan, here = BenchmarkPlan([workload]), environment(config.model, "SmolLM2-135M-Instruct")
    questions = [question for item in workload.items for question in item.questions]
    store = Store(folder, session.settings(config, questions, plan, here), plan, fresh)
    lengths = len(texts.LENGTHS) if scenario.mode == "first token" else 1
    last = len(workload.items) if prompts is None else min(lengths * prompts, len(workload.items))
    if store.done < last and time.monotonic() < until:
        measured = (
            FirstTokens(config, workload, here)
            if scenario.mode == "first token"
            else WorkloadRun(config, workload, here, hook=lambda _: None)
        )
        measured.prepare(store.done)
        while store.done < last and time.monotonic() < until:
            store.append([{**row, **_LEFT_OUT} for row in measured.rows_of(store.done)])
    return store.done
