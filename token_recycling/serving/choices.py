"""From the tokens of one text to what its client is shown: text up to a stop string, reasoning, tool calls, tokens.

Where transformers knows how the model marks its reasoning and its calls (a response template), its parser reads them.
Otherwise tokens are held back with the text that they are a part of, so that log-probabilities and text fit.
"""

from __future__ import annotations

import json
import operator
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from .._util.text_stream import IncrementalText
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


class Choice:
    """One text as it grows."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: GenerationConfig,
        new_parser: Callable[[], Any] = lambda: None,
        hidden: Sequence[int] | None = None,
        streamed: bool = False,
    ) -> None:
        """`new_parser` makes what reads the text; `hidden`: tokens that end the text and are not shown; `streamed`:
        calls are told while they are generated. Otherwise one that is malformed can still be returned as text.
        """
        self._tokenizer, self._limit = tokenizer, config.max_new_tokens
        self._new_parser, self._parser = new_parser, new_parser()
        self._call, self._ended = "", False
        """The text of the call that is being written, and whether no more comes."""
        self._streamed, self._reader = streamed, CallReader()
        self._cut = False
        """Whether the last call that was told of has no end."""
        self._eos = {config.eos_token_id} if isinstance(config.eos_token_id, int) else set(config.eos_token_id or ())
        self._text, self._raw = IncrementalText(tokenizer), raw_text(tokenizer)
        self._trimmer = StopTrimmer(config.stop_strings or ())
        self._hidden = frozenset(hidden or ()) - frozenset(tokenizer.all_special_ids if hidden else ())
        """Special tokens are for the parser, or are shown nowhere."""
        self._held: list[tuple[int, ScoredToken]] = []
        self._read = self._shown = self._calls = 0
        self._last: int | None = None
        self._prompt: str | None = None
        """Of which the tokens come first."""
        self.tokens = 0
        """How many were generated."""
        self._waiting = Delta()
        if self._parser is not None:
            self._waiting += self._parsed(self._parser.initial_events)

    def begin_with(self, prompt: str, scored: bool) -> None:
        """The text begins with its prompt; `scored`: the tokens of the prompt are pushed first."""
        if scored:
            self._prompt = prompt
        else:
            self._waiting, self._read, self._shown = Delta(prompt), len(prompt), len(prompt)

    def push(self, tokens: list[ScoredToken]) -> Delta:
        """What these tokens add."""
        if self._prompt is not None:
            return self._scored_prompt(tokens)
        delta, self._waiting = self._waiting, Delta()
        for token in tokens:
            self.tokens, self._last = self.tokens + 1, token.token
            shown = [] if token.token in self._hidden else [token.token]
            if self._parser is not None:
                delta += self._fed(self._raw.push(shown))
                delta += Delta(tokens=[token], offsets=[0])
            else:
                self._held.append((self._read, token))
                delta += self._plain(self._text.push(shown))
        return delta

    def end(self) -> Delta:
        """What was held back, at the end of the text."""
        if self._parser is not None:
            delta = self._waiting + self._fed(self._raw.flush(), last=True)
            return delta + Delta(self._trimmer.flush())
        delta = self._plain(self._text.flush())
        rest = self._trimmer.flush()
        self._shown += len(rest)
        last = self._released(self._trimmer.stopped or self._last in self._eos)
        return delta + Delta(rest) + last

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._trimmer.matched

    @property
    def finish_reason(self) -> str:
        """Why the text ended: a tool call, its end or a stop string, or its length."""
        full = self.tokens >= (self._limit or 0)
        if self._calls and not (self._cut and full):
            return "tool_calls"
        return "length" if full and not self._trimmer.stopped and self._last not in self._eos else "stop"

    def _scored_prompt(self, tokens: list[ScoredToken]) -> Delta:
        prompt, self._prompt = self._prompt or "", None
        text, offsets = IncrementalText(self._tokenizer), [0]
        for token in tokens:
            offsets.append(offsets[-1] + len(text.push([token.token])))
        self._read = self._shown = len(prompt)
        return Delta(prompt, tokens=tokens, offsets=offsets[:-1])

    def _plain(self, piece: str) -> Delta:
        self._read += len(piece)
        shown = self._trimmer.push(piece)
        self._shown += len(shown)
        return Delta(shown) + self._released(True) if shown else Delta()

    def _released(self, shown_alone: bool) -> Delta:
        """The tokens held back: those that begin within the text shown, or all."""
        going = [(offset, token) for offset, token in self._held if offset < self._shown or not shown_alone]
        self._held = self._held[len(going) :]
        return Delta(tokens=[token for _, token in going], offsets=[offset for offset, _ in going])

    def _fed(self, piece: str, last: bool = False) -> Delta:
        """What the parser reads in a piece of the text; a call that it cannot read is text."""
        self._ended = last
        try:
            events = self._parser.feed(piece)
            if last:
                events += self._parser.finalize()[1]
        except (ValueError, KeyError, TypeError):
            unread, self._call, self._parser = self._call + piece, "", self._new_parser()
            return Delta() if self._ended_call() else self._no_call(unread)
        return self._parsed(events)

    def _parsed(self, events: list[dict[str, Any]]) -> Delta:
        delta = Delta()
        for event in events:
            kind, name = event["type"], event.get("field")
            if name == "tool_calls":
                delta += self._of_call(kind, event)
            elif kind == "region_chunk" and name == "content":
                delta.text += self._trimmer.push(event["text"])
            elif kind == "region_chunk" and name in REASONING:
                delta.reasoning += event["text"]
        return delta

    def _of_call(self, kind: str, event: dict[str, Any]) -> Delta:
        if kind != "region_close":
            piece = event.get("text", "")
            self._call += piece
            return self._begun_call(piece) if self._streamed else Delta()
        text, self._call = self._call, ""
        if self._ended_call():
            return Delta()
        try:
            value = event["value"]
            calls = [_parsed_call(one) for one in (value if isinstance(value, list) else [value])]
        except (ValueError, KeyError, TypeError):
            return self._no_call(text)
        first, self._calls = self._calls, self._calls + len(calls)
        return Delta(calls=[CallPart(first + place, text, name) for place, (name, text) in enumerate(calls)])

    def _begun_call(self, piece: str) -> Delta:
        """The part of a call that is being generated."""
        reader = self._reader
        begun = reader.name is not None
        arguments = reader.push(piece)
        if reader.name is None or (begun and not arguments):
            return Delta()
        self._calls += not begun
        return Delta(calls=[CallPart(self._calls - 1, arguments, None if begun else reader.name)])

    def _ended_call(self) -> bool:
        """End the call that is being read; whether it was told of while it was generated."""
        reader, self._reader = self._reader, CallReader()
        if reader.name is None:
            return False
        self._cut = not reader.complete
        return True

    def _no_call(self, text: str) -> Delta:
        """What stands between the marks of a call and is none: text, without special tokens; but nothing where the text
        ends within a call behind others.
        """
        if self._ended and self._calls:
            return Delta()
        for special in self._tokenizer.all_special_tokens:
            text = text.replace(special, "")
        return Delta(self._trimmer.push(text))
