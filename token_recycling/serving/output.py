"""Splits the tokens of one output into the pieces that its client receives: text, reasoning and tool calls, in order.

If the model has a response template, which defines its delimiters of reasoning and calls, transformers' parser splits
the output. Otherwise all of it is text. Tokens are then held back together with their text, so that log-probabilities
and text stay aligned.

A response has the same pieces whether or not it is streamed. So once its arguments have begun, a call remains a call,
even if the output ends within it (`length`) or its arguments turn out to be malformed: a stream cannot retract it.
Anything else between the delimiters of a call is text.

Cost per token: detokenizing the last few tokens, independent of the output length.
"""

from __future__ import annotations

import copy
import json
import re
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal

from transformers import GenerationConfig, PreTrainedTokenizerBase

from .._util.text_stream import IncrementalText

Kind = Literal["text", "reasoning", "call"]
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the reasoning field in response templates."""


LEAST = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""


@dataclass(frozen=True)
class ScoredToken:
    """A token with its log-probability and the most probable tokens at its position."""

    token: int
    logprob: float | None = None
    """None for the first token of a prompt, or if not requested."""
    top: list[tuple[int, float]] = field(default_factory=list)
    """Best first."""
    begins_text: bool = False
    """Whether no text precedes the token; SentencePiece then decodes no space before it."""


@dataclass(frozen=True)
class Piece:
    """A part of an output."""

    kind: Kind
    text: str
    """For a call: its arguments as JSON, or a part of them."""
    index: int = 0
    """Index of the call in its output."""
    name: str | None = None
    """Name of the function; only in the first piece of a call."""
    id: str = ""
    """Id of the call; only in its first piece."""

    def continues(self, other: Piece) -> bool:
        """Return whether this piece continues `other`."""
        return self.name is None and (self.kind, self.index) == (other.kind, other.index)


def call_piece(index: int, name: str, arguments: str) -> Piece:
    """Return the first piece of a call, with a new id."""
    return Piece("call", arguments, index, name, f"call_{uuid.uuid4().hex}")


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces with consecutive parts of the same piece joined, without empty pieces."""
    first: list[Piece] = []
    texts: list[list[str]] = []
    for piece in pieces:
        if first and piece.continues(first[-1]):
            texts[-1].append(piece.text)
        elif piece.text or piece.name is not None:
            first.append(piece)
            texts.append([piece.text])
    return [replace(piece, text="".join(text)) for piece, text in zip(first, texts, strict=True)]


@dataclass
class Delta:
    """The pieces and tokens that a token, a step or the whole generation adds to an output."""

    pieces: list[Piece] = field(default_factory=list)
    tokens: list[ScoredToken] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Character offsets of the tokens in the text."""
    finish_reason: str | None = None
    """Why the output ended; only in its last delta."""
    stop_string: str | None = None
    """The stop string that ended the output; only in its last delta."""

    def of(self, kind: Kind) -> str:
        """Return the joined text of all pieces of a kind."""
        return "".join(piece.text for piece in self.pieces if piece.kind == kind)

    @property
    def calls(self) -> list[Piece]:
        """The pieces that are parts of calls."""
        return [piece for piece in self.pieces if piece.kind == "call"]


def whole(deltas: Iterable[Delta]) -> Delta:
    """Return consecutive deltas of an output, merged into one."""
    pieces: list[Piece] = []
    result = Delta()
    for delta in deltas:
        pieces += delta.pieces
        result.tokens += delta.tokens
        result.offsets += delta.offsets
        result.finish_reason, result.stop_string = delta.finish_reason, delta.stop_string
    result.pieces = merged(pieces)
    return result


class Output:
    """One output, read token by token."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: GenerationConfig,
        new_parser: Callable[[], Any] | None = None,
        include_stop: bool = False,
        before: Sequence[int] = (),
    ) -> None:
        """`new_parser` creates a parser of the output; `include_stop`: keep the stop string at the end of the text;
        `before`: the last tokens of a text that the output continues.
        """
        self._limit = config.max_new_tokens
        self._tokenizer = tokenizer
        stops = config.stop_strings or ()
        self._trimmer, self._written = StopTrimmer(stops, include_stop), StopTrimmer(stops)
        """For the text that is shown, and for the raw text with special tokens; either can match a stop string."""
        self._reader: PlainReader | ParsedReader = PlainReader(tokenizer, self._trimmer, before)
        if new_parser is not None:
            self._reader = ParsedReader(tokenizer, self._trimmer, new_parser, before)
        self._eos = {config.eos_token_id} if isinstance(config.eos_token_id, int) else set(config.eos_token_id or ())
        self._hidden = self._eos.difference(tokenizer.all_special_ids if self._eos else ())
        """End tokens that are not shown, without special tokens, which the parser needs; plain text omits them anyway.
        """
        self._last: int | None = None
        self._prompt: str | None = None
        """The echoed prompt, until its scored tokens have been pushed."""
        self._waiting = Delta(self._reader.begin())
        self.tokens = 0
        """Number of generated tokens."""

    def begin_with(self, prompt: str, scored: bool) -> None:
        """Start the output with the prompt; `scored`: the first `push` has the tokens of the prompt."""
        assert isinstance(self._reader, PlainReader)
        self._prompt = prompt if scored else None
        self._waiting = Delta([] if scored else self._reader.begin(prompt))

    def push(self, tokens: list[ScoredToken]) -> Delta:
        """Add tokens; return their delta."""
        if self._prompt is not None:
            return self._scored_prompt(tokens)
        delta, self._waiting = self._waiting, Delta()
        for token in tokens:
            self.tokens, self._last = self.tokens + 1, token.token
            scored = replace(token, begins_text=self._reader.text.at_start)
            self._written.push(self._reader.push(scored, token.token not in self._hidden, delta))
        delta.pieces = merged(delta.pieces)
        return delta

    def end(self) -> Delta:
        """Return the held-back pieces and tokens, and the finish reason."""
        delta = self._waiting
        self._reader.end(self._last in self._eos, delta)
        delta.pieces = merged(delta.pieces)
        delta.finish_reason = self._finish_reason
        delta.stop_string = self._trimmer.matched or self._written.matched
        return delta

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._written.stopped or self._trimmer.stopped

    @property
    def reasoning_tokens(self) -> int:
        """Number of generated tokens that are reasoning."""
        return self._reader.reasoning_tokens

    @property
    def _finish_reason(self) -> str:
        """`tool_calls`, `length` or `stop`."""
        ended = self.stopped or self._last in self._eos
        full = self.tokens >= (self._limit or 0) and not ended
        if self._reader.calls and not (self._reader.cut and full):
            return "tool_calls"
        return "length" if full else "stop"

    def _scored_prompt(self, tokens: list[ScoredToken]) -> Delta:
        assert isinstance(self._reader, PlainReader)
        assert self._prompt is not None
        prompt, self._prompt = self._prompt, None
        text, scored, offsets = IncrementalText(self._tokenizer), list[ScoredToken](), [0]
        for token in tokens:
            scored.append(replace(token, begins_text=text.at_start))
            offsets.append(offsets[-1] + len(text.push([token.token])))
        return Delta(merged(self._reader.begin(prompt)), scored, offsets[:-1])


class StopTrimmer:
    """Truncates incremental text before the first stop string, or after it with `include`."""

    def __init__(self, stop: Sequence[str], include: bool = False) -> None:
        self.stops, self._include, self._held = stop, include, ""
        self.matched: str | None = None
        """The stop string that was found."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.matched is not None

    def push(self, piece: str) -> str:
        """Add a piece; return the text that is safe to send. A suffix that may begin a stop string is held back."""
        if self.matched is not None:
            return ""
        if not self.stops:
            return piece
        self._held += piece
        places = [(place, stop) for stop in self.stops if (place := self._held.find(stop)) >= 0]
        if places:
            place, self.matched = min(places)
            safe, self._held = self._held[: place + len(self.matched) * self._include], ""
            return safe
        cut = len(self._held) - max((_overlap(self._held, stop) for stop in self.stops), default=0)
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe

    def flush(self) -> str:
        """Return the held-back text, at the end of the output."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


def raw_text(tokenizer: PreTrainedTokenizerBase, before: Sequence[int] = ()) -> IncrementalText:
    """Return an incremental detokenizer that keeps special tokens; `before` as in `Output`."""

    def decode(tokens: list[int], **options: Any) -> str:
        return tokenizer.decode(tokens, **{**options, "skip_special_tokens": False})

    return IncrementalText(SimpleNamespace(decode=decode), before)


class PlainReader:
    """Reads an output that is plain text."""

    calls, cut, reasoning_tokens = 0, False, 0
    """Plain text has no calls and no reasoning."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, trimmer: StopTrimmer, before: Sequence[int] = ()) -> None:
        self.text, self._trimmer = IncrementalText(tokenizer, before), trimmer
        self._written = raw_text(tokenizer, before) if trimmer.stops else None
        self._unshown = deque[tuple[int, ScoredToken]]()
        """Tokens that are held back, each with its offset in the text."""
        self._generated_characters = self._shown_characters = 0

    def begin(self, prompt: str = "") -> list[Piece]:
        """Start the text with an echoed prompt."""
        self._generated_characters = self._shown_characters = len(prompt)
        return [Piece("text", prompt)]

    def push(self, token: ScoredToken, shown: bool, delta: Delta) -> str:
        """Add a token; return its raw text for stop strings, with special tokens, since a stop string may be one."""
        self._unshown.append((self._generated_characters, token))
        self._add(self.text.push([token.token] if shown else []), delta)
        return "" if self._written is None else self._written.push([token.token])

    def end(self, ended: bool, delta: Delta) -> None:
        """Add the held-back text and tokens. `ended`: the last token is an end of sequence, which is not shown."""
        self._add(self.text.flush(), delta)
        rest = self._trimmer.flush()
        self._shown_characters += len(rest)
        delta.pieces.append(Piece("text", rest))
        self._release(delta, all_tokens=not (ended or self._trimmer.stopped))

    def _add(self, text: str, delta: Delta) -> None:
        self._generated_characters += len(text)
        if shown := self._trimmer.push(text):
            self._shown_characters += len(shown)
            delta.pieces.append(Piece("text", shown))
            self._release(delta)

    def _release(self, delta: Delta, all_tokens: bool = False) -> None:
        """Release held-back tokens that begin within the shown text, or all of them."""
        while self._unshown and (all_tokens or self._unshown[0][0] < self._shown_characters):
            offset, token = self._unshown.popleft()
            delta.offsets.append(offset)
            delta.tokens.append(token)


def _parsed_call(value: Any) -> tuple[str, str]:
    """Return the name and the JSON arguments of a parsed call; raise one of `_UNREADABLE` if `value` is not a call."""
    called = value["function"]
    name, arguments = called["name"], called["arguments"]
    if isinstance(arguments, str):
        arguments = _object_in(arguments or "{}")
    if not (isinstance(name, str) and isinstance(arguments, dict)):
        raise TypeError(called)
    name.encode()  # raises ValueError for lone surrogates; in arguments they stay escaped, as the model wrote them
    return name, json.dumps(arguments, ensure_ascii=False).encode(errors="backslashreplace").decode()


def _object_in(text: str) -> Any:
    """Return the value of arguments in text: JSON, or Gemma's form with any names, such as `{page-size:1}`, of which
    transformers' parser reads only words; raise ValueError.
    """
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(_UNQUOTED.sub(_quoted, text))


_UNQUOTED = re.compile(
    r'<\|"\|>(?P<text>.*?)<\|"\|>|"(?:\\.|[^"\\])*"|(?<=[{,])\s*(?P<name>[^\s"<{\[\]},:][^"<{\[\]},:\n]*):',
    re.DOTALL,
)
"""A text between Gemma's delimiters, a JSON string, or a name without quotes."""


def _quoted(match: re.Match[str]) -> str:
    if match["name"] is not None:
        return f"{json.dumps(match['name'].rstrip())}:"
    return match[0] if match["text"] is None else json.dumps(match["text"])


_UNREADABLE = (ValueError, KeyError, TypeError, RecursionError)
"""Errors that a parser or this module raises for text that is not a call."""
_NAME = r'"(?:[^"\\]|\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}))*"'
_CALL_HEAD = re.compile(rf'\s*\{{\s*"name"\s*:\s*({_NAME})\s*,\s*"arguments"\s*:\s*(?=\{{)')
_MAX_HEAD = 4096
"""Maximum characters before the arguments of a streamed call; a call with a longer head is sent when complete."""
_HIDDEN = "\0"
"""Replaces `<`; JSON cannot contain it."""


class CallReader:
    """Reads a call in the form `{"name": ..., "arguments": {...}}` incrementally."""

    def __init__(self) -> None:
        self.name: str | None = None
        """None until the head of the call is complete."""
        self.complete = False
        """Whether the arguments are complete; any further text is ignored."""
        self._head, self._depth = "", 0
        self._quoted = self._escaped = self._malformed = False

    def hidden(self, text: str) -> str:
        """Return the text after the pushed one, with `<` hidden in strings of the arguments: they may contain the end
        delimiter of the call. A line end in a string is no JSON; after it, nothing is hidden.
        """
        if self.name is None or "<" not in text:
            return text
        ahead, characters = copy.copy(self), [*text]
        for position, character in enumerate(text):
            if character == "<" and ahead._quoted and not ahead._malformed:
                characters[position] = _HIDDEN
            ahead._read(character)
        return "".join(characters)

    def push(self, piece: str) -> str:
        """Return the part of the arguments in this piece of text."""
        if self.name is None:
            if len(self._head) > _MAX_HEAD:
                return ""
            self._head += piece
            head = _CALL_HEAD.match(self._head)
            if head is None:
                return ""
            self.name, piece = str(json.loads(head[1], strict=False)), self._head[head.end() :]
        if self.complete:
            return ""
        for position, character in enumerate(piece):
            self._read(character)
            if self.complete:
                return piece[: position + 1]
        return piece

    def _read(self, character: str) -> None:
        """Follow the arguments by one character."""
        if self.complete:
            return
        if self._escaped:
            self._escaped = False
        elif self._quoted:
            self._quoted, self._escaped = character != '"', character == "\\"
            self._malformed |= character == "\n"
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.complete = not self._depth


class TextStart:
    """Skips the line ends between reasoning and text, of which templates write up to two."""

    def __init__(self) -> None:
        self.left = 0
        """Maximum number of line ends to skip."""

    def skip(self, text: str) -> str:
        """Return a piece of the text without these line ends."""
        while self.left and text.startswith("\n"):
            text, self.left = text[1:], self.left - 1
        self.left = 0 if text else self.left
        return text


class ParsedReader:
    """Reads an output that a parser splits into content, reasoning and calls."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        trimmer: StopTrimmer,
        new_parser: Callable[[], Any],
        before: Sequence[int] = (),
    ) -> None:
        self._trimmer, self.text = trimmer, raw_text(tokenizer, before)
        self._special = re.compile("|".join(map(re.escape, tokenizer.all_special_tokens)) or r"(?!)")
        self._new_parser, self._parser = new_parser, new_parser()
        self._reader = CallReader()
        self._call: list[str] = []
        """The text of the current call."""
        self._last = False
        """Whether this is the last piece of text."""
        self._blanks: str | None = None
        """Whitespace since the last call, shown only before other text; None before any call and after other text."""
        self._shown_start, self._written_start = TextStart(), TextStart()
        """Starts after reasoning: of the shown text, and of the raw text for stop strings."""
        self._characters = 0
        self._prompted: dict[str, int] = {}
        """Number of characters per field that belong to the prompt."""
        self.calls = 0
        """Number of calls."""
        self.cut = False
        """Whether the output ended within its last call."""
        self._inside = False
        """Whether the output is currently within reasoning or a call."""
        self._region_characters = 0
        """Number of characters within a region in the last event."""
        self.reasoning_tokens = 0
        """Number of reasoning tokens, delimiters included."""
        self._unread = 0
        """Number of tokens since the last parser event: the parser holds back text that may be a delimiter."""

    def begin(self) -> list[Piece]:
        """Skip text or reasoning that the prompt has already begun, since it is not part of the output."""
        events = self._parser.initial_events
        if any(event["type"] == "region_chunk" for event in events):
            # The parser holds back spaces at the end of the prompt: one more character releases them.
            probe = self._new_parser()
            begun = [*probe.initial_events, *probe.feed("x"), *probe.finalize()[1]]
            texts = [(event["field"], event["text"]) for event in begun if event["type"] == "region_chunk"]
            for field_name, text in texts:
                self._prompted[field_name] = self._prompted.get(field_name, 0) + len(text)
            self._prompted[texts[-1][0]] -= 1
        return self._pieces(events)

    def push(self, token: ScoredToken, shown: bool, delta: Delta) -> str:
        """Add a token; return its raw text for stop strings, with special tokens. Text within reasoning or a call is
        left out: reasoning repeats words of the prompt, and a stop string would truncate a call.
        """
        delta.tokens.append(token)
        delta.offsets.append(self._characters)
        text = self.text.push([token.token] if shown else [])
        self._characters += len(text)
        self._unread += 1
        inside = self._inside
        delta.pieces += self.feed(text)
        if not self._inside:
            kept = text.rstrip("\n") if inside else ""
            return kept + self._written_start.skip(text[len(kept) :])
        # The parser may report a delimiter only with the token after it.
        return "" if inside else text[: max(0, len(text) - self._region_characters)]

    def end(self, ended: bool, delta: Delta) -> None:
        """Add the held-back pieces. `ended` has no effect: the parser recognizes the end of an output."""
        delta.pieces += self.feed(self.text.flush(), last=True)
        delta.pieces.append(Piece("text", self._trimmer.flush()))

    def feed(self, text: str, last: bool = False) -> list[Piece]:
        """Add a piece of text; return the new pieces. A call that the parser cannot read becomes text."""
        self._last = last
        try:
            events = self._parser.feed(self._reader.hidden(text))
            if last:
                events += self._parser.finalize()[1]
        except _UNREADABLE:
            unread, self._parser = "".join([*self._call, text]), self._new_parser()
            self._call.clear()
            return [] if self._end_passed_on() else self._as_text(unread)
        return self._pieces(events)

    def _pieces(self, events: list[dict[str, Any]]) -> list[Piece]:
        pieces: list[Piece] = []
        for event in events:
            kind, name = event["type"], event.get("field")
            self.reasoning_tokens += self._unread if name in REASONING else 0
            self._unread = 0
            self._inside = kind != "region_close" and name != "content"
            self._region_characters = len(event["text"]) if kind == "region_chunk" else 0
            if kind == "region_open" and name not in self._prompted:
                self._prompted.clear()  # the delimiter contains the spaces at the end of the prompt
            if name == "tool_calls":
                pieces += self._closed_call(event) if kind == "region_close" else self._part_of_call(event)
            elif kind == "region_chunk" and name == "content":
                pieces.append(self._shown(self._shown_start.skip(self._generated(name, event["text"]))))
            elif kind == "region_close" and name in REASONING:
                self._shown_start.left = self._written_start.left = 2
            elif kind == "region_chunk" and name in REASONING:
                pieces.append(Piece("reasoning", self._generated(name, event["text"])))
        return pieces

    def _shown(self, text: str) -> Piece:
        """Return the part of a text that can be shown now."""
        if self._blanks is not None:
            text, self._blanks = self._blanks + text, None
            if not text.strip():
                text, self._blanks = "", text
        return Piece("text", self._trimmer.push(text))

    def _generated(self, name: str, text: str) -> str:
        """Return a text without the prompt's part and without stray special tokens."""
        skipped = min(self._prompted.get(name, 0), len(text))
        if skipped:
            self._prompted[name] -= skipped
        return self._special.sub("", text[skipped:])

    def _part_of_call(self, event: dict[str, Any]) -> list[Piece]:
        """Add a part of a call; return the pieces that can be sent now."""
        text, reader = event.get("text", "").replace(_HIDDEN, "<"), self._reader
        self._call.append(text)
        begun = reader.name is not None
        arguments = reader.push(text)
        if reader.name is None or (begun and not arguments):
            return []
        if begun:
            return [Piece("call", arguments, self.calls - 1)]
        self.calls += 1
        return [call_piece(self.calls - 1, reader.name, arguments)]

    def _closed_call(self, event: dict[str, Any]) -> list[Piece]:
        """Return the calls of a closed region, if they were not streamed already."""
        text = "".join(self._call)
        self._call.clear()
        if self._end_passed_on():
            return []
        try:
            value = event["value"]
            calls = [_parsed_call(call) for call in (value if isinstance(value, list) else [value])]
        except _UNREADABLE:
            return self._as_text(text)
        first, self.calls = self.calls, self.calls + len(calls)
        return [call_piece(index, name, arguments) for index, (name, arguments) in enumerate(calls, first)]

    def _end_passed_on(self) -> bool:
        """End the current call; return whether it was streamed already."""
        reader, self._reader = self._reader, CallReader()
        self.cut, self._blanks = self._last, ""
        return reader.name is not None

    def _as_text(self, text: str) -> list[Piece]:
        """Return a malformed call as text, without special tokens. Return nothing if it follows other calls and the
        output ends within it.
        """
        if self._last and self.calls:
            return []
        return [self._shown(self._special.sub("", text))]
