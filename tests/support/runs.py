"""Runs of drafters in tests: a stream decoded to its end, a drafter started by hand, fixed costs.

Separate from `tiny`, which does not import the package and so works with an engine's own release of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny

import token_recycling as tr
from token_recycling import Draft
from token_recycling.costs import OnlineCurve
from token_recycling.drafters._base import Drafter, SequenceDrafter
from token_recycling.loop.pacer import Ledger, Overhead
from token_recycling.model.pass_times import PassTimes, shared_by
from token_recycling.model.target import Target


def decoded(
    model: Any, ids: torch.Tensor, drafter: Any, fast: bool = True, **arguments: Any
) -> tuple[list[int], tr.Stats]:
    """Return the tokens that `stream` emits, with captured passes by default, and the statistics."""
    stats = tr.Stats()
    steps = tr.stream(model, ids, drafter, fast=fast, stats=stats, **arguments)
    return [token for step in steps for token in step.tokens], stats


def plain(model: Any, ids: torch.Tensor, new: int = 20, **arguments: Any) -> list[int]:
    """Return the tokens that transformers' own `generate` adds to a prompt (1, n), greedy by default."""
    return model.generate(ids, max_new_tokens=new, **{"do_sample": False, **arguments})[0, ids.shape[1] :].tolist()


def check_perfect(counting: Any, drafter: Drafter, depth: int) -> tr.Stats:
    """Check a drafter that always predicts `depth` tokens of the counting llama correctly, up to the last token; return
    its statistics. In a batch the first step has a draft too, from the states of the prompt.
    """
    stats, prompts, noted = tr.Stats(), torch.tensor([[1, 2, 3], [7, 8, 9]]), recorded_drafts(drafter)
    ours = tr.generate(counting, prompts[:1], drafter=drafter, max_new_tokens=20, stats=stats)
    assert torch.equal(ours, counting.generate(prompts[:1], max_new_tokens=20))
    assert stats.steps == 2 + 19 // (depth + 1)
    passes = sum(counted for _, _, counted in noted.pop())
    assert passes in (0, stats.drafter_statistics.get("draft_forwards", passes)), "a fixed tree has no budget"
    tr.generate(counting, prompts, drafter=drafter, max_new_tokens=6, pad_token_id=0)
    first = [drafts[0][1].first_branch().tokens.tolist() for drafts in noted]
    assert first == [[*range(prompt[-1], prompt[-1] + depth + 1)] for prompt in prompts.tolist()]
    return stats


def begun(drafter: Drafter, prompt: torch.Tensor | list[int], target: Target) -> SequenceDrafter:
    """Start a drafter for a prompt, as the loop does."""
    prompt = torch.as_tensor(prompt)
    return drafter.start(prompt, target)


def recorded_drafts(drafter: Drafter) -> list[list[tuple[list[int], Draft, int]]]:
    """Record all future drafts: for each sequence that the drafter starts, a list of the tokens before, the draft, and
    the number of passes that its budget has counted.
    """
    found: list[list[tuple[list[int], Draft, int]]] = []
    start = drafter.start

    def started(*given: Any) -> SequenceDrafter:
        sequence = start(*given)
        drafts, draft = [], sequence.draft

        def noted(context: tr.Context) -> Draft:
            drafts.append((context.tokens.tolist(), draft(context), context.budget.passes))
            return drafts[-1][1]

        sequence.draft = noted  # type: ignore[method-assign]
        found.append(drafts)
        return sequence

    drafter.start = started  # type: ignore[method-assign]
    return found


def fix_costs(monkeypatch: pytest.MonkeyPatch, sizes: Sequence[int], seconds: Sequence[float]) -> None:
    """Fix the cost of forward passes at every length: times of some sizes, linearly interpolated."""
    times = np.interp(np.arange(1, sizes[-1] + 1), sizes, seconds)
    monkeypatch.setattr(PassTimes, "curve", lambda known, texts, length: OnlineCurve(shared_by(texts, times)))
    monkeypatch.setattr(OnlineCurve, "record_time", lambda *_: None)


def freeze_overhead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the drafting overhead to its expected value."""
    monkeypatch.setattr(Overhead, "count", lambda *_: None)


def fix_overhead(drafter: Any, step: float) -> None:
    """Fix the cost of drafting one step of one sequence, or of one pass of a drafter's model."""
    Ledger.of(drafter).overheads[1] = Overhead(step)


def check_same(
    model: Any, drafter: Any, ids: torch.Tensor, stats: tr.Stats | None = None, **arguments: Any
) -> tr.Stats:
    """Assert that `generate` with a drafter has the output and the final random state of the model alone; return the
    statistics.
    """
    stats = tr.Stats() if stats is None else stats
    wanted, state = tiny.seeded(model.generate, ids, **arguments)
    ours, our_state = tiny.seeded(tr.generate, model, ids, drafter=drafter, stats=stats, **arguments)
    assert torch.equal(ours, wanted)
    assert torch.equal(our_state, state)
    return stats


def drafts_of(model: Any, drafter: Any, ids: torch.Tensor, **arguments: Any) -> list[tuple[list[int], list[int]]]:
    """Return parents and tokens of the draft of every step."""
    steps = tr.stream(model, ids, drafter, **arguments)
    return [(step.draft.parents.tolist(), step.draft.tokens.tolist()) for step in steps]


def drafted_steps(model: Any, drafter: Any, prompt: torch.Tensor, **arguments: Any) -> list[tuple[list[int], tr.Step]]:
    """Return each step with the text before it."""
    text, found = prompt.flatten().tolist(), []
    for step in tr.stream(model, prompt, drafter, **arguments):
        found.append((list(text), step))
        text += step.tokens
    return found


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    """Return the tokens from the root, exclusive, to each node."""
    tokens = draft.tokens.tolist()
    return [tuple(tokens[above] for above in lineage[1:]) for lineage in draft.lineages]


def profitable_depths(
    monkeypatch: pytest.MonkeyPatch, model: Any, drafter: Any, price: float, seconds: Sequence[float]
) -> set[int]:
    """Return the depths of drafts for a counting llama if a pass of the drafter's module takes `price` and passes of
    the target over 1, 2, ... nodes take `seconds`; 0 stands for steps without a draft.
    """
    fix_costs(monkeypatch, range(1, len(seconds) + 1), seconds)
    freeze_overhead(monkeypatch)
    fix_overhead(drafter, price)
    steps = list(tr.stream(model, torch.tensor([[1, 2, 3]]), drafter, max_new_tokens=31))
    return {step.draft.depth for step in steps[1:-2]}
