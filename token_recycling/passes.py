"""One pass of the loop: a draft for every text, verified, and the accepted slots kept. The ordinary way to do it.

It takes drafts of any shape, texts of any number and every way of choosing tokens. `fast` has another way, of constant
shapes, for one text on an accelerator; the loop does not know which it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache

from .accept import accept_drawn, accept_greedy, accept_walk
from .cache import TreeCache
from .drafting import Context, Draft, Drafter, Step
from .stats import Clock
from .target import Target
from .templates import root_only
from .text import Chooser, Text


@dataclass(frozen=True)
class Run:
    """What a run of the loop works on: the prompt of every text is in the cache, but for its last token."""

    target: Target
    texts: Sequence[Text]
    drafter: Drafter
    choosers: Sequence[Chooser]
    cache: Cache
    clock: Clock

    def draft(self, row: int) -> Draft:
        """What to verify for a text."""
        text, chooser, drafter = self.texts[row], self.choosers[row], self.drafter
        tokens = text.on_host if drafter.on_host else text.tokens.to(self.target.device)
        draft = drafter.draft(Context(tokens, text.room, row, chooser.warp if chooser.sample else None))
        draft = draft.cut(self.depth_limit(row))
        return draft.cut(self.target.depth_limit(draft.tree, text.length - 1))

    def depth_limit(self, row: int) -> int:
        """How deep a node may stand: within the tokens still asked for, and within the positions that the model was
        made for.
        """
        text, longest = self.texts[row], self.target.max_length
        positions = longest - text.length if longest is not None else text.room
        return max(0, min(text.room - 1, positions))


class Passes(Protocol):
    """A way to make passes."""

    def step(self, going: Sequence[int]) -> list[Step]:
        """One pass over all texts: the steps of those that are `going`, trimmed at the end, with their slots kept."""

    def learn(self, step: Step) -> None:
        """Lets the drafter learn from a step."""

    def close(self) -> None:
        """After the last step, whether or not all texts have ended: leaves in the cache all but their last tokens."""

    def describe(self) -> str:
        """Which way this is and, if another one was asked for, why."""


class OrdinaryPasses:
    """Passes over drafts of any shape."""

    def __init__(self, run: Run, reason: str = "") -> None:
        """`reason`: why not another way."""
        self.run, self._reason = run, reason
        self._kept = TreeCache(run.cache)
        # Waiting for an accelerator costs more than reading all rows of logits there; on a CPU it is the other way
        # round.
        self._verify: Callable[..., Step] = accept_drawn if run.choosers[0].sample else accept_walk
        if run.choosers[0].greedy and run.target.device.type != "cpu":
            self._verify = accept_greedy

    def step(self, going: Sequence[int]) -> list[Step]:
        target, texts, cache, clock = self.run.target, self.run.texts, self.run.cache, self.run.clock
        rows = range(len(texts))
        # Of a text that has ended, its last token is given, which is not looked at.
        drafts = [self.run.draft(row) if row in going else Draft(root_only(), texts[row].tokens[-1:]) for row in rows]
        clock.lap("retrieve")
        target.cross([text.tokens for text in texts], cache)
        lengths, slots = [text.length - 1 for text in texts], cache.get_seq_length()
        # One that has ended may have no position left: it sees nothing, as if it began anew.
        inputs = target.inputs(drafts, [length * (row in going) for row, length in enumerate(lengths)], slots)
        clock.lap("prepare")
        logits, hidden = self._forward(inputs)
        clock.lap("forward")
        steps = [
            self._verify(
                drafts[row], logits[row, : len(drafts[row].tree)], texts[row].append, self.run.choosers[row], row
            )
            for row in going
        ]
        clock.lap("verify")
        if hidden is not None:
            steps = [replace(step, hidden=hidden[step.row, : len(step.draft.tree)]) for step in steps]
        accepted = {step.row: step.accepted for step in steps}
        self._kept.keep(slots, lengths, [accepted.get(row, []) for row in rows])
        clock.lap("update cache")
        return steps

    def _forward(self, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits (batch, n, vocabulary) and, where a drafter needs them, the hidden states (batch, n, hidden)."""
        if self.run.drafter.needs_hidden:
            return self.run.target.forward_with_hidden(inputs, self.run.cache)
        return self.run.target.forward(inputs, self.run.cache), None

    def learn(self, step: Step) -> None:
        self.run.drafter.observe(step)

    def close(self) -> None:
        """Nothing: the cache is up to date after every step."""

    def describe(self) -> str:
        return f"ordinary: {self._reason}" if self._reason else "ordinary"
