"""What is measured: any drafter in our loop, and transformers' own decoding.

A method is written as a drafter is (`recycling:tree=16`), so that new drafters are methods without a line here. The
names of transformers' own are `generate`, `prompt_lookup_hf:n=10` and `assisted:model=FOLDER`; `oracle:model=FOLDER` is
a draft model that knows in hindsight how long to draft. Started on a model, a method is a *lane*: it decodes one prompt
after another and keeps what it learns on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from transformers import AutoModelForCausalLM, PreTrainedModel

from ...registry import drafter_names, make_drafter, written_options
from .lanes import DraftedLane, Lane, TransformersLane
from .oracle import Hindsight, OracleLane

DEFAULT = (
    "generate",
    "prompt_lookup_hf:n=10",
    "plain",
    "published",
    "recycling",
)
"""What is measured if nothing else is asked for; the fourth is Token Recycling as published."""
BASELINE = "generate"
REPLAY_BASELINE = "plain"


class Method(Protocol):
    """A way of decoding."""

    spec: str
    """As the user writes it."""
    label: str
    """For a person."""
    batches: bool
    """Whether it decodes several texts at once."""
    remembers: bool
    """Whether what it does may depend on the prompts before."""

    def start(self, model: PreTrainedModel) -> Lane:
        """A lane that has learned nothing yet."""

    def in_replay(self) -> Method | None:
        """The method that decodes a given text as this one would, if there is one."""


class Drafted:
    """A drafter in our loop."""

    batches = True

    def __init__(self, spec: str, **options: Any) -> None:
        """`options` go to the drafter besides those written; raises ValueError or TypeError as `make_drafter` does."""
        self.spec, self._options = spec, options
        name, _, written = spec.partition(":")
        plain = spec == REPLAY_BASELINE
        self.label = "plain decoding in this loop" if plain else name.replace("_", " ")
        if written:
            self.label += f" ({written.replace(',', ', ')})"
        self.remembers = not plain
        make_drafter(spec, **options)

    def start(self, model: PreTrainedModel) -> Lane:
        return DraftedLane(model, make_drafter(self.spec, **self._options))

    def in_replay(self) -> Method:
        return self


class Transformers:
    """transformers' own decoding with more arguments of `generate`; nothing stays from prompt to prompt."""

    batches = False
    remembers = False

    def __init__(self, spec: str, label: str, replayed: str | None = None, **arguments: Any) -> None:
        """`replayed` names the drafter that drafts the same."""
        self.spec, self.label, self._replayed, self._arguments = spec, label, replayed, arguments

    def start(self, model: PreTrainedModel) -> Lane:
        return TransformersLane(model, self._arguments)

    def in_replay(self) -> Method | None:
        if self._replayed is None or self._replayed.partition(":")[0] not in drafter_names():
            return None
        return Drafted(self._replayed)


class Generate(Transformers):
    """Plain `model.generate`: the baseline."""

    batches = True

    def __init__(self) -> None:
        super().__init__(BASELINE, "transformers generate")


class Assisted(Transformers):
    """transformers' assisted generation: a smaller model drafts. It is loaded once, at the first start."""

    def __init__(self, spec: str, folder: str, tokens: int | None) -> None:
        super().__init__(spec, f"transformers assisted by {Path(folder).name}")
        self.folder, self._tokens = folder, tokens

    def start(self, model: PreTrainedModel) -> Lane:
        if not self._arguments:
            try:
                assistant = AutoModelForCausalLM.from_pretrained(self.folder, dtype=model.dtype)
            except (OSError, ValueError) as error:
                raise ValueError(f"expected a causal language model at {self.folder}, got: {error}") from error
            if self._tokens is not None:
                assistant.generation_config.num_assistant_tokens = self._tokens
            self._arguments = {"assistant_model": assistant.to(model.device).eval()}
        return super().start(model)


class Oracle:
    """A draft model that knows in hindsight how long to draft."""

    batches = False
    remembers = False

    def __init__(self, spec: str, folder: str) -> None:
        self.spec, self.label, self.folder = spec, f"oracle with {Path(folder).name}", folder

    def start(self, model: PreTrainedModel) -> Lane:
        return OracleLane(model, Hindsight(self.folder))

    def in_replay(self) -> Method:
        return self


def parse(spec: str) -> Method:
    """A method as the user writes it; raises ValueError or TypeError with what is wrong."""
    name, _, text = spec.partition(":")
    if name in _NAMED:
        return _NAMED[name](spec, written_options(name, text))
    if name not in drafter_names():
        raise ValueError(
            f"expected a method of {', '.join(_NAMED)}, or a drafter of {', '.join(drafter_names())}, got {name!r}"
        )
    return Drafted(spec)


def _generate(spec: str, options: dict[str, str]) -> Method:
    _refuse(spec, options)
    return Generate()


def _prompt_lookup(spec: str, options: dict[str, str]) -> Method:
    tokens, ngram = _number(spec, options, "n", 10), _number(spec, options, "ngram", 2)
    _refuse(spec, options)
    return Transformers(
        spec,
        f"transformers prompt lookup ({tokens})",
        replayed=f"prompt_lookup:num_tokens={tokens},max_matching_ngram_size={ngram}",
        prompt_lookup_num_tokens=tokens,
        max_matching_ngram_size=ngram,
    )


def _assisted(spec: str, options: dict[str, str]) -> Method:
    folder, tokens = _folder(spec, options), _number(spec, options, "n", None)
    _refuse(spec, options)
    return Assisted(spec, folder, tokens)


def _oracle(spec: str, options: dict[str, str]) -> Method:
    folder = _folder(spec, options)
    _refuse(spec, options)
    return Oracle(spec, folder)


_NAMED: dict[str, Callable[[str, dict[str, str]], Method]] = {
    BASELINE: _generate,
    "prompt_lookup_hf": _prompt_lookup,
    "assisted": _assisted,
    "oracle": _oracle,
}
"""What is no drafter."""


def _folder(spec: str, options: dict[str, str]) -> str:
    folder = options.pop("model", "")
    if not folder:
        name = spec.partition(":")[0]
        raise ValueError(f"expected {name}:model=FOLDER with the model that drafts, got {spec!r}")
    return folder


def _number(spec: str, options: dict[str, str], option: str, default: Any) -> Any:
    if option not in options:
        return default
    value = options.pop(option)
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"expected a number of 1 or more for {option} in {spec!r}, got {value!r}")
    return int(value)


def _refuse(spec: str, options: dict[str, str]) -> None:
    if options:
        raise ValueError(f"expected no option {next(iter(options))!r} in {spec!r}; it has none of that name")
