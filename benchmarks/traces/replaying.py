"""Turns replayed: what is said is given, drafts and passes are real. Every method gives its steps.

With the model, a turn begins with what is kept of the turns before it (`model.prefixes`), as in the server. Methods
that look at no logits are replayed without it: what they draft follows from the text alone.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria

from token_recycling import Context, Drafter, Stats
from token_recycling.bench.run.replay import ReplaySelector
from token_recycling.costs.costs import Costs, OnlineCurve
from token_recycling.loop.known import Known
from token_recycling.loop.step import decode
from token_recycling.loop.text import Sequence
from token_recycling.model.kv_cache import TreeCache
from token_recycling.model.prefill import prefill
from token_recycling.model.prefixes import Prefixes
from token_recycling.model.tree_model import TreeModel
from token_recycling.trees.draft import Draft
from token_recycling.trees.templates import chain, root_only

from .turns import Turn


class Steps(NamedTuple):
    """Of one turn."""

    turn: Turn
    drafted: list[int]
    """Tokens, of each step."""
    emitted: list[int]
    seconds: float = 0.0
    """Of the processor, after the first step; 0 without a model."""


def with_model(target: TreeModel, drafter: Drafter, turn: Turn, prefixes: Prefixes, predicted: bool) -> Steps:
    """A turn by the target, with its prediction where it is `predicted`."""
    prompt, answer = torch.tensor(turn.prompt), torch.tensor(turn.answer)
    sequence = Sequence(prompt, StoppingCriteriaList([MaxLengthCriteria(len(prompt) + len(answer))]))
    cache, held = prefixes.take(prompt)
    known = Known(prediction=torch.tensor(turn.prediction) if predicted and turn.prediction else None)
    drafted, emitted, began = list[int](), list[int](), 0.0
    selectors: list = [ReplaySelector(sequence, answer)]
    for (step,) in decode(target, [sequence], drafter, selectors, cache, Stats(), held=[held], known=known):
        began = began or time.process_time()
        drafted.append(len(step.draft.tree) - 1)
        emitted.append(len(step.tokens))
    seconds = time.process_time() - began
    prefixes.keep(sequence.on_host, cache)
    return Steps(turn, drafted, emitted, seconds)


def without_model(drafter: Drafter, target: TreeModel, turn: Turn) -> Steps:
    """A turn for a drafter that looks at no logits."""
    curve = OnlineCurve(np.ones(64))
    text, tokens = torch.tensor(turn.prompt + turn.answer), len(turn.prompt)
    drafting = drafter.start(text[:tokens], target, Costs(lambda texts, length: curve, 1, tokens))
    drafted, emitted = list[int](), list[int]()
    while tokens < len(text):
        draft = drafting.draft(Context(text[:tokens], len(text) - tokens)).cut(len(text) - tokens - 1)
        following, carried = text[tokens:].tolist(), 0
        while carried + 1 < len(following) and draft.carrying(following[: carried + 1]):
            carried += 1
        drafted.append(len(draft.tree) - 1)
        emitted.append(carried + 1)
        tokens += carried + 1
    return Steps(turn, drafted, emitted)


def pass_costs(target: TreeModel, length: int = 1000, rounds: int = 5) -> np.ndarray:
    """(64,) float64: t(n) / t(1) of passes over chains of n nodes behind `length` tokens, in time of the processor."""
    sizes, cache = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64], target.new_cache()
    with torch.inference_mode(False), torch.no_grad():
        text = torch.randint(0, target.vocab_size, (length,))
        prefill(target, [text], cache)
        kept, times = TreeCache(cache), np.empty((rounds, len(sizes)))
        for turn in range(rounds):
            for place, size in enumerate(sizes):
                draft = Draft(chain(size - 1) if size > 1 else root_only(), torch.zeros(size, dtype=torch.long))
                began = time.process_time()
                target.forward(target.inputs.of([draft], [length - 1], length - 1), cache)
                times[turn, place] = time.process_time() - began
                kept.keep(length - 1, [length - 1], [[]])
    middle = np.maximum.accumulate(np.median(times, axis=0))
    return np.interp(np.arange(1, 65), sizes, middle / middle[0])
