"""Answers of a given form: JSON, JSON of a schema, or a regular expression, through xgrammar (the extra `grammar`).

A grammar is compiled once, to masks of the tokens that may follow (Dong et al., XGrammar, arXiv:2411.15100); at every
token a mask is filled in and applied, microseconds. It is a logits processor as all others, so that drafted tokens that
do not fit are not accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import torch
from transformers import LogitsProcessor

from ..extras import lacking
from ..model.loading import Loaded
from ..text_stream import one_line
from .errors import ApiError


class Grammars:
    """Compiles the grammars of one model's requests, and keeps the newest."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._compiler: Any = None

    async def processor(self, form: dict[str, Any]) -> Callable[[], LogitsProcessor]:
        """Makes processors for texts of that form, the field `response_format`; raises ApiError."""
        if missing := lacking("grammar", "xgrammar"):
            message = f"response_format: {form['type']} {missing} on the server"
            raise ApiError(400, message, "unsupported", "response_format")
        try:
            # In a thread: a large schema may take seconds, in which others are answered.
            compiled = await asyncio.to_thread(self._compiled, form)
        except (RuntimeError, ValueError, TypeError) as error:
            raise ApiError(400, f"response_format: {one_line(error)}", "invalid_value", "response_format") from error
        return lambda: GrammarProcessor(compiled)

    def _compiled(self, form: dict[str, Any]) -> Any:
        import xgrammar

        if self._compiler is None:
            model, tokenizer = self._loaded.model, self._loaded.tokenizer
            stop = model.generation_config.eos_token_id
            if stop is None:
                raise ValueError("expected a model that has a token to end a text, got one without")
            words = model.get_output_embeddings().weight.shape[0]
            known = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=words, stop_token_ids=stop)
            self._compiler = xgrammar.GrammarCompiler(known, cache_limit_bytes=100_000_000)
        if form["type"] == "json_object":
            return self._compiler.compile_builtin_json_grammar()
        if form["type"] == "regex":
            return self._compiler.compile_regex(form["value"])
        wanted = form["json_schema"]
        # Where any space may follow, a model may go on with spaces for ever.
        return self._compiler.compile_json_schema(
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
