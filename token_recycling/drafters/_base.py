"""The interface of drafters: they propose the next tokens and learn from verified steps.

A drafter is one file in `token_recycling/drafters/`, or a folder where it has parts, with one `Drafter` class in it.
The class holds options and what was learned, and serves any number of concurrent calls; state of one sequence is in the
`SequenceDrafter` that it starts. Needs and abilities are declared in `DrafterTraits`, so the loop never checks names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from .._util.options import check_at_least as check_at_least  # for drafters, in other packages too
from ..model.target import Target
from ..trees.draft import Context, Draft, Step

if TYPE_CHECKING:
    from ..grammar.statistics import GrammarStatistics

PREDICTED = "predicted_tokens"
"""Key of `statistics`: output tokens that the predicted output contained."""


@dataclass(frozen=True)
class DrafterTraits:
    """Needs and abilities of a drafter."""

    states: Callable[[int], Sequence[int]] | None = None
    """Which hidden states it needs of every token, of the prompt and of each step (`Step.states`), given the target's
    number of layers. Numbered as in transformers: i is the input of layer i, the number of layers the output of the
    final norm (`model.hidden.last_state`).
    """
    on_host: bool = False
    """Drafts on the host: on an accelerator `Context.tokens` is not copied there."""
    top_k: int = 0
    """Most probable tokens after every node that it reads by `step.top(k)`; 0 for none."""
    predictions: bool = False
    """Drafts from predicted output, if the caller gives any (`SequenceDrafter.predict`)."""
    within_grammars: bool = False
    """Drafts within the grammar state `Context.state` itself; other drafts are cut and completed by the loop."""
    grammar_statistics: GrammarStatistics | None = None
    """What targets choose within grammars, kept for all sequences; None: each sequence has its own."""
    nodes: int | Literal["auto"] | None = None
    """How many nodes of its drafts are verified besides the root, the most probable ones; auto: as many as pay, and
    drafting is disabled where it would slow decoding; None: all. `Context.budget` says how many to propose.
    """
    assumed_nodes: int = 1
    """Assumed size of earlier drafts before anything is learned: of larger ones fewer are tried where nodes are
    expensive.
    """
    samples: bool = False
    """May sample draft tokens where the output is sampled (`Draft.sampled_from`)."""
    reproducible: bool = False
    """A `fork` that has learned nothing drafts only from its sequence and the budget: no clock and no other sequence
    matters.
    """
    begins_anew: bool = False
    """Every output depends on its request alone: costs are fixed, nothing cached of other sequences is used, and the
    prompt is read the same way whether the first token is streamed or not.
    """

    def states_read(self, target: Target) -> tuple[int, ...]:
        """Return the numbers of the hidden states that it needs of a target; () for none."""
        return () if self.states is None else tuple(self.states(target.config.num_hidden_layers))


class SequenceDrafter:
    """Drafts for one sequence, in one thread at a time, from its own state and the context. It leaves the target's
    cache alone; the root of a draft is the context's last token.
    """

    pass_cost: float | None = None
    """Of a drafter that runs a model: time of its forward pass relative to one of the target, until it is measured."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        """The drafter that started it. What its drafts took and gave is kept with that."""

    def predict(self, tokens: torch.Tensor) -> None:
        """Take predicted output after the prompt, tokens (n,): a source of drafts that the target never reads.

        Called at most once, before the first `draft`, and only where `traits.predictions` is true.
        """

    def read_prompt(self, states: torch.Tensor) -> None:
        """Take the target's hidden states (n, states * hidden), those named in the traits concatenated, at the n
        next uncached tokens before the prompt's last one.

        Called for each piece in which the prompt is read, before the first `observe`. Not called for families that
        leave some of them out or read long prompts their own way.
        """

    def draft(self, context: Context) -> Draft:
        """Return a tree of tokens to verify; a lone root where there is nothing to propose.

        Called once per step, but not where drafting is disabled, nor for a first token that must not wait. A drafter
        that runs a model asks `context.budget.pays` before each of its passes.
        """
        raise NotImplementedError(f"{type(self).__name__} must define draft()")

    def observe(self, step: Step) -> None:
        """Learn from a verified draft; called once per step, when the cache has kept the accepted nodes. The draft is a
        lone root where none was asked for: in the first step, if that reads a prompt alone, and where none would pay.

        In a fused drafter `step.draft` has nodes of other parts too and may lack some of its own: find nodes by their
        tokens, as `Draft.places_in` does, not by number.
        """

    def statistics(self) -> Mapping[str, float]:
        """Return counts since the last call, summed in `Stats.drafter_statistics`; called when a sequence ends."""
        return {}

    def describe(self) -> str:
        """Return one line for a person: what was chosen and why."""
        return self.drafter.describe()


class Drafter(SequenceDrafter):
    """Proposes tokens and learns from verified steps.

    Subclasses are dataclasses; their public fields are options. A drafter may keep what it learned from sequence to
    sequence (*hot start*); concurrent calls may learn at once. One without state per sequence defines `draft` itself;
    any other defines `start`.
    """

    name: ClassVar[str] = ""
    """The file's name; set here for drafters of this package, by `registry` for those of others."""
    unnamed: ClassVar[str] = ""
    """The option that may be written without `NAME=`, if any."""

    def __init__(self) -> None:
        """Do nothing: for subclasses that are no dataclasses and have no `__init__`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        package, _, module = cls.__module__.rpartition(".")
        if package == __package__ and "name" not in vars(cls):
            cls.name = module

    @property
    def drafter(self) -> Drafter:  # type: ignore[override]
        """Itself, where it drafts for its sequences."""
        return self

    @property
    def traits(self) -> DrafterTraits:
        """Needs and abilities."""
        return DrafterTraits()

    def warm_up(self, device: torch.device) -> None:
        """Compile what drafting needs for a target on `device`: called when a model is accelerated."""

    def fit(self, target: Target) -> None:
        """Load what drafts for a target and check it: called when a model is accelerated. Raises ValueError if it
        cannot draft for the target.
        """

    def fit_again(self, target: Target) -> None:
        """Do the same for a target that has changed since; calls with it are left to `generate` after a ValueError."""
        self.fit(target)

    def start(self, prompt: torch.Tensor, target: Target) -> SequenceDrafter:
        """Return what drafts for a new sequence: `prompt` (length,) int64 on the target's device. Check options against
        the target here.
        """
        return self

    def fork(self) -> Drafter:
        """Return a drafter with the same options and knowledge that learns independently. Read-only parts, such as a
        draft model, may be shared.
        """
        return copy.deepcopy(self)

    def describe(self) -> str:
        """Return one line for a person: the drafter and its options."""
        return self.name


def check_auto_or_nodes(drafter: Drafter, option: str) -> None:
    """Raise ValueError unless the option is `auto` or a number of nodes."""
    value = getattr(drafter, option)
    if value != "auto" and (isinstance(value, str) or value < 1):
        raise ValueError(f"{option} must be auto or >= 1, got {value!r}")
