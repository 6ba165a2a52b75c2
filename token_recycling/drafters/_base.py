"""The interface of drafters, which propose what the target may say next, and learn from what it said.

A drafter is one file in `token_recycling/drafters/`, or a folder where it has parts, with one `Drafter` class in it. It
holds options and what was learned, and serves any number of calls at once; what belongs to one sequence is in the
`TextDrafter` that it starts for it. What it needs and can do is declared in its `DrafterTraits`, so that the loop never
asks for names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from .._util.options import check_at_least as check_at_least  # for drafters, of other packages too
from ..trees.draft import Context, Draft, Step

if TYPE_CHECKING:
    from ..costs.costs import Costs
    from ..model.tree_model import TreeModel


PREDICTED = "predicted_tokens"
"""Among the statistics of a sequence: its tokens that a prediction had."""


@dataclass(frozen=True)
class DrafterTraits:
    """Needs and abilities of a drafter."""

    states: Callable[[int], Sequence[int]] | None = None
    """Which hidden states it needs of every token, the prompt's and each step's (`Step.states`), of a target of so many
    layers, numbered as in transformers: i is the input of layer i, the number of layers the output of the final norm
    (`model.inspection.last_state`).
    """
    on_host: bool = False
    """Drafts from the sequence in the memory of the host: on an accelerator `Context.tokens` is not copied there."""
    top_k: int = 0
    """Likeliest tokens after every node that it asks each step for, `step.top(k)`; 0 if none."""
    predictions: bool = False
    """Drafts from what is expected to follow, where a caller says (`TextDrafter.predict`)."""
    within_grammars: bool = False
    """Drafts within `Context.state` by itself; the drafts of others are cut and completed by the loop."""
    samples: bool = False
    """May draw tokens at random where the sequence is sampled (`Draft.sampled_from`)."""
    reproducible: bool = False
    """A `fork` that has learned nothing drafts from its sequence and `costs` alone: no clock decides, and no other
    sequence.
    """
    begins_anew: bool = False
    """Every sequence is decoded by its request alone: costs are fixed, nothing that is kept of other sequences is used,
    and the prompt is read alike whether the first token is waited for or not.
"""

    def layers_read(self, layers: int) -> tuple[int, ...]:
        """Return the numbers of the hidden states that it needs of a target of so many layers; () if it needs none."""
        return () if self.states is None else tuple(self.states(layers))


class SequenceDrafter:
    """Drafts for one sequence, in one thread at a time: from what it knows and the context alone, without touching the
    target's cache, and with the context's last token as root.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        """The one that started it."""

    def predict(self, tokens: torch.Tensor) -> None:
        """Take what is expected to follow the prompt, tokens (n,), which the target never reads: a source of drafts.

        Called at most once, before the first `draft`, and only where `traits.predictions` is true.
        """

    def read_prompt(self, states: torch.Tensor) -> None:
        """Take the target's hidden states (n, states * hidden), those that the traits name side by side, at the n
        tokens before the prompt's last one: all that a cache did not hold.

        Called at most once, before the first `observe`. Not called where a family leaves some of them out, or reads a
        long prompt in a way of its own.
        """

    def draft(self, context: Context) -> Draft:
        """A tree of tokens to verify; a lone root where there is nothing to propose.

        Called once a step. Where a step was made without waiting for it, because somebody waits for the first token,
        it is called behind that step, with the context that there was before and no room for a node.
        """
        raise NotImplementedError(f"{type(self).__name__} must define draft()")

    def observe(self, step: Step) -> None:
        """Learn from a verified draft; called once a step, after `draft`, when the cache has kept the accepted nodes.

        Where the drafter is a part of another one, `step.draft` holds nodes of others too and may lack some of its
        own: find them by their tokens, as `Draft.places_in` does, not by number.
        """

    def statistics(self) -> Mapping[str, float]:
        """Counts since the last call, to be added up in `Stats.drafter_statistics`; called when a sequence ends."""
        return {}

    def describe(self) -> str:
        """One line for a person: what was chosen and why."""
        return self.drafter.describe()


class Drafter(SequenceDrafter):
    """Proposes what the target may say next, and learns from what it said.

    Subclasses are dataclasses; their public fields are options. A drafter may keep what it learned from sequence to
    sequence (*hot start*); calls in several threads may learn at once. One that keeps nothing of a sequence defines
    `draft` itself and serves every sequence; any other defines `start`.
    """

    name: ClassVar[str] = ""
    """The file's name, set for drafters of this package here and for those of others by `registry`."""
    unnamed: ClassVar[str] = ""
    """The option that may be written without `NAME=`, if there is one."""

    def __init__(self) -> None:
        """Do nothing: for a subclass that is no dataclass and has no `__init__`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        package, _, module = cls.__module__.rpartition(".")
        if package == __package__ and "name" not in vars(cls):
            cls.name = module

    @property
    def traits(self) -> DrafterTraits:
        """Its needs and abilities."""
        return DrafterTraits()

    def warm_up(self, device: torch.device) -> None:
        """Compile what drafting needs for a target on `device`: called when a model is accelerated."""

    def start(self, prompt: torch.Tensor, target: TreeModel, costs: Costs) -> SequenceDrafter:
        """Return what drafts for a new sequence: `prompt` (length,) int64 on the target's device. Here options are
        checked against the target. `costs` says what the steps of this call cost; the sequences of a batch share it.
        """
        return self

    def fork(self) -> Drafter:
        """Another one with the same options that has learned the same: what either learns later, the other does not
        know. What is only read, such as a draft model, may be shared.
        """
        return copy.deepcopy(self)

    def describe(self) -> str:
        """One line for a person: what it is, by its options."""
        return self.name


def check_auto_or_nodes(drafter: Drafter, option: str) -> None:
    """Raises ValueError unless the option is `auto` or a number of nodes."""
    value = getattr(drafter, option)
    if value != "auto" and (isinstance(value, str) or value < 1):
        raise ValueError(f"{option} must be auto or >= 1, got {value!r}")
