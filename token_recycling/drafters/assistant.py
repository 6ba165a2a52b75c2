"""A draft model with another tokenizer.

Timor et al., *Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies*
(2502.05202): draft only tokens that are in both vocabularies (token-level intersection). transformers drafts chains
this way, for one sequence. Here sequences, trees and graphs are drafted by the rules of `draft_model`, as long as they
pay, for every sequence of a batch. The translation is transformers' own.

Cost: that of `draft_model`, and a row over the target's vocabulary for each expanded node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.candidate_generator import AssistantToTargetTranslator

from ..model.info import UnsupportedModelError
from ..model.loading import saved_tokenizer
from ..model.target import Target
from ._shared.draft_models import CausalDrafter
from ._shared.neural import PerTarget
from ._shared.pairing import DraftModelOption, config_of, drafting_model_for
from ._shared.reader import Reader


class Translation:
    """Translation between the tokens of a target and of a draft model, by `AssistantToTargetTranslator` of
    transformers.

    Tokens in both vocabularies are translated one to one; only these are drafted. A target token that the draft model's
    vocabulary lacks is read as the tokens of its text; a prompt is tokenized again.
    """

    def __init__(self, theirs: PreTrainedTokenizerBase, ours: PreTrainedTokenizerBase, target: Target) -> None:
        """`theirs`: the target's tokenizer, `ours`: the draft model's. Raises ValueError if they share no token."""
        self._theirs, self._ours, self._vocabulary = theirs, ours, target.vocab_size
        translated = AssistantToTargetTranslator(theirs, ours, target.vocab_size).target_to_assistant_input_ids
        self.shared = {token: own for token, own in translated.items() if token < target.vocab_size}
        """Draft-model token of each shared target token."""
        if not self.shared:
            raise ValueError(
                f"the draft model's tokenizer shares none of the target's {len(theirs)} tokens; choose another draft "
                "model"
            )
        self._tokens, self._own = (torch.tensor(list(ids)) for ids in (self.shared, self.shared.values()))
        begin = ours("")["input_ids"]
        self._begin = begin[:1] if begin[:1] == [ours.bos_token_id] else []

    def prompt(self, tokens: torch.Tensor) -> list[int]:
        """Return a whole sequence (length,), tokenized again."""
        return self._begin + self._spelt(self._letters(tokens.tolist()))

    def one(self, before: int, token: int) -> list[int]:
        """Return a target token after the token `before` as draft-model tokens: the shared token, or the tokens of its
        text, if it has any.
        """
        if token in self.shared:
            return [self.shared[token]]
        # Some tokenizers strip the space at the beginning of a sequence.
        first, both = self._letters([before]), self._letters([before, token])
        return self._spelt(both[len(first) :] if both.startswith(first) else self._letters([token]))

    def _letters(self, tokens: list[int]) -> str:
        return str(self._theirs.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _spelt(self, letters: str) -> list[int]:
        return list(self._ours(letters, add_special_tokens=False)["input_ids"])

    def logits(self, ours: torch.Tensor) -> torch.Tensor:
        """Return logits (n, vocabulary) of the target's tokens from the draft model's; lowest for tokens it lacks."""
        self._tokens, self._own = self._tokens.to(ours.device), self._own.to(ours.device)
        everything = ours.new_full((len(ours), self._vocabulary), float("-inf"))
        return everything.index_copy_(1, self._tokens, ours[:, self._own])


class TranslatedReader(Reader):
    """A draft model that reads a sequence of another tokenizer; its nodes are shared tokens."""

    def __init__(self, model: Target, translation: Translation) -> None:
        super().__init__(model)
        self._translation = translation
        self._buffer = torch.empty(0, dtype=torch.long, device=model.device)
        """The sequence so far in draft-model tokens, with spare capacity."""
        self._length = 0
        """Tokens in the buffer."""
        self._translated = 0
        """Target tokens translated so far."""

    def _own(self, sequence: torch.Tensor) -> torch.Tensor:
        """Return `sequence` (length,) in draft-model tokens; it must continue the previous one."""
        translation, new = self._translation, list[int]()
        if self._translated:
            for before, token in pairwise(sequence[self._translated - 1 :].tolist()):
                new += translation.one(before, token)
        else:
            new = translation.prompt(sequence)
        self._translated = len(sequence)
        begin, self._length = self._length, self._length + len(new)
        if self._length > len(self._buffer):
            self._buffer = torch.cat([self._buffer[:begin], self._buffer.new_empty(self._length + 256)])
        self._buffer[begin : self._length] = torch.tensor(new, dtype=torch.long)
        return self._buffer[: self._length]

    def reach(self, sequence: torch.Tensor) -> int:
        """Return the same; also 0 if nothing can be read, for example only special tokens without text."""
        return super().reach(sequence) if len(self._own(sequence)) else 0

    def read(self, sequence: torch.Tensor) -> torch.Tensor:
        return self._translation.logits(super().read(sequence))

    def read_layer(self, parents: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        return self._translation.logits(
            super().read_layer(parents, [self._translation.shared[token] for token in tokens])
        )


@dataclass
class Assistant(DraftModelOption, CausalDrafter):
    """Drafts with a second model that has a different tokenizer."""

    tokenizer: PreTrainedTokenizerBase | None = None
    """The target's tokenizer; None: the one saved with it."""
    assistant_tokenizer: PreTrainedTokenizerBase | None = None
    """The draft model's tokenizer; None: the one saved with it."""

    _translations: PerTarget[Translation] = field(default_factory=PerTarget, init=False, repr=False, compare=False)

    def place(self, target: Target) -> Target:
        _check_own_keys(self.model)
        draft = drafting_model_for(self.model, target)
        self._translation(target, draft)
        return draft

    def _translation(self, target: Target, draft: Target) -> Translation:
        """Return the translation for a target, created once; raises ValueError if a tokenizer is missing or wrong."""
        return self._translations.of(target, lambda: self._new_translation(target, draft))

    def _new_translation(self, target: Target, draft: Target) -> Translation:
        theirs = self.tokenizer or saved_tokenizer(target.model)
        ours = self.assistant_tokenizer or saved_tokenizer(draft.model)
        for whose, tokenizer, option in (
            ("target's", theirs, "tokenizer"),
            ("assistant's", ours, "assistant_tokenizer"),
        ):
            if tokenizer is None:
                raise ValueError(
                    f"the {whose} tokenizer is missing next to its weights; load the model from a folder or the "
                    f"hub, or in Python give {option}="
                )
        assert theirs is not None
        assert ours is not None
        if max(ours.get_vocab().values()) >= draft.vocab_size:
            raise ValueError(
                f"the assistant must have logits for all {len(ours)} tokens of its tokenizer, got "
                f"{draft.vocab_size}; use its own tokenizer"
            )
        return Translation(theirs, ours, target)

    def reader(self, target: Target, model: Target) -> TranslatedReader:
        return TranslatedReader(model, self._translation(target, model))


def _check_own_keys(model: str | PreTrainedModel) -> None:
    config = config_of(model, "an assistant")
    layers = config.get_text_config(decoder=True)
    if getattr(layers, "num_kv_shared_layers", None) == layers.num_hidden_layers:
        raise UnsupportedModelError(
            f"assistants of type {config.model_type} are unsupported: all their layers read keys and values from the "
            "target's cache, which drafters cannot access, and transformers 5.23 cannot build such a model; "
            "choose a smaller model with its own KV cache"
        )
