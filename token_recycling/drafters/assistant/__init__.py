"""An assistant of another tokenizer: speculative decoding with any smaller model there is.

Timor et al., *Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies*
(2502.05202): of what the draft model says, the tokens that both vocabularies have are drafted (token-level
intersection). transformers drafts chains so, for one text; here sequences, trees and graphs are drafted by the rules of
`draft_model`, as far as they pay, and for every text of a batch. The translation is transformers' own (`translated`).

Cost: that of `draft_model`, and a row of the target's vocabulary for each node that is followed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...model.loading import tokenizer_beside
from ...model.support import UnsupportedModelError
from ...model.tree_model import TreeModel
from .._shared.base import CausalDrafter
from .._shared.pairing import DraftModelOption, Pairs, config_of, drafting_beside
from .translated import TranslatedReader, Translation


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
                    f"expected the {whose} tokenizer, got none beside its weights; load the model from a folder or the "
                    f"hub, or in Python give {option}="
                )
        assert theirs is not None
        assert ours is not None
        if max(ours.get_vocab().values()) >= draft.vocab_size:
            raise ValueError(
                f"expected an assistant with logits for all {len(ours)} tokens of its tokenizer, got "
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
    """Raises UnsupportedModelError for assistants that only read the target's cache."""
    config = config_of(model, "an assistant")
    layers = config.get_text_config(decoder=True)
    if getattr(layers, "num_kv_shared_layers", None) == layers.num_hidden_layers:
        raise UnsupportedModelError(
            f"expected an assistant with keys and values of its own, got {config.model_type}, all of whose layers read "
            "those in the target's cache: no drafter sees that, and transformers 5.23 cannot build such a model; "
            "choose a smaller model that reads the text itself"
        )
