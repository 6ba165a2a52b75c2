"""Outputs with reasoning and tool calls, read by transformers' response parser as they are generated.

What stands between the delimiters of a call and is no call is text. If calls are streamed, their arguments are passed
on while they are generated.
"""

from __future__ import annotations

import json
import operator
import re
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from .logprobs import ScoredToken
from .stopping import StopTrimmer, raw_text
from .templates import REASONING


@dataclass(frozen=True)
class CallPart:
    """A part of a tool call: its beginning, which has the name, or more of its arguments."""

    index: int
    """Of the call in its output."""
    arguments: str
    """JSON, or a piece of it."""
    name: str | None = None
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex}")
    """Of the call, in its first part."""


def whole_calls(parts: Iterable[CallPart]) -> list[CallPart]:
    """Put the parts of calls together."""
    calls: list[CallPart] = []
    for part in parts:
        if part.name is not None:
            calls.append(part)
        else:
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + part.arguments)
    return calls


def _parsed_call(value: Any) -> tuple[str, str]:
    """Return the name and the arguments, as JSON, of what the parser read; raise ValueError, TypeError or KeyError if
    that is no call.
    """
    called = value["function"]
    name, arguments = called["name"], called["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    if not (isinstance(name, str) and isinstance(arguments, dict)):
        raise TypeError(called)
    return name, json.dumps(arguments, ensure_ascii=False)


_CALL_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)', re.DOTALL)


class CallReader:
    """Reads a call that is written as `{"name": ..., "arguments": {...}}` while it is generated."""

    def __init__(self) -> None:
        self.name: str | None = None
        """None until it was written."""
        self.complete = False
        """Whether the arguments have ended."""
        self._head, self._depth = "", 0
        self._quoted = self._escaped = False

    def push(self, piece: str) -> str:
        """Return the part of the arguments that this piece of text has."""
        if self.name is None:
            self._head += piece
            found = _CALL_HEAD.match(self._head)
            if found is None:
                return ""
            self.name, piece = str(json.loads(found[1], strict=False)), self._head[found.end() :]
        if self.complete:
            return ""
        for place, character in enumerate(piece):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._quoted, self._escaped = character != '"', character == "\\"
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self.complete = True
                    return piece[: place + 1]
        return piece


@dataclass
class Delta:
    """What came since the last one; the deltas of a text put together are the whole answer."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallPart] = field(default_factory=list)
    tokens: list[ScoredToken] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Where the tokens begin in the text."""

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def __add__(self, other: Delta) -> Delta:
        return Delta(*map(operator.add, vars(self).values(), vars(other).values()))


class ParsedOutput:
    """One output of which a parser tells content, reasoning and calls apart."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        trimmer: StopTrimmer,
        new_parser: Callable[[], Any],
        streamed: bool = False,
    ) -> None:
        """`streamed`: calls are passed on while they are generated; otherwise a malformed one can be text."""
        self._tokenizer, self._trimmer, self._text = tokenizer, trimmer, raw_text(tokenizer)
        self._new_parser, self._parser = new_parser, new_parser()
        self._streamed, self._reader = streamed, CallReader()
        self._call, self._last = "", False
        """The text of the call that is being written, and whether no more comes."""
        self.calls = 0
        """Number of calls so far."""
        self.cut = False
        """Whether the last call that was streamed has no end."""

    def begin(self) -> Delta:
        """Return what the prompt has begun already."""
        return self._parsed(self._parser.initial_events)

    def push(self, token: ScoredToken, shown: bool) -> Delta:
        """Add a token."""
        return self.feed(self._text.push([token.token] if shown else [])) + Delta(tokens=[token], offsets=[0])

    def end(self, ended: bool) -> Delta:
        """Return what was held back, at the end of the output."""
        return self.feed(self._text.flush(), last=True) + Delta(self._trimmer.flush())

    def feed(self, piece: str, last: bool = False) -> Delta:
        """Add a piece of text; a call that the parser cannot read is text."""
        self._last = last
        try:
            events = self._parser.feed(piece)
            if last:
                events += self._parser.finalize()[1]
        except (ValueError, KeyError, TypeError):
            unread, self._call, self._parser = self._call + piece, "", self._new_parser()
            return Delta() if self._end_streamed_call() else self._as_text(unread)
        return self._parsed(events)

    def _parsed(self, events: list[dict[str, Any]]) -> Delta:
        delta = Delta()
        for event in events:
            kind, name = event["type"], event.get("field")
            if name == "tool_calls":
                delta += self._closed_call(event) if kind == "region_close" else self._call_piece(event)
            elif kind == "region_chunk" and name == "content":
                delta.text += self._trimmer.push(event["text"])
            elif kind == "region_chunk" and name in REASONING:
                delta.reasoning += event["text"]
        return delta

    def _call_piece(self, event: dict[str, Any]) -> Delta:
        """Add a piece of a call; return the part of it that is streamed."""
        piece = event.get("text", "")
        self._call += piece
        if not self._streamed:
            return Delta()
        reader = self._reader
        begun = reader.name is not None
        arguments = reader.push(piece)
        if reader.name is None or (begun and not arguments):
            return Delta()
        self.calls += not begun
        return Delta(calls=[CallPart(self.calls - 1, arguments, None if begun else reader.name)])

    def _closed_call(self, event: dict[str, Any]) -> Delta:
        """Return a call, or several, that were not streamed."""
        text, self._call = self._call, ""
        if self._end_streamed_call():
            return Delta()
        try:
            value = event["value"]
            calls = [_parsed_call(one) for one in (value if isinstance(value, list) else [value])]
        except (ValueError, KeyError, TypeError):
            return self._as_text(text)
        first, self.calls = self.calls, self.calls + len(calls)
        return Delta(calls=[CallPart(first + place, text, name) for place, (name, text) in enumerate(calls)])

    def _end_streamed_call(self) -> bool:
        """End the call that is being read; return whether it was streamed."""
        reader, self._reader = self._reader, CallReader()
        if reader.name is None:
            return False
        self.cut = not reader.complete
        return True

    def _as_text(self, text: str) -> Delta:
        """Return a malformed call as text, without special tokens; but nothing where the output ends within a call
        after others.
        """
        if self._last and self.calls:
            return Delta()
        for special in self._tokenizer.all_special_tokens:
            text = text.replace(special, "")
        return Delta(self._trimmer.push(text))
