"""What a drafter is, what it makes and what it learns from; how drafters are found by name.

A drafter is one file in `token_recycling/drafters/` with one `Drafter` class in it. The file's name is the drafter's
name, and the dataclass fields are its options, in Python and on the command line: `recycling:k=16,tree=paper`. Other
packages add theirs through the entry point group `token_recycling.drafters`.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import pkgutil
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import specs
from .topk import top_candidates
from .tree import Tree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .matrix import AdjacencyMatrix, UpdateRule
    from .target import Target

ENTRY_POINTS = "token_recycling.drafters"


@dataclass(frozen=True)
class Draft:
    """A tree and its tokens (n,) int64, on the target's device or the host; `tokens[0]` is the root, the newest token
    of the text.
    """

    tree: Tree
    tokens: torch.Tensor
    drawn_from: Mapping[int, torch.Tensor] | None = None
    """For each node whose token was drawn at random, the distribution (vocabulary,) that it and its siblings were drawn
    from, without replacement and in their order. A node that is not named here, or any node if this is None, was chosen
    otherwise. Wherever the text is sampled, drawn nodes are accepted by what is said here: it must be true, or the
    text is not the target's. A drawn node must not be left out of a draft because of what was drawn.
    """
    confidence: np.ndarray | None = None
    """(n,) float32: how likely the drafter thinks that each node is accepted if its parent is; 1 for the root. It is
    read where drafts are fused, and calibrated there, so that it need only be in the right order.
    """
    needed: frozenset[int] = frozenset()
    """Nodes that the drafter learns from whether they are accepted or not; where drafts are fused, they are kept if
    there is room for all of them.
    """

    def cut(self, depth: int) -> Draft:
        """The draft without the nodes deeper than `depth`."""
        tree = self.tree.cut(depth)
        if tree is self.tree:
            return self
        drawn_from = self.drawn_from and {node: q for node, q in self.drawn_from.items() if node < len(tree)}
        confidence = None if self.confidence is None else self.confidence[: len(tree)]
        needed = frozenset(node for node in self.needed if node < len(tree))
        return Draft(tree, self.tokens[: len(tree)], drawn_from, confidence, needed)

    def places_in(self, other: Draft) -> list[int | None]:
        """For each node the one of `other` after the same tokens, None where there is none; both have one root."""
        there: dict[tuple[int, int], int] = {}
        for node, token in enumerate(other.tokens.tolist()):
            there.setdefault((other.tree.parents[node], token), node)
        places: list[int | None] = [0]
        for token, parent in zip(self.tokens.tolist()[1:], self.tree.parents[1:], strict=True):
            above = places[parent]
            places.append(None if above is None else there.get((above, token)))
        return places


@dataclass(frozen=True)
class Context:
    """What a draft may depend on."""

    tokens: torch.Tensor
    """(length,) int64: the whole text so far, prompt included; the last one is the root of the draft."""
    room: int
    """How many more tokens may be emitted; a node deeper than `room - 1` cannot be of use."""
    row: int = 0
    """Which text of a batch this is, counted from 0."""
    warp: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Shapes logits (n, vocabulary) as the target's are before a token is drawn from their softmax: temperature, top-k
    and the like, but no penalties. None where the text is not sampled.
    """

    @property
    def root(self) -> torch.Tensor:
        """(1,) int64: the newest token."""
        return self.tokens[-1:]


class Retrieval(typing.NamedTuple):
    """Drafting that is one look-up: a template, and the matrix that it is filled from and that learns."""

    tree: Tree
    matrix: AdjacencyMatrix
    update: UpdateRule


@dataclass(frozen=True)
class Step:
    """What one verification revealed, trimmed at the end of the text."""

    draft: Draft
    """What was verified: the drafter's own draft, as far as the loop could use it, or one that other drafters have a
    part in.
    """
    logits: torch.Tensor
    """(n, vocabulary): the target's logits after every node, the rejected ones too."""
    accepted: list[int]
    """Accepted nodes, the root first."""
    tokens: list[int]
    """Emitted tokens, one per accepted node: those of the accepted nodes after the root, then the last one."""
    finished: bool
    """True for the last step of a text."""
    beyond: int | None = None
    """The node that carries the last token of the text, if one was accepted and trimmed: it and what follows it are no
    part of any text.
    """
    row: int = 0
    """Which text of a batch it is, counted from 0."""
    hidden: torch.Tensor | None = None
    """(n, hidden): the target's last hidden states at every node, from which its output layer made `logits`. None
    unless the drafter says `needs_hidden`.
    """
    candidates: tuple[np.ndarray, np.ndarray] | None = None
    """What `top` gives, where the device has found it already."""

    def top(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k likeliest tokens after every node, best first, and their probabilities: (n, k) int32 and float32."""
        if self.candidates is not None and self.candidates[0].shape[1] >= k:
            return self.candidates[0][:, :k], self.candidates[1][:, :k]
        return top_candidates(self.logits, k)

    @property
    def learnable(self) -> list[int] | slice:
        """Index of the nodes to learn from: all, without those beyond the end of the text."""
        if self.beyond is None:
            return slice(None)
        beyond = set(self.draft.tree.below(self.beyond))
        return [node for node in range(len(self.draft.tree)) if node not in beyond]


class Drafter:
    """Proposes what the target may say next, and learns from what it said.

    Subclasses are dataclasses; their public fields are options. A drafter may keep what it learned from text to text
    (*hot start*). It must draft from its own state and the context alone, never touch the target's cache, and give the
    context's last token as root.
    """

    name: typing.ClassVar[str] = ""
    """Filled in by discovery: the file's name."""
    unnamed: typing.ClassVar[str] = ""
    """The option that may be written without `NAME=`, if there is one."""
    learns_prompt: bool = False
    """Whether the logits after every token of the prompt are wanted; they cost the target's output layer on each."""
    needs_hidden: bool = False
    """Whether the target's last hidden states are wanted in every step; see `Step.hidden`."""
    on_host: bool = False
    """Whether it drafts in the memory of the host: then the tokens of contexts lie there, else on the target's device.
    Drafts may lie on either.
    """

    @property
    def learns_candidates(self) -> int:
        """How many of the likeliest tokens after every node it asks each step for, `step.top(k)`; 0 if none."""
        return 0

    @property
    def draws(self) -> bool:
        """Whether it may draw tokens at random where the text is sampled (`Draft.drawn_from`)."""
        return False

    def retrieval(self) -> Retrieval | None:
        """A template and its matrix, if drafting and learning are nothing but looking up and overwriting its rows: then
        a device can do both by itself, and `draft` and `observe` are called only where it does not. None otherwise.
        Asked after `start`.
        """
        return None

    @classmethod
    def example(cls, model: PreTrainedModel, folder: Path) -> Drafter:
        """One that drafts for `model`, for tests that know no drafter by name. A drafter with required options makes
        small values for them here, files in the empty `folder`.
        """
        return cls()

    def start(self, prompts: Sequence[torch.Tensor], target: Target) -> None:
        """New texts begin, one or a batch: a prompt (length,) int64 for each. Here state is allocated and options are
        checked against the target.
        """

    def observe_prompt(self, tokens: torch.Tensor, logits: torch.Tensor, row: int) -> None:
        """Learn from a piece of a prompt: tokens (length,) and the target's logits (length, vocabulary) after each.
        `row` says whose it is, of a batch; the pieces of a text come in order.

        Called only where `learns_prompt` is true. The prompt's last token is not among them: it is the first root.
        """

    def draft(self, context: Context) -> Draft:
        """A tree of tokens to verify; a lone root where there is nothing to propose."""
        raise NotImplementedError(f"{type(self).__name__} must define draft()")

    def observe(self, step: Step) -> None:
        """Learn from a verified draft; called once a step, after the cache has kept the accepted nodes.

        Where this drafter is a part of another one, `step.draft` holds nodes of others too and may lack some of its
        own: find them by their tokens, as `Draft.places_in` does, not by number. There may be steps for which this
        drafter was not asked to draft.
        """

    def statistics(self) -> Mapping[str, float]:
        """Numbers of its own since it was last asked, such that they can be added up; asked once a step, and kept in
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


def drafter_names() -> list[str]:
    """Names of all drafters, the package's own first."""
    from . import drafters

    own = sorted(module.name for module in pkgutil.iter_modules(drafters.__path__))
    return own + sorted(point.name for point in metadata.entry_points(group=ENTRY_POINTS) if point.name not in own)


def drafter_class(name: str) -> type[Drafter]:
    """The drafter class of that name; raises ValueError with all names."""
    if name not in drafter_names():
        raise ValueError(f"expected a drafter of {', '.join(drafter_names())}, got {name!r}")
    from . import drafters

    if name in (module.name for module in pkgutil.iter_modules(drafters.__path__)):
        module = importlib.import_module(f"{drafters.__name__}.{name}")
        (found,) = (
            value
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, Drafter) and value.__module__ == module.__name__
        )
    else:
        (point,) = metadata.entry_points(group=ENTRY_POINTS, name=name)
        found = point.load()
    found.name = name
    return found


def options_of(drafter: type[Drafter]) -> dict[str, dataclasses.Field[Any]]:
    """The options of a drafter class: its public dataclass fields by name."""
    if not dataclasses.is_dataclass(drafter):
        return {}
    return {field.name: field for field in dataclasses.fields(drafter) if field.init and not field.name.startswith("_")}


def is_required(option: dataclasses.Field[Any]) -> bool:
    """Whether an option has no default."""
    return option.default is dataclasses.MISSING and option.default_factory is dataclasses.MISSING


def make_drafter(spec: str | Drafter = "recycling", **options: Any) -> Drafter:
    """A drafter from its name and options, from a text such as `recycling:k=16,tree=paper`, or one that is made
    already.

    Raises ValueError or TypeError for an unknown drafter, an unknown option, a required one left out or a value of the
    wrong kind.
    """
    if isinstance(spec, Drafter):
        if options:
            raise TypeError(
                f"expected options only with a drafter's name, got a made drafter and {', '.join(options)}; "
                "set them when making it"
            )
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"expected a drafter's name or a Drafter, got {type(spec).__name__}")
    name, _, text = spec.partition(":")
    found = drafter_class(name)
    known = options_of(found)
    written = specs.options(name, text, found.unnamed)
    for option in {**written, **options}:
        if option not in known:
            raise ValueError(f"expected an option of {name}: {', '.join(known) or 'it has none'}; got {option!r}")
    missing = [option for option in known if is_required(known[option]) and option not in {**written, **options}]
    if missing:
        listed = ",".join(f"{option}=VALUE" for option in missing)
        raise ValueError(
            f"expected every required option of {name}, got none for {', '.join(missing)}: {name}:{listed}"
        )
    hints = typing.get_type_hints(found)
    values = {option: _converted(name, option, value, hints[option]) for option, value in written.items()}
    return found(**{**values, **options})


def _converted(name: str, option: str, text: str, hint: Any) -> Any:
    """A written option as the first type of its annotation that takes it."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    for kind in (int, float, bool):
        if kind not in kinds:
            continue
        if kind is bool:
            if text.lower() in {"true", "false"}:
                return text.lower() == "true"
            continue
        try:
            return kind(text)
        except ValueError:
            continue
    if str in kinds or any(typing.get_origin(kind) is typing.Literal for kind in kinds):
        return text
    expected = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
    raise ValueError(f"expected {expected} for option {option} of {name}, got {text!r}")
