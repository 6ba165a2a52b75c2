"""Drafting from the target's hidden states: what is known of them and not read yet, and how a text learns of more.

Whoever drafts so names the states in its traits (`DrafterTraits.states`); EAGLE heads, MTP layers and DFlash assistants
do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from ...draft import Step
from ...drafter import Drafter, TextDrafter


class UnreadStates:
    """The target's states (n, ...) at tokens of one text in a row, as far as a drafter has not read them."""

    def __init__(self, prompt: int) -> None:
        """`prompt`: tokens of the text as it begins."""
        self._unread: list[torch.Tensor] = []
        self._next = self.begin = prompt - 1
        """The place of the first of these, and that of the first token whose states were known."""

    def read_prompt(self, states: torch.Tensor) -> None:
        """Takes those of the tokens before the prompt's last one."""
        self._unread.append(states)
        self._next = self.begin = self.begin - len(states)

    def learn(self, states: torch.Tensor) -> None:
        """Takes those of the text's next tokens, all but its newest."""
        self._unread.append(states)

    @property
    def waits(self) -> bool:
        """Whether there are any."""
        return any(map(len, self._unread))

    def taken(self) -> torch.Tensor:
        """All of them, to be read now."""
        states, self._unread = torch.cat(self._unread), []
        return states


class StatesText(TextDrafter):
    """Drafts for one text from hidden states, and counts what that takes."""

    def __init__(self, drafter: Drafter, unread: UnreadStates) -> None:
        super().__init__(drafter)
        self._unread = unread
        self._counts: Counter[str] = Counter()
        """What `statistics` gives next."""

    def read_prompt(self, states: torch.Tensor) -> None:
        self._unread.read_prompt(states)

    def observe(self, step: Step) -> None:
        assert step.states is not None
        self._unread.learn(step.states[step.accepted])

    def statistics(self) -> Mapping[str, float]:
        counts, self._counts = self._counts, Counter()
        return counts
