"""The interface of drafters: they propose the next tokens and learn from verified steps.

A drafter is a file in `token_recycling/drafters/`, or a folder if it has several parts, with one `Drafter` class in it.
The class has the options and the learned state, and serves any number of concurrent calls. The state of one sequence is
in the `SequenceDrafter` that it starts. `DrafterTraits` declares needs and abilities, so the loop never checks names.
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
    from ..model.prefixes import Prefixes

PREDICTED = "predicted_tokens"
"""Key of `statistics`: output tokens that matched the predicted output."""


@dataclass(frozen=True)
class DrafterTraits:
    """Needs and abilities of a drafter."""

    states: Callable[[int], Sequence[int]] | None = None
    """Indices of the hidden states that it needs of every token, of the prompt and of each step (`Step.states`), given
    the target's number of layers. Numbered as in transformers: i is the input of layer i, the number of layers the
    output of the final norm (`model.hidden.last_state`).
    """
    on_host: bool = False
    """Whether it reads `Context.tokens` on the host: on an accelerator they are not copied to the device."""
    top_k: int = 0
    """Number of most probable tokens after every node that it reads with `step.top(k)`; 0 for none."""
    predictions: bool = False
    """Whether it drafts from predicted output, if the caller provides any (`SequenceDrafter.predict`)."""
    prefixes: bool = False
    """Whether it runs a model over the sequence, which a prefix cache can shorten (`SequenceDrafter.use_prefixes`)."""
    within_grammars: bool = False
    """Whether it drafts within the grammar state `Context.state`; other drafts are cut and completed by the loop."""
    grammar_statistics: GrammarStatistics | None = None
    """Statistics of the target's choices within grammars, shared by all sequences; None: each sequence has its own."""
    nodes: int | Literal["auto"] | None = None
    """Number of drafted nodes to verify, the most probable ones. auto: as many as pay, with drafting disabled where it
    would slow decoding; None: all. `Context.budget` limits the number of proposed nodes.
    """
    assumed_nodes: int = 1
    """Assumed size of past drafts before anything is learned: a larger size means fewer attempts where nodes are
    expensive.
    """
    samples: bool = False
    """Whether it may sample draft tokens when the output is sampled (`Draft.sampled_from`)."""
    reproducible: bool = False
    """Whether drafts of an untrained `fork` depend only on its sequence and the budget: on no clock and no other
    sequence.
    """
    isolates_requests: bool = False
    """Whether every output must depend on its request alone: costs are fixed, nothing cached from other sequences is
    used, and the prompt is read in the same way whether or not the first token is streamed.
    """

    def states_read(self, target: Target) -> tuple[int, ...]:
        """Return the indices of the hidden states that it needs of a target; () for none."""
        return () if self.states is None else tuple(self.states(target.config.num_hidden_layers))


class SequenceDrafter:
    """Drafts for one sequence, in one thread at a time, from its own state and the context. It never touches the
    target's cache; the root of a draft is the context's last token.
    """

    pass_cost: float | None = None
    """For a drafter that runs a model: cost of its forward pass relative to the target's, until measured."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        """The drafter that started it, which stores the times and outcomes of its drafts."""

    def predict(self, tokens: torch.Tensor) -> None:
        """Use predicted output after the prompt, tokens (n,), as a source of drafts; the target never reads them.

        Called at most once, before the first `draft`, and only if `traits.predictions` is true.
        """

    def use_prefixes(self, prefixes: Prefixes) -> None:
        """Start from the keys and values cached of the beginning of the prompt, and cache those of the prompt: for a
        drafter's `model` they are in `prefixes.of(model)`.

        Called at most once, before the first `draft`, and only if `traits.prefixes` is true.
        """

    def read_prompt(self, states: torch.Tensor) -> None:
        """Read the target's hidden states (n, states * hidden), those named in the traits concatenated, at the next n
        uncached tokens before the prompt's last one.

        Called for each piece in which the prompt is read, before the first `observe`. Not called for model families
        that omit some of these states or read long prompts in their own way.
        """

    def draft(self, context: Context) -> Draft:
        """Return a tree of tokens to verify; a lone root if there is nothing to propose.

        Called once per step, except where drafting is disabled or the first token must not wait. A drafter that runs a
        model calls `context.budget.pays` before each of its passes.
        """
        raise NotImplementedError(f"{type(self).__name__} must define draft()")

    def observe(self, step: Step) -> None:
        """Learn from a verified draft; called once per step, after the cache kept the accepted nodes. The draft is a
        lone root if `draft` was not called: in a first step that only reads a prompt, or where drafting would not pay.

        In a fused drafter `step.draft` has nodes of other parts too and may lack some of its own: find nodes by their
        tokens, as `Draft.places_in` does, not by number.
        """

    def statistics(self) -> Mapping[str, float]:
        """Return counts since the last call, summed in `Stats.drafter_statistics`; called at the end of a sequence."""
        return {}

    def describe(self) -> str:
        """Return a one-line description: what was chosen and why."""
        return self.drafter.describe()


class Drafter(SequenceDrafter):
    """Proposes tokens and learns from verified steps.

    Subclasses are dataclasses; their public fields are options. A drafter may keep its learned state across sequences
    (*hot start*); concurrent calls may learn simultaneously. A drafter without state per sequence defines `draft`; any
    other defines `start`.
    """

    name: ClassVar[str] = ""
    """The file's name; set here for drafters of this package, by the registry for those of other packages."""
    unnamed: ClassVar[str] = ""
    """The option that may be given without `NAME=`, if any."""

    def __init__(self) -> None:
        """Do nothing; for subclasses that are not dataclasses and have no `__init__`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        package, _, module = cls.__module__.rpartition(".")
        if package == __package__ and "name" not in vars(cls):
            cls.name = module

    @property
    def drafter(self) -> Drafter:  # type: ignore[override]
        """The drafter itself, if it drafts for its sequences."""
        return self

    @property
    def traits(self) -> DrafterTraits:
        """Needs and abilities."""
        return DrafterTraits()

    def warm_up(self, device: torch.device) -> None:
        """Compile the code for drafting for a target on `device`; called when a model is accelerated."""

    def fit(self, target: Target) -> None:
        """Load and check everything that drafting for a target needs; called when a model is accelerated. Raises
        ValueError if the drafter cannot draft for the target.
        """

    def fit_again(self, target: Target) -> None:
        """Do the same for a changed target; after a ValueError its calls run through transformers' `generate`."""
        self.fit(target)

    def start(self, prompt: torch.Tensor, target: Target) -> SequenceDrafter:
        """Return the drafter of a new sequence: `prompt` (length,) int64 on the target's device. Check options against
        the target here.
        """
        return self

    def fork(self) -> Drafter:
        """Return a drafter with the same options and learned state that learns independently. Read-only parts, such as
        a draft model, may be shared.
        """
        return copy.deepcopy(self)

    def describe(self) -> str:
        """Return a one-line description of the drafter and its options."""
        return self.name


def check_auto_or_nodes(drafter: Drafter, option: str) -> None:
    """Raise ValueError unless the option is `auto` or a number of nodes."""
    value = getattr(drafter, option)
    if value != "auto" and (isinstance(value, str) or value < 1):
        raise ValueError(f"{option} must be auto or >= 1, got {value!r}")
