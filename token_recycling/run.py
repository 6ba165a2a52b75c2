"""What a run of the loop works on: its texts, what drafts for them, and what a draft may be."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from transformers.cache_utils import Cache

from .draft import Context, Draft
from .drafter import Drafter, DrafterTraits, TextDrafter
from .model.inspection import layer_states
from .model.prefill import ObservePrompt, prefill
from .model.step_costs import StepCosts
from .model.tree_model import TreeModel
from .sequence import Sequence, TokenSelector
from .stats import Clock

_SHORT_PROMPT = 32
"""Unread tokens; a pass over so few takes about as long as one over a single token, and so do drafted rows in it."""


@dataclass(frozen=True)
class Run:
    """What a run of the loop works on."""

    target: TreeModel
    sequences: list[Sequence]
    prompts: list[torch.Tensor]
    """(length,) each: the texts as they begin."""
    drafter: Drafter
    costs: StepCosts
    selectors: list[TokenSelector]
    cache: Cache
    held: list[int]
    """How many tokens of each text the cache holds at first, from slot 0 on."""
    clock: Clock
    streamed: bool = False
    """Whether somebody waits for the first token."""

    @cached_property
    def traits(self) -> DrafterTraits:
        """What the drafter needs and can do."""
        return self.drafter.traits

    @cached_property
    def drafters(self) -> list[TextDrafter]:
        """What drafts for each text, started when it is first needed."""
        return [self.drafter.start(one.to(self.target.device), self.target, self.costs) for one in self.prompts]

    @property
    def reads_along(self) -> bool:
        """Whether the first step may read the prompt too: that of one text, from which nobody learns, where the model
        computes alike at every length; or of any where states over the text must be what `generate` has then.
        """
        if self.target.support.recurrent:
            return True
        return len(self.sequences) == 1 and not self.traits.learns_prompt and self.target.support.border is None

    @cached_property
    def prompt_alone(self) -> bool:
        """Whether the first step reads the prompt and no draft with it: because this would delay the first token, which
        is waited for, if the prompt is longer than drafts are, as far as the cache does not hold it; or because the
        model reads drafts in another way than prompts.
        """
        unread = self.sequences[0].length - self.held[0]
        waited_for = self.streamed and self.reads_along and unread > _SHORT_PROMPT
        return waited_for or self.target.support.recurrent

    def prefill(self) -> None:
        """Puts all of each text but its last token into the cache, as far as it is not there."""
        with self.states() as passes:
            prefill(self.target, self.texts, self.cache, self.observers, self.held)
        unread = [len(text) - 1 - held for text, held in zip(self.texts, self.held, strict=True)]
        # Of all that was read, and no more: a family may leave states out, or read a long prompt anew.
        if passes and sum(one.shape[1] for one in passes) == max(unread):
            states = torch.cat(passes, dim=1).to(self.target.device)
            for row, own in enumerate(unread):
                self.drafters[row].read_prompt(states[row, :own])

    @property
    def texts(self) -> list[torch.Tensor]:
        """(length,) each: the texts so far."""
        return [sequence.tokens for sequence in self.sequences]

    @property
    def observers(self) -> list[ObservePrompt] | None:
        """What is shown each prompt, if anything is."""
        return [one.observe_prompt for one in self.drafters] if self.traits.learns_prompt else None

    def states(self) -> AbstractContextManager[list[torch.Tensor] | None]:
        """Within it passes add the hidden states that the drafter needs to the list; None if it needs none."""
        wanted = self.traits.states
        return nullcontext() if wanted is None else layer_states(self.target.model, wanted)

    def draft(self, row: int) -> Draft:
        """What to verify for a text: the drafter's tree, as deep as it can be of use and is exact."""
        sequence = self.sequences[row]
        draft = self._asked(row, sequence.on_host if self.traits.on_host else sequence.tokens, sequence.room)
        root, newest = int(draft.tokens[0]), int(sequence.on_host[-1])
        if root != newest:
            raise ValueError(
                f"expected a draft whose root is the text's newest token, {newest}, got {root} from "
                f"{self.drafters[row].describe()}; give `context.root` as the first of the tokens"
            )
        draft = draft.cut(self.depth_limit(row))
        if not self.target.support.branches:
            draft = draft.chain()
        return draft if self.target.support.fits(sequence.length - 1, len(draft.tree)) else draft.cut(0)

    def draft_late(self) -> None:
        """Asks for the drafts behind prompts that were read alone, with room for no node: whatever a step is made of,
        a drafter is asked for a draft before it is shown the step.
        """
        for row, prompt in enumerate(self.prompts):
            self._asked(row, prompt, 1)

    def _asked(self, row: int, tokens: torch.Tensor, room: int) -> Draft:
        selector, device = self.selectors[row], "cpu" if self.traits.on_host else self.target.device
        return self.drafters[row].draft(Context(tokens.to(device), room, selector.warp if selector.sample else None))

    def depth_limit(self, row: int) -> int:
        """How deep a node may stand: within the tokens still wanted, and within the positions that the model was
        made for.
        """
        sequence, longest = self.sequences[row], self.target.max_length
        positions = longest - sequence.length if longest is not None else sequence.room
        return max(0, min(sequence.room - 1, positions))
