"""What a drafter is: it proposes what the target may say next, and learns from what it said.

A drafter is one file in `token_recycling/drafters/`, or a folder where it has parts, with one `Drafter` class in it;
`registry` finds it by its name. What it needs of the loop and what it can do is declared in one value, its
`DrafterTraits`, so that the loop never asks for names.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from .draft import Context, Draft, Retrieval, Step

if TYPE_CHECKING:
    from .model.pass_costs import PassCosts
    from .model.tree_model import TreeModel


@dataclass(frozen=True)
class DrafterTraits:
    """What a drafter needs, and what it can do."""

    learns_prompt: bool = False
    """Needs the logits after every token of the prompt; they cost the target's output layer on each."""
    hidden_states: bool = False
    """Needs the target's last hidden states of each step (`Step.hidden`)."""
    on_host: bool = False
    """Drafts from the text in the memory of the host: on an accelerator `Context.tokens` is not copied there."""
    top_k: int = 0
    """Likeliest tokens after every node that it asks each step for, `step.top(k)`; 0 if none."""
    draws: bool = False
    """May draw tokens at random where the text is sampled (`Draft.drawn_from`)."""
    retrieval: Retrieval | None = None
    """A template and its matrix, if drafting and learning are nothing but looking up and overwriting its rows: then a
    device can do both by itself, and `draft` and `observe` are called only where it does not. Read after `start`.
    """


class Drafter:
    """Proposes what the target may say next, and learns from what it said.

    Subclasses are dataclasses; their public fields are options. A drafter may keep what it learned from text to text
    (*hot start*). It must draft from its own state and the context alone, never touch the target's cache, and give the
    context's last token as root.
    """

    name: ClassVar[str] = ""
    """The file's name, set for drafters of this package here and for those of others by `registry`."""
    unnamed: ClassVar[str] = ""
    """The option that may be written without `NAME=`, if there is one."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        package, _, module = cls.__module__.rpartition(".")
        if package == f"{__package__}.drafters" and "name" not in vars(cls):
            cls.name = module

    @property
    def traits(self) -> DrafterTraits:
        """What it needs and can do."""
        return DrafterTraits()

    def start(self, prompts: Sequence[torch.Tensor], target: TreeModel, costs: PassCosts) -> None:
        """New texts begin, one or a batch: a prompt (length,) int64 for each. Here state is allocated and options are
        checked against the target. `costs` says what the target's passes cost.
        """

    def observe_prompt(self, tokens: torch.Tensor, logits: torch.Tensor, row: int) -> None:
        """Learn from a piece of a prompt: tokens (length,) and the target's logits (length, vocabulary) after each.
        `row` says whose it is, of a batch; the pieces of a text come in order.

        Called only where `traits.learns_prompt` is true. The prompt's last token is not among them: it is the first
        root.
        """

    def draft(self, context: Context) -> Draft:
        """A tree of tokens to verify; a lone root where there is nothing to propose."""
        raise NotImplementedError(f"{type(self).__name__} must define draft()")

    def observe(self, step: Step) -> None:
        """Learn from a verified draft; called once a step, after the cache has kept the accepted nodes.

        Where this drafter is a part of another one, `step.draft` holds nodes of others too and may lack some of its
        own: find them by their tokens, as `Draft.places_in` does, not by number. There may be steps for which this
        drafter did not draft.
        """

    def statistics(self) -> Mapping[str, float]:
        """Counts of its own since the last call, such that they can be added up; called once a step, and kept in
        `Stats.drafter_statistics`.
        """
        return {}

    def fork(self) -> Drafter:
        """Another one with the same options that has learned the same: what either learns later, the other does not
        know. What is only read, such as a draft model, may be shared. Not called while a text is going on.
        """
        return copy.deepcopy(self)

    def describe(self) -> str:
        """One line for a person: what was chosen and why."""
        return self.name


def check_at_least(least: int, drafter: Drafter, *options: str) -> None:
    """Raises ValueError for the first of these options whose value is below `least`."""
    for option in options:
        if getattr(drafter, option) < least:
            raise ValueError(f"expected {option} of {least} or more, got {getattr(drafter, option)}")
