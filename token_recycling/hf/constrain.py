"""`constrain` makes a logits processor from a JSON schema, a regular expression or a grammar, with llguidance (the
extra `grammar`). A schema of ten fields compiles in a millisecond.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer, LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from .._util.extras import lacking
from .._util.per_object import PerObject
from ..grammar.adapters import GrammarProcessor
from ..grammar.compile import compiled
from ..grammar.vocabulary import vocabulary
from ..model.inspection import vocabulary_size

_vocabularies = PerObject[Any]()
"""Of models and tokenizers, while their sizes and end tokens stay the same."""


def constrain(
    model: PreTrainedModel | PreTrainedTokenizerBase,
    /,
    *,
    json_schema: dict[str, Any] | str | None = None,
    regex: str | None = None,
    grammar: str | None = None,
) -> LogitsProcessor:
    """Return a logits processor for `model.generate(..., logits_processor=[...])` that restricts one sequence to a
    form.

    `model` is a model, whose tokenizer is loaded from the same place, or a tokenizer. Give one of `json_schema` (an
    object or its JSON), `regex` (for the whole output), and `grammar` (Lark, or llama.cpp's GBNF). Make a new one for
    every sequence. Objects have only the properties that a schema names, unless it sets `additionalProperties`. Raises
    ValueError unless exactly one form is given, for a form that cannot be compiled, and for an unsupported keyword of
    JSON Schema, by its place in the schema; ImportError without llguidance.
    """
    arguments = {"json_schema": json_schema, "regex": regex, "grammar": grammar}
    forms = {name: value for name, value in arguments.items() if value is not None}
    if len(forms) != 1:
        raise ValueError(
            f"exactly one of json_schema, regex and grammar must be given, got {' and '.join(forms) or 'none'}"
        )
    if missing := lacking("grammar", "llguidance"):
        raise ImportError(f"constrain {missing}")
    known = _vocabularies.get(model, _state_of(model), lambda: _vocabulary(model))
    ((form_name, form),) = forms.items()
    return GrammarProcessor(compiled(known, form_name, form))


def _state_of(model: PreTrainedModel | PreTrainedTokenizerBase) -> tuple[int, str]:
    """Return the number of tokens and the end tokens of a model or tokenizer, which may change."""
    if isinstance(model, PreTrainedModel):
        return vocabulary_size(model), repr(model.generation_config.eos_token_id)
    return len(model), repr(model.eos_token_id)


def _vocabulary(model: PreTrainedModel | PreTrainedTokenizerBase) -> Any:
    if isinstance(model, PreTrainedModel):
        tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
        return vocabulary_of(model, tokenizer)
    return vocabulary(model, len(model), model.eos_token_id)


def vocabulary_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the vocabulary of a model, end tokens included, for which grammars are compiled."""
    return vocabulary(tokenizer, vocabulary_size(model), model.generation_config.eos_token_id)
