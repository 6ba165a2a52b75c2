"""Compiles the grammars of requested output formats and tool calls with llguidance.

A schema of a few kilobytes compiles in milliseconds, and the limits of `grammar.compile` stop larger ones. So no
grammar is cached across requests: a cache would take memory, and its timing would reveal other clients' grammars.

Grammars compile in low-priority threads that release the interpreter lock, a limited number per API key at a time. So
slow grammars delay neither requests without a grammar nor other keys.
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
"""Maximum number of grammars compiled concurrently: per API key, and in total."""
_NICE = 10
"""The niceness of a compiling thread."""
_MAX_HEADER = 1000
"""Maximum characters of the list of unenforced keywords in a header."""


class Grammars:
    """Compiles the grammars of one model's requests."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._threads = ThreadPoolExecutor(_IN_ALL, "grammar", initializer=_lower_priority)
        self._vocabulary_lock = threading.Lock()
        self._warn = WarnOnce("a keyword of a non-strict schema is not enforced: %s")

    async def grammar(self, field: str, form: Form, key: str, gone: Callable[[], bool]) -> Grammar:
        """Compile the form that a request's `field` asks for. `key`: name of its API key; `gone` returns whether its
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
        """The vocabulary in llguidance's form, and the special tokens; raises ValueError."""
        model, tokenizer = self._loaded.model, self._loaded.tokenizer
        tokens = vocabulary_of(model, tokenizer)
        return tokens, special_tokens(tokenizer, tokens)

    def close(self) -> None:
        """End the threads; may be called repeatedly."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class RequestGrammar(GrammarProcessor):
    """Fails a request whose output cannot be completed."""

    def __init__(self, grammar: Grammar, field: str) -> None:
        super().__init__(grammar)
        self._field = field

    def dead_end(self) -> None:
        raise invalid(
            self._field,
            "the generated text cannot be completed, or the grammar is too complex to tell; simplify the grammar",
        )


def new_processor(grammar: Grammar, field: str) -> Callable[[], LogitsProcessor]:
    """Return a function that creates processors for the grammar that a request's `field` asks for."""
    return lambda: RequestGrammar(grammar, field)


def unenforced_header(unenforced: list[Unenforced]) -> dict[str, str]:
    """Return the response header that lists unenforced schema keywords; {} if there are none."""
    places = list(dict.fromkeys(ascii(lost.place)[1:-1] for lost in unenforced))
    if not places:
        return {}
    shown = ", ".join(places)
    return {"X-Unenforced-Keywords": shown if len(shown) <= _MAX_HEADER else f"{shown[:_MAX_HEADER]}..."}


def _lower_priority() -> None:
    """Lower the priority of this thread, on Linux."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
