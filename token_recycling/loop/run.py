"""What a run of the loop works on: its texts, what drafts for them, and what a draft may be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from transformers.cache_utils import Cache

from ..costs.budget import paying_size
from ..drafters._base import Drafter, DrafterTraits, TextDrafter
from ..model.inspection import layer_states
from ..model.prefill import ObservePrompt, prefill
from ..model.step_costs import StepCosts
from ..model.tree_model import TreeModel
from ..trees.draft import Context, Draft, Step
from ..trees.templates import root_only
from .stats import Clock, Stats
from .text import Draws, Sequence, TokenSelector

_SHORT_PROMPT = 32
"""Unread tokens; a pass over so few takes about as long as one over a single token, and so do drafted rows in it."""


@dataclass(eq=False)
class Row:
    """One text of a run, a row of its passes."""

    sequence: Sequence
    selector: TokenSelector
    drafter: Drafter
    stats: Stats
    held: int = 0
    """How many of its tokens the cache holds before its prompt is read, from slot 0 on."""
    draws: Draws | None = None
    """Random numbers of its own, if it has some."""
    error: Exception | None = field(default=None, init=False)
    """What ended it, where that was not its own end."""

    def __post_init__(self) -> None:
        self.prompt = self.sequence.tokens
        """(length,) int64: the text as it begins."""
        self.traits: DrafterTraits = self.drafter.traits
        """What its drafter needs and can do."""
        self.drafting: TextDrafter | None = None
        """What drafts for it, once it was started."""

    @property
    def going(self) -> bool:
        """Whether more will be said."""
        return self.error is None and not self.sequence.ended


@dataclass
class Run:
    """What a run of the loop works on."""

    target: TreeModel
    rows: list[Row]
    costs: StepCosts
    cache: Cache
    clock: Clock
    streamed: bool = False
    """Whether somebody waits for the first token."""
    apart: bool = False
    """Whether what fails for one text ends that text alone."""

    @cached_property
    def prompt_alone(self) -> bool:
        """Whether the first step reads the prompt and no draft with it: because this would delay the first token, which
        is waited for, if the prompt is longer than drafts are, as far as the cache does not hold it; or because the
        model reads drafts in another way than prompts.
        """
        unread = self.rows[0].sequence.length - self.rows[0].held
        waited_for = self.streamed and self.reads_along and unread > _SHORT_PROMPT
        return waited_for or self.target.support.recurrent

    @property
    def reads_along(self) -> bool:
        """Whether the first step may read the prompt too: that of one text, from which nobody learns, where the model
        computes alike at every length; or of any where states over the text must be what `generate` has then.
        """
        if self.target.support.recurrent:
            return True
        return len(self.rows) == 1 and not self.rows[0].traits.learns_prompt and self.target.support.border is None

    def prefill(self, most: int | None = None) -> None:
        """Puts all of each text but its last token into the cache, as far as it is not there; of a single text at
        `most` so many tokens.
        """
        texts, held = self.texts, [row.held for row in self.rows]
        if most is not None:
            texts = [text[: there + most + 1] for text, there in zip(texts, held, strict=True)]
        with self.states() as passes:
            prefill(self.target, texts, self.cache, self.observers, held)
        unread = [len(text) - 1 - there for text, there in zip(texts, held, strict=True)]
        # Of all that was read, and no more: a family may leave states out, or read a long prompt anew.
        if passes and sum(one.shape[1] for one in passes) == max(unread):
            states = torch.cat(passes, dim=1).to(self.target.device)
            for row, own in enumerate(unread):
                self.drafting(row).read_prompt(states[row, :own])
        for one, own in zip(self.rows, unread, strict=True):
            one.held += own

    @property
    def texts(self) -> list[torch.Tensor]:
        """(length,) each: the texts so far."""
        return [row.sequence.tokens for row in self.rows]

    @property
    def observers(self) -> list[ObservePrompt] | None:
        """What is shown each prompt, if anything is."""
        if not self.rows[0].traits.learns_prompt:
            return None
        return [self.drafting(row).observe_prompt for row in range(len(self.rows))]

    def states(self) -> AbstractContextManager[list[torch.Tensor] | None]:
        """Within it passes add the hidden states that drafters need to the list; None if none needs any."""
        wanted = next((row.traits.states for row in self.rows if row.traits.states is not None), None)
        return nullcontext() if wanted is None else layer_states(self.target.model, wanted)

    @contextmanager
    def own(self, row: Row) -> Iterator[None]:
        """What is done for one text: with its own random numbers, if it has some; and what fails ends that text alone,
        where texts are apart.
        """
        try:
            with row.draws or nullcontext():
                yield
        except Exception as error:
            if not self.apart:
                raise
            row.error = error

    def drafting(self, row: int) -> TextDrafter:
        """What drafts for a text, started when it is first needed."""
        own = self.rows[row]
        if own.drafting is None:
            own.drafting = own.drafter.start(own.prompt.to(self.target.device), self.target, self.costs)
        return own.drafting

    def drafts(self, drafting: list[int]) -> list[Draft]:
        """What to verify for each text: nothing, for those that are not `drafting`; and of the others' drafts as many
        nodes as pay for all together.
        """
        # Of a text that has ended, its last token is given, which is not looked at.
        drafts = [Draft(root_only(), row.sequence.tokens[-1:]) for row in self.rows]
        for row in drafting:
            with self.own(self.rows[row]):
                drafts[row] = self.draft(row)
        return self._divided(drafts, drafting) if len(drafts) > 1 and self.costs.asked else drafts

    def _divided(self, drafts: list[Draft], drafting: list[int]) -> list[Draft]:
        """The likeliest nodes of each draft: as many of every text as bring all that are `drafting` together the most
        tokens per time. A pass takes as long as if all texts had as many nodes as the one that has most. A draft that
        says nothing of how likely its nodes are, or was drawn, stays whole.
        """
        chances = {row: None if drafts[row].drawn_from else drafts[row].chances for row in drafting}
        whole = max((len(drafts[row].tree) for row, own in chances.items() if own is None), default=1)
        known = [np.ones(1) if own is None else own for own in chances.values()]
        size = paying_size(known, self.costs.by_nodes, whole)
        for row, own in chances.items():
            if own is not None and len(own) > size:
                likeliest = np.argsort(-own, kind="stable")[:size]
                drafts[row] = drafts[row].part(sorted(likeliest.tolist()))
        return drafts

    def draft(self, row: int) -> Draft:
        """What to verify for a text: the drafter's tree, as deep as it can be of use and is exact."""
        own = self.rows[row]
        sequence = own.sequence
        draft = self._asked(row, sequence.on_host if own.traits.on_host else sequence.tokens, sequence.room)
        root, newest = int(draft.tokens[0]), int(sequence.on_host[-1])
        if root != newest:
            raise ValueError(
                f"expected a draft whose root is the text's newest token, {newest}, got {root} from "
                f"{self.drafting(row).describe()}; give `context.root` as the first of the tokens"
            )
        draft = draft.cut(self.depth_limit(row))
        if not self.target.support.branches:
            draft = draft.chain()
        return draft if self.target.support.fits(sequence.length - 1, len(draft.tree)) else draft.cut(0)

    def draft_late(self, row: int) -> None:
        """Asks for the draft behind a prompt that was read alone, with room for no node: whatever a step is made of, a
        drafter is asked for a draft before it is shown the step.
        """
        self._asked(row, self.rows[row].prompt, 1)

    def _asked(self, row: int, tokens: torch.Tensor, room: int) -> Draft:
        own = self.rows[row]
        device = "cpu" if own.traits.on_host else self.target.device
        warp = own.selector.warp if own.selector.sample else None
        return self.drafting(row).draft(Context(tokens.to(device), room, warp))

    def depth_limit(self, row: int) -> int:
        """How deep a node may stand: within the tokens still wanted, and within the positions that the model was
        made for.
        """
        sequence, longest = self.rows[row].sequence, self.target.max_length
        positions = longest - sequence.length if longest is not None else sequence.room
        return max(0, min(sequence.room - 1, positions))

    def count(self, steps: list[Step]) -> None:
        """Counts the steps of one pass, and what it took."""
        for step in steps:
            self.rows[step.row].stats.count(step)
        self.costs.nodes = max((len(step.draft.tree) for step in steps), default=1)
        if self.clock.reads_prompt:
            self.clock.reads_prompt = False
            for step in steps:
                self.rows[step.row].stats.first_tokens += len(step.tokens)
        elif steps:
            longest = max(self.rows[step.row].sequence.length for step in steps)
            self.costs.took(self.costs.nodes, self.clock.pass_seconds, longest)

    def count_drafting(self) -> None:
        """Counts what drafters have learned."""
        for row in self.rows:
            if row.drafting is not None:
                row.stats.drafter_statistics.update(row.drafting.statistics())
                row.stats.drafter = row.stats.drafter or row.drafting.describe()
        self.clock.lap("update matrix")
