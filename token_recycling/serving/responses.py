"""`POST /v1/responses`: a chat whose answer is a list of items, of reasoning, text, and calls of tools.

Nothing is stored, so that a conversation is sent whole each time; reasoning in it is left out.
"""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from . import chat
from .answers import Asked
from .choices import Delta
from .errors import CancelledError, failure
from .job import Job
from .requests import ChatBody, Refused, Templated, ToolChoice
from .service import Service
from .steps import server_sent
from .templates import Message, Part


class _Tool(BaseModel, extra="allow"):
    type: Literal["function"]
    name: str


class _Call(BaseModel):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class _CallOutput(BaseModel):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Part]


class _Reasoning(BaseModel):
    type: Literal["reasoning"]


class ResponsesBody(Templated):
    """Of /v1/responses."""

    input: Annotated[
        str | Annotated[list[Message | _Call | _CallOutput | _Reasoning], Field(min_length=1)],
        Field(description="a text, or messages, calls and what they gave; reasoning is left out"),
    ]
    instructions: Annotated[str | None, Field(description="a system message before all others")] = None
    max_output_tokens: Annotated[int | None, Field(ge=1, description="tokens of an answer at most")] = None
    tools: Annotated[list[_Tool] | None, Field(description="functions alone")] = None
    tool_choice: ToolChoice = None

    harmless = ChatBody.harmless
    refused: ClassVar[Refused] = {
        **{name: ChatBody.refused[name] for name in ("moderation", "parallel_tool_calls", "service_tier", "store")},
        **dict.fromkeys(("access_programs", "context_management", "image", "max_tool_calls"), ("leave it out", ())),
        **dict.fromkeys(("conversation", "previous_response_id", "prompt"), ("send all of it as input", ())),
        "background": ("leave it out", (False,)),
        "include": ("leave it out", ([],)),
        "reasoning": ChatBody.refused["reasoning_effort"],
        "stream_options": ("leave it out", ({"include_obfuscation": False},)),
        "text": ("use response_format of a chat", ({"format": {"type": "text"}},)),
        "top_logprobs": ("use a chat", (0,)),
        "truncation": ("shorten the input", ("disabled",)),
    }

    def as_chat(self) -> ChatBody:
        """The same request as a chat."""
        shared = {name: getattr(self, name) for name in type(self).model_fields.keys() & ChatBody.model_fields.keys()}
        tools = [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools or ()]
        own = {"messages": self._messages(), "tools": tools, "max_completion_tokens": self.max_output_tokens}
        return ChatBody(**{**shared, **own})

    def _messages(self) -> list[dict[str, Any]]:
        """Calls in a row, and the message before them, are one."""
        written: list[dict[str, Any]] = []
        if self.instructions is not None:
            written.append({"role": "system", "content": self.instructions})
        items = [Message(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        for item in items:
            data = item.model_dump(exclude_none=True)
            if isinstance(item, Message):
                written.append(data)
            elif isinstance(item, _CallOutput):
                written.append({"role": "tool", "tool_call_id": item.call_id, "content": data["output"]})
            elif isinstance(item, _Call):
                if not written or written[-1]["role"] != "assistant":
                    written.append({"role": "assistant"})
                called = {"name": item.name, "arguments": item.arguments}
                calls = written[-1].setdefault("tool_calls", [])
                calls.append({"id": item.call_id, "type": "function", "function": called})
        return written


async def asked(service: Service, body: ResponsesBody, job: Job) -> Asked:
    """The text of a request; raises ApiError, and what the template raises."""
    return await chat.asked(service, body.as_chat(), job)


_Event = tuple[str, dict[str, Any]]
_KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "reasoning_text": ({"type": "reasoning", "summary": []}, {}, {}),
    "output_text": ({"type": "message", "role": "assistant"}, {"annotations": []}, {"logprobs": []}),
}
"""What the item of a text has, its one part, and the events that tell of it."""


class _Output:
    """The items of an answer as they grow, and the events that tell of them."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._kind: str | None = None
        """Of the text that grows, in the last item."""
        self._numbers = itertools.count()

    def event(self, name: str, /, **data: Any) -> _Event:
        """The next event of a stream."""
        return name, {"type": name, "sequence_number": next(self._numbers), **data}

    def push(self, delta: Delta) -> Iterator[_Event]:
        """Add what came."""
        for kind, piece in (("reasoning_text", delta.reasoning), ("output_text", delta.text)):
            if piece:
                yield from self._begin(kind)
                self.items[-1]["content"][0]["text"] += piece
                yield self._of_part(f"{kind}.delta", delta=piece, **_KINDS[kind][2])
        for call in delta.calls:
            yield from self._end("completed")
            item = {"type": "function_call", "id": _id("fc"), "call_id": _id("call"), **call._asdict()}
            self.items.append({**item, "status": "completed"})
            yield self._of_item("output_item.added", item=self.items[-1])
            yield self._of_item("function_call_arguments.done", item_id=item["id"], **call._asdict())
            yield self._of_item("output_item.done", item=self.items[-1])

    def end(self, status: str) -> Iterator[_Event]:
        """End the answer, whose last text has that status; one without items gets an empty message."""
        if not self.items:
            yield from self._begin("output_text")
        yield from self._end(status)

    def _begin(self, kind: str) -> Iterator[_Event]:
        """Begin an item, unless one of that kind grows."""
        if kind == self._kind:
            return
        yield from self._end("completed")
        about, of_part, _ = _KINDS[kind]
        self._kind, part = kind, {"type": kind, "text": "", **of_part}
        self.items.append({"id": _id(about["type"]), **about, "status": "in_progress", "content": []})
        yield self._of_item("output_item.added", item=self.items[-1])
        self.items[-1]["content"].append(part)
        yield self._of_part("content_part.added", part=part)

    def _end(self, status: str) -> Iterator[_Event]:
        """End the text that grows, if one does."""
        if self._kind is None:
            return
        kind, item = self._kind, self.items[-1]
        self._kind, item["status"] = None, status
        (part,) = item["content"]
        yield self._of_part(f"{kind}.done", text=part["text"], **_KINDS[kind][2])
        yield self._of_part("content_part.done", part=part)
        yield self._of_item("output_item.done", item=item)

    def _of_item(self, name: str, /, **data: Any) -> _Event:
        return self.event(f"response.{name}", output_index=len(self.items) - 1, **data)

    def _of_part(self, name: str, /, **data: Any) -> _Event:
        return self._of_item(name, item_id=self.items[-1]["id"], content_index=0, **data)


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


async def whole_response(service: Service, asked: Asked) -> dict[str, Any]:
    """The answer as one object; raises CancelledError if its client has gone, and what the generation raised."""
    events = [event async for event in _events(service, asked, _Output())]
    return events[-1][1]["response"]


def streamed_response(service: Service, asked: Asked) -> AsyncGenerator[str]:
    """The answer as server-sent events; an error ends it with events that say so."""

    async def until_failed() -> AsyncGenerator[_Event]:
        output = _Output()
        try:
            async with contextlib.aclosing(_events(service, asked, output)) as events:
                async for event in events:
                    yield event
        except CancelledError:
            return
        except Exception as error:
            said = failure(error)["error"]
            yield output.event("error", message=said["message"], code=said["code"], param=said["param"])
            about = {"code": "server_error", "message": said["message"]}
            yield output.event("response.failed", response=_response(service, asked, output, "failed", error=about))
        finally:
            asked.job.cancel()

    return server_sent(until_failed())


async def _events(service: Service, asked: Asked, output: _Output) -> AsyncGenerator[_Event]:
    """The events of an answer; the last one has all of it."""
    for name in ("created", "in_progress"):
        yield output.event(f"response.{name}", response=_response(service, asked, output, "in_progress"))
    reason = None
    async with contextlib.aclosing(asked.deltas(service)) as deltas:
        async for _, delta, ended in deltas:
            reason = ended
            for event in output.push(delta):
                yield event
    if reason is None:
        raise CancelledError
    status = "incomplete" if reason == "length" else "completed"
    for event in output.end(status):
        yield event
    details = {"reason": "max_output_tokens"} if status == "incomplete" else None
    usage = asked.usage()
    counted = {
        "input_tokens": usage.pop("prompt_tokens"),
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage.pop("completion_tokens"),
        "output_tokens_details": {"reasoning_tokens": 0},
        **usage,
    }
    whole = _response(service, asked, output, status, incomplete_details=details, usage=counted)
    yield output.event(f"response.{status}", response=whole)


def _response(service: Service, asked: Asked, output: _Output, status: str, **more: Any) -> dict[str, Any]:
    about = {"id": asked.job.id, "object": "response", "created_at": asked.created, "model": service.settings.name}
    # The official client wants these too.
    usual = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    return {**about, "status": status, "output": output.items, **usual, **more}
