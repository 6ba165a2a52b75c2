"""Answers of a given form: JSON, JSON of a schema, or a regular expression, through xgrammar (the extra `grammar`).

A grammar is compiled once, to masks of the tokens that may follow (Dong et al., XGrammar, arXiv:2411.15100); at every
token a mask is filled in and applied, microseconds. It is a logits processor as all others, so that drafted tokens that
do not fit are not accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from transformers import LogitsProcessor

from .._util.extras import lacking
from .._util.text_stream import one_line
from ..model.inspection import vocabulary_size
from ..model.loading import Loaded
from .errors import ApiError, invalid
from .settings import Isolation

_KEPT = 100_000_000
"""Bytes of compiled grammars that are kept in all."""


class Grammars:
    """Compiles the grammars of one model's requests. The newest are kept for those who share a drafter, and none where
    nobody does: one that is compiled already is fast, which would tell that somebody else asked for it.
    """

    def __init__(self, loaded: Loaded, isolation: Isolation, keys: int) -> None:
        self._loaded, self._isolation = loaded, isolation
        self._bytes = _KEPT // max(1, keys if isolation is Isolation.per_key else 1)
        self._compilers: dict[str, Any] = {}
        """By names of API keys; the name is empty for the compiler that all share."""

    async def processor(self, form: dict[str, Any], key: str = "") -> Callable[[], LogitsProcessor]:
        """Makes processors for texts of that form, the field `response_format`, for a request with the API key of that
        name; raises ApiError.
        """
        if missing := lacking("grammar", "xgrammar"):
            message = f"response_format: {form['type']} {missing} on the server"
            raise ApiError(400, message, "unsupported", "response_format")
        try:
            # In a thread: a large schema may take seconds, in which others are answered.
            compiled = await asyncio.to_thread(self._compiled, form, key)
        except (RuntimeError, ValueError, TypeError) as error:
            raise invalid("response_format", one_line(error)) from error
        return lambda: GrammarProcessor(compiled)

    @cached_property
    def _tokenizer(self) -> Any:
        """The tokenizer as xgrammar takes it; raises ValueError."""
        import xgrammar

        model, tokenizer = self._loaded.model, self._loaded.tokenizer
        stop = model.generation_config.eos_token_id
        if stop is None:
            raise ValueError("expected a model that has a token to end a text, got one without")
        words = vocabulary_size(model)
        return xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=words, stop_token_ids=stop)

    def _compiler(self, key: str) -> Any:
        import xgrammar

        name = key if self._isolation is Isolation.per_key else ""
        if name not in self._compilers:
            keeps = self._isolation is not Isolation.per_request
            self._compilers[name] = xgrammar.GrammarCompiler(
                self._tokenizer, cache_enabled=keeps, cache_limit_bytes=self._bytes
            )
        return self._compilers[name]

    def _compiled(self, form: dict[str, Any], key: str) -> Any:
        compiler = self._compiler(key)
        if form["type"] == "json_object":
            return compiler.compile_builtin_json_grammar()
        if form["type"] == "regex":
            return compiler.compile_regex(form["value"])
        wanted = form["json_schema"]
        # Where any space may follow, a model may go on with spaces for ever.
        return compiler.compile_json_schema(
            wanted["schema"], any_whitespace=False, strict_mode=bool(wanted.get("strict"))
        )


class GrammarProcessor(LogitsProcessor):
    """Lets one text have a form."""

    def __init__(self, compiled: Any) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._mask = xgrammar.allocate_token_bitmask(1, compiled.tokenizer_info.vocab_size)
        self._read: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        import xgrammar

        new = [] if self._read is None else input_ids[0, self._read :].tolist()
        for token in new:
            self._matcher.accept_token(token)
        self._read = input_ids.shape[1]
        if self._matcher.is_terminated():
            return scores
        self._matcher.fill_next_token_bitmask(self._mask)
        allowed = scores.clone()
        xgrammar.apply_token_bitmask_inplace(allowed, self._mask.to(scores.device))
        return allowed
