"""`POST /v1/messages`, for clients of Anthropic's API: a chat whose output is a list of content blocks.

Errors are the same as on other paths: their body has the fields of both APIs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator
from pydantic_core import PydanticOmit, from_json

from ..conversation import Function, FunctionName, Part, Tool, only_of_type, tag_of, text_only
from ..engine import Engine, Job
from ..errors import invalid, warn_ignored
from ..generation import Generation
from ..output import Delta, Kind, Piece
from ..protocol import (
    REFUSED,
    ChatRequest,
    Fields,
    FormatOptions,
    OutputFormat,
    Stops,
    TemplatedRequest,
    Unsupported,
    chat_of,
)
from .chat import chat_generation, prompt_of
from .common import Event, Parts

PREFIX = "msg_"


_BILLING = re.compile(r"\Ax-anthropic-billing-header:(?:[ \t]*\w+=[\w.-]*;?)*\s*")
"""Claude Code's line for Anthropic's billing, a block of its own or the start of the system message. It changes with
every request, so that nothing after it could be cached; Anthropic's API leaves it out too.
"""
_OF_SERVER_TOOLS = re.compile(r"(?:server|mcp)_tool_use|\w+_tool_result|tool_reference")
"""Types of blocks about tools that another server ran or searched earlier in the conversation."""


def _known_block(block: Any) -> Any:
    """Return the block; skip a block about server tools, with a warning."""
    if _OF_SERVER_TOOLS.fullmatch(kind := tag_of(block, "text")):
        warn_ignored(f"a block of type {kind}")
        raise PydanticOmit
    return block


_KNOWN = BeforeValidator(_known_block)


class Source(BaseModel, extra="ignore"):
    """The text of a document: in `data`, or in blocks."""

    type: str
    data: str | None = None
    content: str | list[TextBlock] | None = None


class TextBlock(BaseModel, extra="ignore"):
    """A block with text: plain text, a text document, or a search result."""

    type: str
    text: str | None = None
    source: Source | str | None = None
    title: str | None = None
    context: str | None = None
    content: str | list[Annotated[TextBlock, _KNOWN]] | None = None
    citations: dict[str, Any] | list[Any] | None = None
    """For a document: whether the output should cite it; for text: its citations."""

    @model_validator(mode="after")
    def _text_only(self) -> TextBlock:
        if isinstance(self.citations, dict) and self.citations.get("enabled"):
            raise ValueError("citations are not supported: omit them")
        if self.type == "text":
            if self.text is None:
                raise ValueError("text is missing")
        elif self.type == "document":
            self.text = self._titled(self._document())
        elif self.type == "search_result":
            self.text = self._titled(_text_of(self.content))
        elif type(self) is TextBlock:
            raise ValueError(f"content of type {self.type[:40]!r} is not supported: this server accepts text only")
        return self

    def _document(self) -> str:
        source = self.source
        kind = source.type if isinstance(source, Source) else str(source)
        if not isinstance(source, Source) or kind not in ("text", "content"):
            raise ValueError(
                f"a document of the source type {kind[:40]!r} is not supported: this server accepts text only"
            )
        content = source.data if kind == "text" else source.content
        if content is None:
            raise ValueError(f"source.{'data' if kind == 'text' else 'content'} is missing")
        return _text_of(content)

    def _titled(self, text: str) -> str:
        """Return a document's text after its title and context, with a line end that separates it from further text."""
        return "\n".join([*filter(None, (self.title, self.context)), text, ""])


def _text_of(content: str | list[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "".join(block.text or "" for block in content or ())


class Block(TextBlock, extra="ignore"):
    """A block of a message's content: text, reasoning, a tool call, or its result."""

    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    is_error: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _result_text_only(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("type") == "tool_result":
            return {**data, "content": text_only(data.get("content"))}
        return data

    @model_validator(mode="after")
    def _supported(self) -> Block:
        needed = {"tool_use": ("id", "name"), "tool_result": ("tool_use_id",)}.get(self.type)
        if needed is None and self.text is None and self.type not in ("thinking", "redacted_thinking"):
            raise ValueError(f"content of type {self.type[:40]!r} is not supported: this server accepts text only")
        if missing := [name for name in needed or () if getattr(self, name) is None]:
            raise ValueError(f"{missing[0]} is missing")
        if self.is_error:  # chat templates cannot show errors
            warn_ignored("is_error")
        return self


class Turn(BaseModel, extra="ignore"):
    """A message of the user or the assistant, or a system message among them."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Annotated[Block, _KNOWN]]

    def as_chat(self) -> list[dict[str, Any]]:
        """Return the turn as messages of a chat, with a separate message per tool result. A system message without
        blocks only sets the effort of further turns; it is skipped.
        """
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        if self.role == "system" and not self.content:
            return []
        results = [
            {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text_of(block.content)}
            for block in self.content
            if block.type == "tool_result"
        ]
        calls = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input or {}}}
            for block in self.content
            if block.type == "tool_use"
        ]
        text, thought = ("".join(getattr(block, name) or "" for block in self.content) for name in ("text", "thinking"))
        own = {"role": self.role, "content": text, **({"tool_calls": calls} if calls else {})}
        if thought:  # chat templates decide whether to show it
            own["reasoning_content"] = thought
        return [*results, *([own] if text or calls or not results else [])]


class MessagesTool(Fields):
    """A function in the format of Anthropic's API."""

    name: FunctionName
    description: str | None = None
    type: str | None = None
    input_schema: dict[str, Any] | None = None
    input_examples: list[dict[str, Any]] | None = None
    strict: bool | None = None

    def as_chat(self) -> Tool:
        """Return the function as a tool of a chat."""
        stated = {
            "description": self.description,
            "parameters": self.input_schema,
            "input_examples": self.input_examples,
            "strict": self.strict,
        }
        fields = {name: value for name, value in stated.items() if value is not None}
        return Tool(function=Function.model_validate({"name": self.name, **fields}))


class MessagesToolChoice(BaseModel, extra="ignore"):
    """Which tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def as_chat(self) -> dict[str, str | None]:
        """Return the `tool_choice` of a chat."""
        return {"type": "function", "name": self.name} if self.type == "tool" else {"type": self.type}


class TokenCountRequest(TemplatedRequest):
    """`POST /v1/messages/count_tokens`."""

    messages: list[Turn] = Field(min_length=1, description="Text, tool calls and their results.")
    system: str | list[Part] | None = Field(None, description="A system message before all others.")
    tools: list[Annotated[MessagesTool, only_of_type("custom")]] | None = Field(
        None, description="Functions; tools that run on Anthropic's servers are skipped."
    )
    tool_choice: MessagesToolChoice | None = Field(None, description="`auto`, `any`, `tool` or `none`.")

    unsupported: ClassVar[Unsupported] = {
        **REFUSED,
        "max_completion_tokens": ("use max_tokens", ()),
        "n": ("send several requests", (1,)),
        "mcp_servers": ("omit it", ([],)),
        "container": ("omit it", ()),
        "thread": ("nothing is stored: send all messages", ()),
        "compaction": ("send the messages with a prompt that asks for a summary", ()),
    }

    def as_chat(self, format_field: str = "", **more: Any) -> ChatRequest:
        """Return the request as a chat; `format_field` is its own name of the output format."""
        blocks = [self.system] if isinstance(self.system, str) else [block.text or "" for block in self.system or ()]
        instructions = "".join(_BILLING.sub("", block) for block in blocks)
        system = [{"role": "system", "content": instructions}] if instructions else []
        choice = self.tool_choice
        if choice is not None and choice.disable_parallel_tool_use:
            more["parallel_tool_calls"] = False
        messages = system + [message for turn in self.messages for message in turn.as_chat()]
        if self.messages[-1].role == "assistant" and self.continue_final_message is None:
            # The client has prefilled the last message; the output continues it.
            if "tool_calls" in messages[-1]:
                raise invalid("messages", "the last message must not have tool_use without its tool_result after it")
            if messages[-1]["content"]:
                more["continue_final_message"] = True
            else:
                messages.pop()
        return chat_of(
            self,
            format_field,
            messages=messages,
            tools=[tool.as_chat() for tool in self.tools or ()] or None,
            tool_choice=None if choice is None else choice.as_chat(),
            **more,
        )


class MessagesRequest(TokenCountRequest):
    """`POST /v1/messages`."""

    max_tokens: int = Field(ge=1, description="Maximum number of output tokens.")
    stop_sequences: Stops | None = Field(None, description="Same as `stop`.")
    output_config: FormatOptions | None = Field(None, description="`format`: JSON with a schema.")
    output_format: OutputFormat | None = Field(None, description="Same as `output_config.format`.")

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    def as_chat(self, format_field: str = "", **more: Any) -> ChatRequest:
        field, form = "output_format", self.output_format
        if form is None and self.output_config is not None:
            field, form = "output_config.format", self.output_config.format
        return super().as_chat(
            format_field=field, max_tokens=self.max_tokens, stop=self.stop_sequences, response_format=form, **more
        )


_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""The type of a delta, and its text field."""
_SIGNATURE = "unsigned"
"""The signature of thinking blocks, which the server does not check. With an empty one, some clients send the reasoning
back as text (earendil-works/pi#4464), and others drop it (lsdefine/GenericAgent#357).
"""


class _Blocks(Parts):
    """The content blocks of an output."""

    def _beginning(self, piece: Piece) -> Iterator[Event]:
        if piece.kind == "call":
            id_ = piece.id.replace("call_", "toolu_", 1)
            block: dict[str, Any] = {"type": "tool_use", "id": id_, "name": piece.name, "input": {}}
        elif piece.kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            block = {"type": "text", "text": ""}
        self.items.append(block)
        yield self._event("content_block_start", content_block=block)

    def _growth(self, kind: Kind, text: str) -> Event:
        name, field = _DELTAS[kind]
        return self._event("content_block_delta", delta={"type": name, field: text})

    def _ending(self, kind: Kind, text: str, status: str) -> Iterator[Event]:
        block = self.items[-1]
        if kind == "call":
            block["input"] = _input_of(text)
        else:
            block[block["type"]] = text
        if kind == "reasoning":  # clients may wait for it, since Anthropic's streams end reasoning so
            block["signature"] = _SIGNATURE
            yield self._event("content_block_delta", delta={"type": "signature_delta", "signature": _SIGNATURE})
        yield self._event("content_block_stop")

    def _event(self, name: str, **data: Any) -> Event:
        return name, {"type": name, "index": len(self.items) - 1, **data}


def _input_of(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object; of a truncated call, the arguments before its end. Malformed
    arguments are wrapped as Anthropic's documentation of fine-grained tool streaming recommends.
    """
    try:
        value: dict[str, Any] = from_json(arguments or "{}", allow_partial=True)
        json.dumps(value, allow_nan=False)  # a response can contain neither NaN nor infinity (1e999)
        return value
    except ValueError:
        return {"INVALID_JSON": arguments}


class MessageReply:
    """One output as content blocks."""

    def __init__(self, engine: Engine, job: Job, generation: Generation) -> None:
        self.generations, self._job, self._blocks = [generation], job, _Blocks()
        self._started = False
        self._last = Delta()
        self._about = {"id": job.id, "type": "message", "role": "assistant", "model": engine.settings.name}

    def begin(self) -> Iterable[Event]:
        """Return nothing: `message_start` has the number of cached tokens, which is known only with the first token."""
        return ()

    def push(self, index: int, delta: Delta) -> Iterable[Event]:
        yield from self._start()
        self._last = delta
        yield from self._blocks.push(delta)

    def end(self, usage: dict[str, Any]) -> Iterable[Event]:
        yield from self._blocks.end()
        yield "message_delta", {"type": "message_delta", "delta": self._ending(), "usage": _usage(usage)}
        yield "message_stop", {"type": "message_stop"}

    def fail(self, error: dict[str, Any]) -> Iterable[Event]:
        yield from self._start()
        yield "error", error

    def whole(self, outputs: list[Delta], usage: dict[str, Any]) -> dict[str, Any]:
        for _ in (*self.push(0, outputs[0]), *self._blocks.end()):
            pass
        return {**self._message(), **self._ending(), "usage": _usage(usage)}

    def _start(self) -> Iterable[Event]:
        if not self._started:
            self._started = True
            usage = {**_usage(self._job.usage()), "output_tokens": 0}
            yield "message_start", {"type": "message_start", "message": {**self._message(), "usage": usage}}

    def _message(self) -> dict[str, Any]:
        return {**self._about, "content": self._blocks.items, "stop_reason": None, "stop_sequence": None}

    def _ending(self) -> dict[str, Any]:
        reason = _STOP_REASONS.get(self._last.finish_reason or "", "end_turn")
        if reason == "end_turn" and self._last.stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": self._last.stop_string}
        return {"stop_reason": reason, "stop_sequence": None}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
        "speculation": usage["speculation"],
    }


async def prepare(engine: Engine, body: MessagesRequest, job: Job) -> MessageReply:
    """Return the response to a request; raise ApiError."""
    return MessageReply(engine, job, await chat_generation(engine, body.as_chat(), job))


async def count_tokens(engine: Engine, body: TokenCountRequest) -> dict[str, Any]:
    """Return the number of tokens of a prompt; raise ApiError."""
    ids, _ = await prompt_of(engine, body.as_chat())
    return {"input_tokens": ids.shape[-1]}
