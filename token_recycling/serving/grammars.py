"""Grammars of the requests' output formats and tool calls, compiled with llguidance.

A schema of kilobytes compiles in a few milliseconds, and what takes longer ends at the limits of `grammar.compile`. So
nothing is kept from one request for another: that would take memory, and the time would tell others' grammars.

Grammars compile in threads of low priority, which hold no lock of the interpreter meanwhile, some of one API key at a
time: neither free text nor another key waits for those that take long.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from transformers import LogitsProcessor

from .._util.text_stream import one_line
from ..grammar.adapters import GrammarProcessor
from ..grammar.compile import Grammar, compiled
from ..grammar.json_schema.errors import Unenforced
from ..grammar.parts import FunctionError, compiled_parts
from ..grammar.vocabulary import special_tokens
from ..hf.constrain import vocabulary_of
from ..model.loading import Loaded
from .errors import CancelledError, WarnOnce, invalid
from .protocol import Form

_OF_A_KEY, _IN_ALL = 2, 8
"""Grammars that compile at once: of one API key, and in total."""
_NICE = 10
"""How much the priority of a compiling thread is lowered."""
_MAX_HEADER = 1000
"""Longest list of unenforced keywords in a header."""


class Grammars:
    """Compiles the grammars of one model's requests."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._threads = ThreadPoolExecutor(_IN_ALL, "grammar", initializer=_lower_priority)
        self._vocabulary_lock = threading.Lock()
        self._warn = WarnOnce("a schema that is not strict has a keyword that is not enforced: %s")

    async def grammar(self, field: str, form: Form, key: str, gone: Callable[[], bool]) -> Grammar:
        """Compile a form that the `field` of a request with the API key of that name asks for; `gone`: whether its
        client has disconnected. Raises ApiError, or CancelledError.
        """
        async with self._slots.setdefault(key, asyncio.Semaphore(_OF_A_KEY)):
            loop = asyncio.get_running_loop()
            try:
                grammar = await loop.run_in_executor(self._threads, self._compiled, form, gone)
            except FunctionError as error:
                raise invalid("tools", one_line(error)) from None
            except ValueError as error:
                raise invalid(field, one_line(error)) from None
        for lost in grammar.unenforced:
            self._warn(lost.keyword, str(lost))
        return grammar

    def _compiled(self, form: Form, gone: Callable[[], bool]) -> Grammar:
        if gone():
            raise CancelledError
        with self._vocabulary_lock:
            tokenizer, special = self._vocabulary
        kind, definition, strict = form
        if kind == "parts":
            return compiled_parts(tokenizer, definition, special)
        return compiled(tokenizer, kind, definition, strict)

    @cached_property
    def _vocabulary(self) -> tuple[Any, dict[str, int]]:
        """The vocabulary as llguidance reads it, and the special tokens; raises ValueError."""
        model, tokenizer = self._loaded.model, self._loaded.tokenizer
        tokens = vocabulary_of(model, tokenizer)
        return tokens, special_tokens(tokenizer, tokens)

    def close(self) -> None:
        """End the threads; may be called again."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class RequestGrammar(GrammarProcessor):
    """Ends a request whose output cannot be completed."""

    def __init__(self, grammar: Grammar, field: str) -> None:
        super().__init__(grammar)
        self._field = field

    def dead_end(self) -> None:
        raise invalid(
            self._field,
            "no complete output begins with the generated text, or the grammar is too complex to tell; make it simpler",
        )


def new_processor(grammar: Grammar, field: str) -> Callable[[], LogitsProcessor]:
    """Return a function that makes processors for a grammar that the `field` of a request asks for."""
    return lambda: RequestGrammar(grammar, field)


def unenforced_header(unenforced: list[Unenforced]) -> dict[str, str]:
    """Return the header of an answer that lists keywords of schemas that its output was not held to; {} for none."""
    places = list(dict.fromkeys(ascii(lost.place)[1:-1] for lost in unenforced))
    if not places:
        return {}
    shown = ", ".join(places)
    return {"X-Unenforced-Keywords": shown if len(shown) <= _MAX_HEADER else f"{shown[:_MAX_HEADER]}..."}


def _lower_priority() -> None:
    """Lower the priority of this thread, where threads have one."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
