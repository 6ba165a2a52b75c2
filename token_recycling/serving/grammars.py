"""Output formats through xgrammar: JSON, JSON of a schema, a regular expression, or tool calls.

A grammar is compiled once, to masks of the tokens that may follow (Dong et al., XGrammar, arXiv:2411.15100), after a
trial in a process of its own (`compiling`); at every token a mask is filled in and applied, microseconds. It is a
logits processor as all others, which drafts know (`grammar.adapters`).

Grammars compile in threads of low priority, some of one API key at a time: neither free text nor another key waits for
those that take long.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import torch
from transformers import LogitsProcessor

from .._util.text_stream import one_line
from ..grammar.adapters import GrammarProcessor
from ..hf.constrain import tokenizer_info
from ..hf.forms import compiled
from ..model.info import model_info
from ..model.loading import Loaded
from .compiling import BYTES, GoneError, TooExpensiveError, Trials
from .errors import ApiError, CancelledError, invalid
from .protocol import Form
from .settings import Isolation

_KEPT = 100_000_000
"""Bytes of compiled grammars that are kept in all."""
_OF_A_KEY, _IN_ALL = 2, 8
"""Grammars that compile at once: of one API key, and in total."""
_NICE = 10
"""How much the priority of a compiling thread is lowered."""
_A_TOKEN = 0.02
"""Processor seconds that a mask may take in the long run."""


class Grammars:
    """Compiles the grammars of one model's requests. The newest are kept for those who share a drafter, and none where
    nobody does: one that is compiled already is fast, which would tell that somebody else asked for it.
    """

    def __init__(self, loaded: Loaded, isolation: Isolation, keys: int, seconds: float = 2.0) -> None:
        """`seconds`: processor time in which a grammar must compile."""
        self._loaded, self._isolation, self._seconds = loaded, isolation, seconds
        self._most = _KEPT // max(1, keys if isolation is Isolation.per_key else 1)
        self._kept: dict[str, OrderedDict[str, Any]] = {}
        """Compiled grammars, or why they are refused, by names of API keys; the name is empty for what all share."""
        self._places: dict[str, asyncio.Semaphore] = {}
        self._threads = ThreadPoolExecutor(_IN_ALL, "grammar", initializer=_lower_priority)
        self._trials = Trials(lambda: self._tokenizer.serialize_json(), seconds)

    async def processor(
        self, field: str, form: Form, key: str = "", gone: Callable[[], bool] = lambda: False, isolated: bool = False
    ) -> Callable[[], LogitsProcessor]:
        """Makes processors for texts of that form, asked for in the `field` of a request with the API key of that name;
        `gone`: whether its client has disconnected; `isolated`: nothing compiled is shared with other requests. Raises
        ApiError, or CancelledError.
        """
        if not hasattr(os, "fork"):
            raise ApiError(400, f"{field}: a {form[0]} needs a server on Linux or macOS", "unsupported", field)
        try:
            grammar = await self._compiled(form, key, gone, isolated)
        except TooExpensiveError:
            limits = f"{self._seconds:g} s of processor time (--grammar-seconds) and {BYTES // 1_000_000} MB of memory"
            raise invalid(field, f"the {form[0]} does not compile within {limits}; make it smaller") from None
        except TimeoutError as error:
            raise ApiError(503, str(error), "overloaded", field, {"Retry-After": "5"}) from error
        except ValueError as error:
            raise invalid(field, one_line(error)) from error
        except GoneError:
            raise CancelledError from None
        return lambda: _WithinTime(grammar, field, self._seconds)

    @cached_property
    def _tokenizer(self) -> Any:
        """The tokenizer as xgrammar takes it; raises ValueError."""
        model = self._loaded.model
        return tokenizer_info(
            self._loaded.tokenizer, model_info(model).vocab_size, model.generation_config.eos_token_id
        )

    async def _compiled(self, form: Form, key: str, gone: Callable[[], bool], isolated: bool) -> Any:
        loop, isolated = asyncio.get_running_loop(), isolated or self._isolation is Isolation.per_request
        kept = OrderedDict[str, Any]()
        if not isolated:
            kept = self._kept.setdefault(key if self._isolation is Isolation.per_key else "", kept)
        known = json.dumps(form)
        if known not in kept:
            async with self._places.setdefault(key, asyncio.Semaphore(_OF_A_KEY)):
                if known not in kept:  # it was compiled meanwhile
                    kept[known] = await loop.run_in_executor(self._threads, self._compile, form, gone)
                    while sum(map(_size, kept.items())) > self._most and len(kept) > 1:
                        kept.popitem(last=False)
        kept.move_to_end(known)
        if isinstance(kept[known], ValueError):
            raise kept[known]
        return kept[known]

    def _compile(self, form: Form, gone: Callable[[], bool]) -> Any:
        """Return the compiled grammar, or the ValueError for one that cannot be compiled; raises as `Trials.check`."""
        import xgrammar

        if gone():
            raise GoneError
        try:
            self._trials.check(form, gone)
            return compiled(xgrammar.GrammarCompiler(self._tokenizer, max_threads=1, cache_enabled=False), *form)
        except ValueError as error:
            return error

    def close(self) -> None:
        """End the process that compiles; may be called again."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._trials.close()


def _size(kept: tuple[str, Any]) -> int:
    """Return the bytes of a form and its grammar."""
    form, grammar = kept
    return len(form) + getattr(grammar, "memory_size_bytes", 0)


def _lower_priority() -> None:
    """Lower the priority of this thread, where threads have one."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class _WithinTime(GrammarProcessor):
    """Ends a text whose masks take too long, since what compiles at once may still take seconds a token, and one that
    cannot be completed.
    """

    def __init__(self, grammar: Any, field: str, seconds: float) -> None:
        super().__init__(grammar)
        self._field, self._seconds, self._left = field, seconds, seconds

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        began = time.thread_time()
        allowed = super().__call__(input_ids, scores)
        self._left += _A_TOKEN - (time.thread_time() - began)
        if self._left < 0:
            limit = f"{self._seconds:g} s of processor time plus {_A_TOKEN} s per token"
            raise invalid(self._field, f"the masks of this grammar take more than {limit}; make it simpler")
        return allowed

    def dead_end(self) -> None:
        raise invalid(self._field, "the grammar has no complete output that begins with the generated text")
