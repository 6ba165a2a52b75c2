"""What is measured: any drafter in our loop, and transformers' own decoding.

A method is written as a drafter is (`recycling:tree=16`), so that new drafters are methods without a line here. The
names of transformers' own are `generate`, `prompt_lookup_hf:n=10` and `assisted:model=FOLDER`; `oracle:model=FOLDER` is
a draft model that knows in hindsight how long to draft. `cold:` before a method forgets everything after every prompt.
What runs a method on a model is a *runner*.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from ..._util.options import check_known, written_options
from ...cuda_graphs import Fast
from ...drafters._registry import drafter_names, make_drafter
from ...model.loading import resolved, title
from ..row_format import BASELINE, REPLAY_BASELINE
from ..scenario import COLD
from .oracle import Hindsight, OracleRunner
from .runners import DraftedRunner, Runner, TransformersRunner

DEFAULT = (BASELINE, "prompt_lookup_hf:n=10", REPLAY_BASELINE, "published", "recycling")
"""Default methods; `published` is Token Recycling as published."""


class Method:
    """A decoding method."""

    spec: str
    """As written by the user."""
    label: str
    """For a person."""
    batches = False
    """Whether it decodes several sequences at once."""
    remembers = False
    """Whether its drafts may depend on earlier prompts."""

    def runner(self, model: PreTrainedModel) -> Runner:
        """Return a new runner that has learned nothing."""
        raise NotImplementedError

    def in_replay(self) -> Method | None:
        """Return the method that replays a given text as this one would, if there is one."""
        return self


class Drafted(Method):
    """A drafter in our loop."""

    batches = True

    def __init__(self, spec: str, fast: Fast = "auto", **options: Any) -> None:
        """`fast`: see `accelerate`; `options`: further options of the drafter. Raises ValueError or TypeError as
        `make_drafter` does.
        """
        self.spec, self._fast, self._options = spec, fast, options
        name, _, written = spec.partition(":")
        plain = spec == REPLAY_BASELINE
        self.label = "plain decoding in this loop" if plain else name.replace("_", " ")
        if written:
            self.label += f" ({written.replace(',', ', ')})"
        self.remembers = not plain
        make_drafter(spec, **options)

    def runner(self, model: PreTrainedModel) -> Runner:
        return DraftedRunner(model, make_drafter(self.spec, **self._options), fast=self._fast)


class Cold(Method):
    """A method that forgets everything after every prompt."""

    def __init__(self, method: Method) -> None:
        self.spec, self.label = f"{COLD}{method.spec}", f"{method.label}, cold"
        self.batches, self._method = method.batches, method

    def runner(self, model: PreTrainedModel) -> Runner:
        return self._method.runner(model)

    def in_replay(self) -> Method | None:
        replayed = self._method.in_replay()
        return None if replayed is None else Cold(replayed)


class Transformers(Method):
    """transformers' own decoding with further arguments of `generate`; nothing is kept from prompt to prompt."""

    def __init__(
        self, spec: str, label: str, replayed: str | None = None, batches: bool = False, **arguments: Any
    ) -> None:
        """`replayed`: spec of a drafter with the same drafts."""
        self.spec, self.label, self._replayed, self.batches = spec, label, replayed, batches
        self._arguments = arguments

    def runner(self, model: PreTrainedModel) -> Runner:
        return TransformersRunner(model, self._arguments)

    def in_replay(self) -> Method | None:
        if self._replayed is None or self._replayed.partition(":")[0] not in drafter_names():
            return None
        return Drafted(self._replayed)


class Assisted(Transformers):
    """transformers' assisted generation with a draft model, loaded once for the first runner."""

    def __init__(self, spec: str, folder: str, tokens: int | None) -> None:
        super().__init__(spec, f"transformers assisted by {Path(title(folder)).name}")
        self.folder, self._tokens = folder, tokens

    def runner(self, model: PreTrainedModel) -> Runner:
        if not self._arguments:
            try:
                assistant = AutoModelForCausalLM.from_pretrained(resolved(self.folder), dtype=model.dtype)
            except (OSError, ValueError) as error:
                raise ValueError(f"there is no causal language model at {self.folder}: {error}") from error
            if self._tokens is not None:
                assistant.generation_config.num_assistant_tokens = self._tokens
            self._arguments = {"assistant_model": assistant.to(model.device).eval()}
        return super().runner(model)


class Oracle(Method):
    """A draft model that knows in hindsight how long to draft."""

    def __init__(self, spec: str, folder: str) -> None:
        self.spec, self.label, self.folder = spec, f"oracle with {Path(title(folder)).name}", folder

    def runner(self, model: PreTrainedModel) -> Runner:
        return OracleRunner(model, Hindsight(self.folder))


def parse(spec: str) -> Method:
    """Return the method that a user wrote; raises ValueError or TypeError."""
    if spec.startswith(COLD):
        return Cold(parse(spec.removeprefix(COLD)))
    name, _, text = spec.partition(":")
    if name in _NAMED:
        known, make = _NAMED[name]
        options = written_options(name, text, known=known)
        check_known(name, options, known)
        return make(spec, options)
    if name not in drafter_names():
        raise ValueError(f"a method must be one of {', '.join((*_NAMED, *drafter_names()))}, got {name!r}")
    return Drafted(spec)


def _prompt_lookup(spec: str, options: dict[str, str]) -> Method:
    tokens, ngram = _number(spec, options, "n", 10), _number(spec, options, "ngram", 2)
    return Transformers(
        spec,
        f"transformers prompt lookup ({tokens})",
        replayed=f"prompt_lookup:num_tokens={tokens},max_matching_ngram_size={ngram}",
        prompt_lookup_num_tokens=tokens,
        max_matching_ngram_size=ngram,
    )


_NAMED: dict[str, tuple[tuple[str, ...], Callable[[str, dict[str, str]], Method]]] = {
    BASELINE: ((), lambda spec, options: Transformers(BASELINE, "transformers generate", batches=True)),
    "prompt_lookup_hf": (("n", "ngram"), _prompt_lookup),
    "assisted": (
        ("model", "n"),
        lambda spec, options: Assisted(spec, _folder(spec, options), _number(spec, options, "n", None)),
    ),
    "oracle": (("model",), lambda spec, options: Oracle(spec, _folder(spec, options))),
}
"""Methods that are no drafters: option names, and a function of the spec and the options."""


def _folder(spec: str, options: dict[str, str]) -> str:
    folder = options.pop("model", "")
    if not folder:
        name = spec.partition(":")[0]
        raise ValueError(f"{name} needs a draft model, {name}:model=FOLDER, got {spec!r}")
    return folder


def _number(spec: str, options: dict[str, str], option: str, default: Any) -> Any:
    value = options.pop(option, None)
    if value is None:
        return default
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{option} must be an integer >= 1 in {spec!r}, got {value!r}")
    return int(value)
