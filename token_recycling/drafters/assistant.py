"""An assistant of another tokenizer: speculative decoding with any smaller model there is.

Timor et al., *Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies*
(2502.05202): of what the draft model says, the tokens that both vocabularies have are drafted (token-level
intersection). transformers drafts chains so, for one sequence; here sequences, trees and graphs are drafted by the
rules of `draft_model`, as far as they pay, and for every sequence of a batch. The translation is transformers' own.

Cost: that of `draft_model`, and a row of the target's vocabulary for each node that is followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.candidate_generator import AssistantToTargetTranslator

from ..model.info import UnsupportedModelError
from ..model.loading import tokenizer_beside
from ..model.tree_model import TreeModel
from ._shared.base import CausalDrafter
from ._shared.pairing import DraftModelOption, Pairs, config_of, drafting_beside
from ._shared.reader import Reader


class Translation:
    """Between the tokens of a target and those of a draft model, by `AssistantToTargetTranslator` of transformers.

    The tokens that it finds in both are translated one to one: every drafted token is one of them. A token of the
    target's that the other vocabulary lacks is read as the tokens of its letters; a prompt is tokenised again.
    """

    def __init__(self, theirs: PreTrainedTokenizerBase, ours: PreTrainedTokenizerBase, target: TreeModel) -> None:
        """`theirs` is the target's tokenizer, `ours` the draft model's. Raises ValueError where nothing is shared."""
        self._theirs, self._ours, self._vocabulary = theirs, ours, target.vocab_size
        found = AssistantToTargetTranslator(theirs, ours, target.vocab_size).target_to_assistant_input_ids
        self.shared = {token: theirs for token, theirs in found.items() if token < target.vocab_size}
        """Of tokens of the target those of the draft model."""
        if not self.shared:
            raise ValueError(
                f"the draft model's tokenizer shares none of the target's {len(theirs)} tokens; choose another draft "
                "model"
            )
        self._tokens, self._own = (torch.tensor(list(ids)) for ids in (self.shared, self.shared.values()))
        begin = ours("")["input_ids"]
        self._begin = begin[:1] if begin[:1] == [ours.bos_token_id] else []

    def prompt(self, tokens: torch.Tensor) -> list[int]:
        """A sequence from its beginning on (length,), tokenised again."""
        return self._begin + self._spelt(self._letters(tokens.tolist()))

    def one(self, before: int, token: int) -> list[int]:
        """A token of the target's behind another one: its like, or those of its letters, if it has any."""
        if token in self.shared:
            return [self.shared[token]]
        # Some tokenizers take away the space with which a sequence begins.
        first, both = self._letters([before]), self._letters([before, token])
        return self._spelt(both[len(first) :] if both.startswith(first) else self._letters([token]))

    def _letters(self, tokens: list[int]) -> str:
        return str(self._theirs.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _spelt(self, letters: str) -> list[int]:
        return list(self._ours(letters, add_special_tokens=False)["input_ids"])

    def logits(self, ours: torch.Tensor) -> torch.Tensor:
        """(n, vocabulary) of the target's tokens, from those of the draft model; lowest for tokens it does not have."""
        self._tokens, self._own = self._tokens.to(ours.device), self._own.to(ours.device)
        everything = ours.new_full((len(ours), self._vocabulary), float("-inf"))
        return everything.index_copy_(1, self._tokens, ours[:, self._own])


class TranslatedReader(Reader):
    """A draft model that reads a sequence of another tokenizer, and the nodes below it, which are of shared tokens."""

    def __init__(self, model: TreeModel, translation: Translation) -> None:
        super().__init__(model)
        self._translation = translation
        self._buffer = torch.empty(0, dtype=torch.long, device=model.device)
        """The sequence so far as the draft model's tokens, and room for more."""
        self._length = 0
        """Tokens in the buffer."""
        self._translated = 0
        """How many of the target's tokens these are."""

    def _own(self, sequence: torch.Tensor) -> torch.Tensor:
        """`sequence` (length,), which is or begins with what was translated before."""
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
        """0 too where nothing of the sequence can be read, such as marks without letters."""
        return super().reach(sequence) if len(self._own(sequence)) else 0

    def read(self, sequence: torch.Tensor) -> torch.Tensor:
        return self._translation.logits(super().read(sequence))

    def read_layer(self, parents: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        return self._translation.logits(
            super().read_layer(parents, [self._translation.shared[token] for token in tokens])
        )


@dataclass
class Assistant(DraftModelOption, CausalDrafter):
    """Drafts with a second model that has a tokenizer of its own."""

    tokenizer: PreTrainedTokenizerBase | None = None
    """The target's; None: the one beside it."""
    assistant_tokenizer: PreTrainedTokenizerBase | None = None
    """The draft model's; None: the one beside it."""

    _translations: Pairs[Translation] = field(default_factory=Pairs, init=False, repr=False, compare=False)

    def pair(self, target: TreeModel) -> TreeModel:
        _check_own_keys(self.model)
        draft = drafting_beside(self.model, target)
        theirs = self.tokenizer or tokenizer_beside(target.model)
        ours = self.assistant_tokenizer or tokenizer_beside(draft.model)
        for whose, found, option in (("target's", theirs, "tokenizer"), ("assistant's", ours, "assistant_tokenizer")):
            if found is None:
                raise ValueError(
                    f"the {whose} tokenizer is missing next to its weights; load the model from a folder or the "
                    f"hub, or in Python give {option}="
                )
        assert theirs is not None
        assert ours is not None
        if max(ours.get_vocab().values()) >= draft.vocab_size:
            raise ValueError(
                f"the assistant must have logits for all {len(ours)} tokens of its tokenizer, got "
                f"{draft.vocab_size}; give the tokenizer that was made for it"
            )
        self._translations[target.model] = Translation(theirs, ours, target)
        return draft

    def reader(self, target: TreeModel, model: TreeModel) -> TranslatedReader:
        return TranslatedReader(model, self._translations[target.model])

    def fork(self) -> Assistant:
        other: Assistant = super().fork()
        other._translations = self._translations
        return other


def _check_own_keys(model: str | PreTrainedModel) -> None:
    config = config_of(model, "an assistant")
    layers = config.get_text_config(decoder=True)
    if getattr(layers, "num_kv_shared_layers", None) == layers.num_hidden_layers:
        raise UnsupportedModelError(
            f"assistants of type {config.model_type} are unsupported: all their layers read keys and values from the "
            "target's cache, which drafters cannot access, and transformers 5.23 cannot build such a model; "
            "choose a smaller model with a KV cache of its own"
        )
