"""Output formats through xgrammar: JSON, JSON of a schema, a regular expression, or tool calls.

A grammar is compiled once, to masks of the tokens that may follow (Dong et al., XGrammar, arXiv:2411.15100), in a
process of its own (`compiling`); at every token a mask is filled in and applied, microseconds. It is a logits processor
as all others, which drafts know (`loop.matchers`).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from transformers import LogitsProcessor

from .._util.text_stream import one_line
from ..hf.constrain import tokenizer_info
from ..loop.matchers import GrammarProcessor
from ..model.inspection import vocabulary_size
from ..model.loading import Loaded
from .compiling import BYTES, SECONDS, CompilingProcess, TooDearError
from .errors import ApiError, CancelledError, invalid
from .protocol import Form
from .settings import Isolation

_KEPT = 100_000_000
"""Bytes of compiled grammars that are kept in all."""
_A_TOKEN = 0.02
"""Processor seconds that a mask may take in the long run."""


class Grammars:
    """Compiles the grammars of one model's requests. The newest are kept for those who share a drafter, and none where
    nobody does: one that is compiled already is fast, which would tell that somebody else asked for it.
    """

    def __init__(self, loaded: Loaded, isolation: Isolation, keys: int) -> None:
        self._loaded, self._isolation = loaded, isolation
        self._most = _KEPT // max(1, keys if isolation is Isolation.per_key else 1)
        self._kept: dict[str, OrderedDict[str, Any]] = {}
        """Compiled grammars by names of API keys; the name is empty for those that all share."""
        self._compiling = CompilingProcess(lambda: self._tokenizer.serialize_json())

    async def processor(
        self, field: str, form: Form, key: str = "", gone: Callable[[], bool] = lambda: False, alone: bool = False
    ) -> Callable[[], LogitsProcessor]:
        """Makes processors for texts of that form, asked for in the `field` of a request with the API key of that name;
        `gone`: whether its client has disconnected; `alone`: nothing compiled is shared with other requests. Raises
        ApiError, or CancelledError.
        """
        if not hasattr(os, "fork"):
            raise ApiError(400, f"{field}: expected a server on Linux or macOS for {form[0]}", "unsupported", field)
        try:
            compiled = await self._compiled(form, key, gone, alone)
        except TooDearError:
            limits = f"{SECONDS} s of processor time and {BYTES // 1_000_000_000} GB of memory"
            raise invalid(field, f"expected a {form[0]} that compiles within {limits}; make it smaller") from None
        except (RuntimeError, ValueError, TypeError) as error:
            raise invalid(field, one_line(error)) from error
        except asyncio.CancelledError:
            if gone():
                raise CancelledError from None
            raise
        return lambda: _WithinTime(compiled, field)

    @cached_property
    def _tokenizer(self) -> Any:
        """The tokenizer as xgrammar takes it; raises ValueError."""
        model = self._loaded.model
        return tokenizer_info(self._loaded.tokenizer, vocabulary_size(model), model.generation_config.eos_token_id)

    async def _compiled(self, form: Form, key: str, gone: Callable[[], bool], alone: bool) -> Any:
        if alone or self._isolation is Isolation.per_request:
            return await asyncio.to_thread(self._read, await self._compiling.compiled(form, gone))
        kept = self._kept.setdefault(key if self._isolation is Isolation.per_key else "", OrderedDict())
        known = json.dumps(form)
        if known not in kept:
            written = await self._compiling.compiled(form, gone)
            grammar = await asyncio.to_thread(self._read, written)
            kept[known] = grammar
            while sum(one.memory_size_bytes for one in kept.values()) > self._most and len(kept) > 1:
                kept.popitem(last=False)
        kept.move_to_end(known)
        return kept[known]

    def _read(self, written: str) -> Any:
        import xgrammar

        return xgrammar.CompiledGrammar.deserialize_json(written, self._tokenizer)

    def close(self) -> None:
        """End the process that compiles; may be called again."""
        self._compiling.close()


class _WithinTime(GrammarProcessor):
    """Ends a text whose masks take too long: what compiles at once may still take seconds a token."""

    def __init__(self, compiled: Any, field: str) -> None:
        super().__init__(compiled)
        self._field, self._left = field, float(SECONDS)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        began = time.thread_time()
        allowed = super().__call__(input_ids, scores)
        self._left += _A_TOKEN - (time.thread_time() - began)
        if self._left < 0:
            limit = f"{SECONDS} s of processor time and {_A_TOKEN} s more a token"
            raise invalid(self._field, f"expected a form whose masks take at most {limit}; make it simpler")
        return allowed
