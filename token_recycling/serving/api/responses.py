"""`POST /v1/responses`: a chat whose output is a list of items (reasoning, text, function calls).

Nothing is stored: the client sends the whole conversation each time. Encrypted and summarized reasoning is ignored.
Functions within a namespace, in which Codex groups those of an MCP server, are shown to the model as
`NAMESPACE__FUNCTION`.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, WrapValidator, model_validator
from pydantic_core import PydanticOmit
from transformers import GenerationConfig

from ..conversation import (
    Arguments,
    Content,
    Function,
    Tool,
    ToolChoice,
    joined,
    only_of_type,
    reasoning_text,
    tag_of,
    text_only,
)
from ..engine import Engine, Job
from ..errors import ApiError, shown, warn_ignored
from ..generation import Generation
from ..output import Delta, Kind, Piece
from ..protocol import (
    REFUSED,
    ChatRequest,
    Fields,
    FormatOptions,
    NonemptyText,
    TemplatedRequest,
    TokenLimit,
    Unsupported,
    chat_of,
)
from .chat import chat_generation
from .common import Event, Parts

PREFIX = "resp_"


class NamespacedFunction(Function):
    """A function, perhaps of a namespace; its name is the one shown to the model."""

    namespace: str | None = Field(None, exclude=True)


def _qualified(namespace: str | None, name: str) -> str:
    """Return the name under which the model sees a function."""
    return f"{namespace}__{name}" if namespace else name


def _without_namespaces(tools: Any) -> Any:
    """Return the tools with each namespace replaced by its tools."""
    if not isinstance(tools, list):
        return tools
    return [tool for stated in tools for tool in _tools_of(stated)]


def _tools_of(stated: Any) -> list[Any]:
    if not isinstance(stated, dict) or stated.get("type") != "namespace":
        return [stated]
    namespace, tools = stated.get("name"), stated.get("tools")
    if not isinstance(namespace, str) or not isinstance(tools, list):
        warn_ignored("a namespace without a name or tools")
        return []
    named = [tool for tool in tools if isinstance(tool, dict) and isinstance(tool.get("name"), str)]
    return [{**tool, "name": _qualified(namespace, tool["name"]), "namespace": namespace} for tool in named]


Functions = Annotated[
    list[Annotated[NamespacedFunction, only_of_type("function")]], BeforeValidator(_without_namespaces)
]


class Item(BaseModel):
    """One item of the input: a message, reasoning, a call, its output, or further tools."""

    type: Literal["message", "reasoning", "function_call", "function_call_output", "additional_tools"] = "message"
    role: Literal["user", "assistant", "system", "developer"] = "user"
    content: Content | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Arguments | None = None
    output: Annotated[Content | None, BeforeValidator(text_only)] = None
    tools: Functions | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _complete(self) -> Item:
        needed = _NEEDED[self.type]
        if missing := [name for name in needed if getattr(self, name) is None]:
            raise ValueError(f"{missing[0]} is missing")
        return self


_NEEDED = {
    "message": ("content",),
    "reasoning": ("content",),
    "function_call": ("call_id", "name"),
    "function_call_output": ("call_id", "output"),
    "additional_tools": ("tools",),
}
"""The types of items, each with its required fields."""
_REFUSED_ITEMS = {
    "item_reference": "nothing is stored; send the item, as AI SDK does with store=false",
    "compaction": "its content is encrypted; send the items",
}
"""Items that cannot be skipped without changing the conversation, with the remedy."""
_LOGPROBS = "message.output_text.logprobs"
_CHAT = "use logprobs of /v1/chat/completions"


def _known_item(item: Any) -> Any:
    """Return the item; skip reasoning without its text, and skip items of other tools than functions with a warning."""
    kind = tag_of(item, "message")
    if kind in _REFUSED_ITEMS:
        message = f"an input item of type {kind} is not supported: {_REFUSED_ITEMS[kind]}"
        raise ApiError(400, message, "unsupported", "input")
    if kind == "reasoning":
        if thought := reasoning_text(item.get("content")):
            return {"type": kind, "content": thought}
    elif kind in _NEEDED:
        return item
    else:
        warn_ignored(f"an input item of type {kind}")
    raise PydanticOmit


def _some_item(items: Any, handler: Callable[[Any], list[Item]]) -> list[Item]:
    supported = handler(items)
    if not supported:
        raise ValueError(f"must have an item of type {', '.join(_NEEDED)}, got {shown(items)}")
    return supported


def _without_logprobs(included: list[str]) -> list[str]:
    if _LOGPROBS in included:
        raise ValueError(f"{_LOGPROBS} is not supported: {_CHAT}")
    return included


class ReasoningOptions(Fields):
    """Reasoning options."""

    effort: NonemptyText | None = None


class ResponsesRequest(TemplatedRequest):
    """`POST /v1/responses`."""

    input: str | Annotated[list[Annotated[Item, BeforeValidator(_known_item)]], WrapValidator(_some_item)] = Field(
        description="Text, or messages, reasoning, calls and their outputs."
    )
    instructions: str | None = Field(None, description="A system message before all others.")
    max_output_tokens: TokenLimit | None = Field(None, description="Maximum number of output tokens.")
    tools: Functions | None = Field(None, description="Functions, also in namespaces; other types are skipped.")
    tool_choice: ToolChoice | None = Field(None, description="As in a chat.")
    reasoning: ReasoningOptions | None = Field(None, description="`effort`: same as `reasoning_effort` of a chat.")
    text: FormatOptions | None = Field(None, description="`format`: same as `response_format` of a chat.")
    include: Annotated[list[str], AfterValidator(_without_logprobs)] | None = Field(
        None, description="Ignored: outputs of tools that the server does not run, and encrypted reasoning."
    )

    unsupported: ClassVar[Unsupported] = {
        **REFUSED,
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), ("use max_output_tokens", ())),
        "n": ("send several requests", (1,)),
        **dict.fromkeys(
            ("previous_response_id", "conversation", "prompt"), ("send the whole conversation as input", ("",))
        ),
        "background": ("omit it", (False,)),
        "top_logprobs": (_CHAT, (0,)),
    }

    @property
    def functions(self) -> list[NamespacedFunction]:
        """All functions: those in `tools`, and those in items of the input."""
        items = () if isinstance(self.input, str) else self.input
        return [*(self.tools or ()), *(tool for item in items for tool in item.tools or ())]

    def as_chat(self) -> ChatRequest:
        """Return the request as a chat."""
        tools = [
            Tool(function=Function(**tool.model_dump(exclude={"type"}, exclude_unset=True))) for tool in self.functions
        ]
        return chat_of(
            self,
            "text.format",
            messages=self._messages(),
            tools=tools or None,
            tool_choice=self.tool_choice,
            max_completion_tokens=self.max_output_tokens,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            response_format=self.text.format if self.text else None,
        )

    def _messages(self) -> list[dict[str, Any]]:
        """Return the messages of a chat. Consecutive calls are merged with the assistant message before them, and
        reasoning with the one after it.
        """
        written: list[dict[str, Any]] = []
        thought = ""
        if self.instructions:
            written.append({"role": "system", "content": self.instructions})
        for item in [Item(content=self.input)] if isinstance(self.input, str) else self.input:
            if item.type == "reasoning":
                thought += joined(item.content)
                continue
            if item.type == "message":
                written.append({"role": item.role, "content": joined(item.content)})
            elif item.type == "function_call_output":
                written.append({"role": "tool", "tool_call_id": item.call_id, "content": joined(item.output)})
            elif item.type == "function_call":
                if not written or written[-1]["role"] != "assistant":
                    written.append({"role": "assistant"})
                called = {"name": _qualified(item.namespace, item.name or ""), "arguments": item.arguments or {}}
                calls = written[-1].setdefault("tool_calls", [])
                calls.append({"id": item.call_id, "type": "function", "function": called})
            if thought and written and written[-1]["role"] == "assistant":  # chat templates decide whether to show it
                written[-1]["reasoning_content"] = written[-1].get("reasoning_content", "") + thought
            thought = ""
        return written


_TEXTS: dict[Kind, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "reasoning": ("reasoning_text", {"type": "reasoning", "summary": []}, {}, {}),
    "text": ("output_text", {"type": "message", "role": "assistant"}, {"annotations": []}, {"logprobs": []}),
}
"""For an item with text: the type of its only part, and extra fields of the item, the part and its events."""


class _Items(Parts):
    """The items of an output."""

    def __init__(self, functions: Iterable[NamespacedFunction]) -> None:
        super().__init__()
        self._numbers = itertools.count()
        self._namespaces = {tool.name: tool.namespace for tool in functions if tool.namespace is not None}

    def event(self, name: str, /, **data: Any) -> Event:
        """Return an event with the next sequence number."""
        return name, {"type": name, "sequence_number": next(self._numbers), **data}

    def complete(self, status: str) -> Iterator[Event]:
        """End the output; its last item gets `status`. An output without items gets an empty message."""
        if not self.items:
            yield from self.begin(Piece("text", ""))
        yield from self.end(status)

    def _beginning(self, piece: Piece) -> Iterator[Event]:
        if piece.kind == "call":
            item = {"type": "function_call", "id": _id("fc"), "call_id": piece.id, **self._named(piece.name or "")}
            self.items.append({**item, "arguments": "", "status": "in_progress"})
            yield self._of_item("output_item.added", item=self.items[-1])
            return
        type_, about, of_part, _ = _TEXTS[piece.kind]
        self.items.append(
            {"id": _id("msg" if piece.kind == "text" else "rs"), **about, "status": "in_progress", "content": []}
        )
        yield self._of_item("output_item.added", item=self.items[-1])
        part = {"type": type_, "text": "", **of_part}
        self.items[-1]["content"].append(part)
        yield self._of_part("content_part.added", part=part)

    def _named(self, name: str) -> dict[str, str]:
        """Return the name and the namespace of a function, as the client knows it."""
        namespace = self._namespaces.get(name)
        if namespace is None:
            return {"name": name}
        return {"name": name.removeprefix(_qualified(namespace, "")), "namespace": namespace}

    def _growth(self, kind: Kind, text: str) -> Event:
        if kind == "call":
            return self._of_item("function_call_arguments.delta", item_id=self.items[-1]["id"], delta=text)
        type_, *_, of_event = _TEXTS[kind]
        return self._of_part(f"{type_}.delta", delta=text, **of_event)

    def _ending(self, kind: Kind, text: str, status: str) -> Iterator[Event]:
        item = self.items[-1]
        item["status"] = status
        if kind == "call":
            item["arguments"] = text
            about = {"item_id": item["id"], "name": item["name"], "arguments": text}
            yield self._of_item("function_call_arguments.done", **about)
        else:
            type_, *_, of_event = _TEXTS[kind]
            (part,) = item["content"]
            part["text"] = text
            yield self._of_part(f"{type_}.done", text=text, **of_event)
            yield self._of_part("content_part.done", part=part)
        yield self._of_item("output_item.done", item=item)

    def _of_item(self, name: str, /, **data: Any) -> Event:
        return self.event(f"response.{name}", output_index=len(self.items) - 1, **data)

    def _of_part(self, name: str, /, **data: Any) -> Event:
        return self._of_item(name, item_id=self.items[-1]["id"], content_index=0, **data)


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


class ResponseReply:
    """One output as items."""

    def __init__(self, engine: Engine, job: Job, body: ResponsesRequest, generation: Generation) -> None:
        self.generations, self._output = [generation], _Items(body.functions)
        self._reason: str | None = None
        self._about = {"id": job.id, "object": "response", "created_at": int(time.time())}
        self._model, self._stated = engine.settings.name, {**_USUAL, **_echo(body, generation.config)}

    def begin(self) -> Iterable[Event]:
        for name in ("created", "in_progress"):
            yield self._output.event(f"response.{name}", response=self._response("in_progress"))

    def push(self, index: int, delta: Delta) -> Iterable[Event]:
        self._reason = delta.finish_reason
        return self._output.push(delta)

    def end(self, usage: dict[str, Any]) -> Iterable[Event]:
        yield from self._output.complete(self._status)
        # An incomplete response also ends with this event. openai-python's stream helper and OpenAI's Agents SDK wait
        # for it, Codex treats `response.incomplete` as an error, and all of them read the status.
        yield self._output.event("response.completed", response=self._complete(usage))

    def fail(self, error: dict[str, Any]) -> Iterable[Event]:
        shown = error["error"]
        yield self._output.event("error", message=shown["message"], code=shown["code"], param=shown["param"])
        about = {"code": "server_error", "message": shown["message"]}
        yield self._output.event("response.failed", response=self._response("failed", error=about))

    def whole(self, outputs: list[Delta], usage: dict[str, Any]) -> dict[str, Any]:
        for _ in (*self.push(0, outputs[0]), *self._output.complete(self._status)):
            pass
        return self._complete(usage)

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _complete(self, usage: dict[str, Any]) -> dict[str, Any]:
        counted = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
            **{name: usage[name] for name in ("total_tokens", "completion_tokens_details", "speculation")},
        }
        details = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        ended = int(time.time()) if details is None else None
        return self._response(self._status, completed_at=ended, incomplete_details=details, usage=counted)

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        output = {"status": status, "model": self._model, "output": self._output.items}
        return {**self._about, **output, **self._stated, **more}


async def prepare(engine: Engine, body: ResponsesRequest, job: Job) -> ResponseReply:
    """Return the response to a request; raise ApiError."""
    try:
        generation = await chat_generation(engine, body.as_chat(), job)
    except ApiError as error:
        raise error.renamed("messages", "input") from error
    return ResponseReply(engine, job, body, generation)


_USUAL: dict[str, Any] = {
    **dict.fromkeys(("completed_at", "error", "incomplete_details", "usage", "previous_response_id", "max_tool_calls")),
    **dict.fromkeys(("safety_identifier", "prompt_cache_key")),
    "metadata": {},
    "store": False,
    "background": False,
    "truncation": "disabled",
    "service_tier": "default",
    "top_logprobs": 0,
}
"""Defaults of fields that the Open Responses specification requires of a response."""


def _echo(body: ResponsesRequest, config: GenerationConfig) -> dict[str, Any]:
    """Return the request fields that the response echoes, with defaults for absent fields."""
    usual: dict[str, Any] = {"type": "function", "description": None, "parameters": None, "strict": None}
    choice = body.tool_choice
    text = {"type": "text"} if body.text is None or body.text.format is None else body.text.format.stated()
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": config.temperature or float(bool(config.do_sample)),
        "top_p": 1.0 if config.top_p is None else config.top_p,
        "presence_penalty": body.presence_penalty or 0,
        "frequency_penalty": body.frequency_penalty or 0,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "text": {"format": text},
        "tools": [{**usual, **tool.model_dump(exclude_unset=True)} for tool in body.tools or ()],
        "tool_choice": "auto" if choice is None else choice.stated(),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
    }
