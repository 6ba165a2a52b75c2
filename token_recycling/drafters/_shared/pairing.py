"""The draft model of a target: located, loaded, and rejected if vocabularies differ.

Ids are compatible if both tokenizers are known and agree on all shared ids; one vocabulary may be larger. If a
tokenizer is unknown, because a model was created in memory, the numbers of logits must be equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..._util.text_stream import first_line
from ...model.info import UnsupportedModelError
from ...model.loading import check_source, resolved, saved_tokenizer, title
from ...model.support import ready
from ...model.target import Target


@dataclass
class DraftModelOption:
    """The option `model` of drafters with a second model; must precede the drafter's base class."""

    model: str | PreTrainedModel
    """A local folder or a hub name; in Python also a model."""

    def place(self, target: Target) -> Target:
        """Load the draft model for a target; raises ValueError if it does not fit."""
        return paired(self.model, target)

    def model_description(self) -> str:
        return title(self.model) if isinstance(self.model, str) else type(self.model).__name__


def paired(model: str | PreTrainedModel, target: Target) -> Target:
    """Return the draft model for a target with the same tokens; raises ValueError if it does not fit."""
    draft = drafting_model_for(model, target)
    check_tokens(draft, target)
    return draft


def drafting_model_for(model: str | PreTrainedModel, target: Target) -> Target:
    """Return the draft model for a target, ready to decode; raises ValueError if it does not fit."""
    drafting = loaded(model, target) if isinstance(model, str) else model
    try:
        draft = ready(drafting)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"as a draft model: {error}") from None
    if draft.info.recurrent:
        raise UnsupportedModelError(
            f"{type(drafting).__name__} cannot be the draft model: its recurrent states cannot roll back rejected "
            "tokens; choose a draft model with attention layers only"
        )
    threshold = target.info.length_threshold
    if drafting is target.model and threshold is not None and threshold.at_once:
        raise UnsupportedModelError(
            f"{type(drafting).__name__} cannot draft for itself: {threshold.why}, and a draft would change it too; "
            "choose another draft model"
        )
    return draft


def loaded(
    name: str, target: Target, kind: Any = AutoModelForCausalLM, expected: str = "a causal language model"
) -> Any:
    """Return a model from a folder or the hub, in the target's dtype and on its device; `kind` is the class that loads
    it.
    """
    return _read(kind, name, expected, dtype=target.dtype).to(target.device).eval()


def config_of(model: str | PreTrainedModel, expected: str, kind: Any = AutoConfig) -> Any:
    """Return the configuration of a model, or of one in a folder or on the hub, which `kind` reads; raises ValueError
    if there is none.
    """
    return _read(kind, model, expected) if isinstance(model, str) else model.config


def _read(kind: Any, name: str, expected: str, **options: Any) -> Any:
    check_source(name)
    try:
        return kind.from_pretrained(resolved(name), **options)
    except Exception as error:  # a user's files can be wrong in any way
        raise ValueError(f"{name} cannot be loaded as {expected} to draft with: {first_line(error)}") from error


def check_tokens(draft: Target, target: Target) -> None:
    """Raise ValueError unless the draft model has the target's token ids."""
    theirs, ours = vocabulary(target.model), vocabulary(draft.model)
    if theirs is None or ours is None:
        if draft.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft model must have {target.vocab_size} tokens, as the target has, got {draft.vocab_size}, and "
                "the two models have no tokenizers to compare; load them from folders with their tokenizers, or choose "
                "a draft model of the target's family"
            )
        return
    different = [token for token in sorted(theirs.keys() & ours.keys()) if theirs[token] != ours[token]]
    if different or not theirs.keys() & ours.keys():
        example = f"; token {different[0]} is {theirs[different[0]]!r} and {ours[different[0]]!r}" if different else ""
        raise ValueError(
            f"the draft model's tokenizer differs from the target's in {len(different)} of "
            f"{len(theirs)} tokens{example}; choose a draft model of the target's family"
        )


def vocabulary(model: PreTrainedModel) -> dict[int, str] | None:
    """Return the token of each id, from the tokenizer saved with the model; None if there is none on this machine."""
    tokenizer = saved_tokenizer(model)
    return None if tokenizer is None else {index: token for token, index in tokenizer.get_vocab().items()}
