"""`constrain` makes a logits processor from a JSON schema, a regular expression or a grammar, through xgrammar
(Dong et al., 2411.15100; the extra `grammar`).

A grammar is compiled once, to masks of the tokens that may follow: milliseconds for a schema of ten fields.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from transformers import AutoTokenizer, LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from .._util.extras import lacking
from ..grammar.adapters import GrammarProcessor
from ..model.info import model_info
from .forms import compiled

_compilers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""By model or tokenizer; each keeps what it has compiled."""


def constrain(
    model: PreTrainedModel | PreTrainedTokenizerBase,
    /,
    *,
    json_schema: dict[str, Any] | str | None = None,
    regex: str | None = None,
    grammar: str | None = None,
) -> LogitsProcessor:
    """A logits processor for `model.generate(..., logits_processor=[...])` that holds one sequence to a form.

    `model` is a model, whose tokenizer is loaded from where the model came from, or a tokenizer. Give one of
    `json_schema` (an object or its JSON), `regex`, and `grammar` (EBNF as of xgrammar). Make a new one for every
    sequence. Raises ValueError for a form that cannot be compiled, a keyword of JSON Schema that would not be held to,
    or not exactly one form; ImportError without xgrammar. Objects have no properties but those that a schema names,
    unless it says `additionalProperties`.
    """
    given = {"json_schema": json_schema, "regex": regex, "grammar": grammar}
    forms = {name: value for name, value in given.items() if value is not None}
    if len(forms) != 1:
        raise ValueError(f"give one of json_schema, regex and grammar, got {' and '.join(forms) or 'none'}")
    if missing := lacking("grammar", "xgrammar"):
        raise ImportError(f"constrain {missing}")
    if model not in _compilers:
        _compilers[model] = _compiler(model)
    ((name, form),) = forms.items()
    return GrammarProcessor(compiled(_compilers[model], name, form))


def _compiler(model: PreTrainedModel | PreTrainedTokenizerBase) -> Any:
    import xgrammar

    if isinstance(model, PreTrainedModel):
        tokenizer, words = AutoTokenizer.from_pretrained(model.name_or_path), model_info(model).vocab_size
        stop = model.generation_config.eos_token_id
    else:
        tokenizer, words, stop = model, len(model), model.eos_token_id
    return xgrammar.GrammarCompiler(tokenizer_info(tokenizer, words, stop))


def tokenizer_info(tokenizer: PreTrainedTokenizerBase, words: int, stop: int | list[int] | None) -> Any:
    """The tokenizer as xgrammar takes it, of a model of so many words; raises ValueError where no token ends a
    sequence.
    """
    import xgrammar

    if stop is None:
        raise ValueError("the model has no end-of-sequence token; set its eos_token_id")
    return xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=words, stop_token_ids=stop)
