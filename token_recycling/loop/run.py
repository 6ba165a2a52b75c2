"""State of one batched decode, and how its prompts are read before or with the first step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property

import torch
from transformers.cache_utils import Cache

from ..costs.costs import Costs
from ..drafters._base import TextDrafter
from ..drafters._pruning import prune
from ..model.inspection import layer_states
from ..model.prefill import Reading, prefill
from ..model.tree_model import TreeModel
from ..trees.draft import Draft
from ..trees.templates import root_only
from .stats import Clock
from .text import Row

_SHORT_PROMPT = 32
"""Unread tokens; a pass over so few takes about as long as one over a single token, and so do drafted rows in it."""


@dataclass
class Run:
    """State of one batched decode."""

    target: TreeModel
    rows: list[Row]
    costs: Costs
    cache: Cache
    clock: Clock
    streamed: bool = False
    """Whether somebody waits for the first token."""
    reading: Reading | None = None
    """Called before each piece of a prompt."""
    returns_cache: bool = True
    """Whether anybody reads the cache afterwards."""
    states_read: list[torch.Tensor] = field(default_factory=list)
    """(tokens, states * hidden) each: of what was read of a single text in pieces, where its drafter needs them."""

    @cached_property
    def prompt_alone(self) -> bool:
        """Whether the first step verifies no draft: its token is waited for, or the model reads drafts otherwise."""
        unread = self.rows[0].sequence.length - self.rows[0].held
        waited_for = self.streamed and self.reads_along and unread > _SHORT_PROMPT
        return waited_for or self.target.info.recurrent

    @property
    def reads_along(self) -> bool:
        """Whether the first step reads the prompt too: of one text, where the model computes alike at every length, or
        of any, where states over the text must be what `generate` has then.
        """
        if self.target.info.recurrent:
            return True
        return len(self.rows) == 1 and self.target.info.border is None

    @property
    def texts(self) -> list[torch.Tensor]:
        """(length,) each: the texts so far."""
        return [row.sequence.tokens for row in self.rows]

    def text_drafter(self, row: Row) -> TextDrafter:
        """Return a text's drafter, started when it is first needed."""
        return row.started(self.target, self.costs)

    def drafts(self, going: list[int]) -> list[Draft]:
        """A draft for each text that is `going`, a lone root for others; texts that share a pass share its nodes."""
        drafts = [Draft(root_only(), row.sequence.on_host[-1:]) for row in self.rows]
        for place in going:
            with self.rows[place].guarded():
                drafts[place] = self.rows[place].draft(self.target, self.costs)
        if len(drafts) > 1 and going and self.costs.asked:
            pruned = prune([drafts[place] for place in going], self.costs.by_nodes)
            for place, draft in zip(going, pruned, strict=True):
                drafts[place] = draft
        return drafts

    def states(self) -> AbstractContextManager[list[torch.Tensor] | None]:
        """Collect in a list the hidden states that drafters need, pass by pass; None if no drafter needs any."""
        wanted = next((row.traits.states for row in self.rows if row.traits.states is not None), None)
        return nullcontext() if wanted is None else layer_states(self.target.model, wanted)

    def prefill(self, most: int | None = None) -> None:
        """Put all of each text but its last token into the cache; of a single text at most `most` tokens more."""
        texts, held = self.texts, [row.held for row in self.rows]
        if most is not None:
            texts = [text[: there + most + 1] for text, there in zip(texts, held, strict=True)]
        with self.states() as passes:
            prefill(self.target, texts, self.cache, held, self.reading)
        unread = [len(text) - 1 - there for text, there in zip(texts, held, strict=True)]
        # Of all that was read, and no more: a family may leave states out, or read a long prompt anew.
        if passes and sum(states.shape[1] for states in passes) == max(unread):
            states = torch.cat(passes, dim=1).to(self.target.device)
            if most is not None:
                self.states_read.append(states[0])
            else:
                self.read_states([states[index, :count] for index, count in enumerate(unread)])
        for row, count in zip(self.rows, unread, strict=True):
            row.held += count

    def read_states(self, states: list[torch.Tensor]) -> None:
        """Give each drafter the hidden states (n, states * hidden) of its prompt: those of earlier pieces, then
        `states`.
        """
        for row, last in zip(self.rows, states, strict=True):
            with row.guarded():
                self.text_drafter(row).read_prompt(torch.cat([*self.states_read, last]))
        self.states_read.clear()


def places_left(rows: Sequence[Row], gone: Collection[Row]) -> list[int]:
    """Return for each place of a batch without the rows that are `gone` which row takes it: where one was removed, the
    last one.
    """
    order = list(range(len(rows)))
    for place in reversed(range(len(rows))):
        if rows[place] in gone:
            order[place] = order[-1]
            order.pop()
    return order


def check_held(held: int, length: int) -> None:
    """Raises ValueError for a cache of `held` tokens of a text that is no longer: its last token is the first root."""
    if held >= length:
        raise ValueError(
            f"expected a cache of fewer than the {length} tokens given, got one of {held}; pass the whole text so far"
        )
