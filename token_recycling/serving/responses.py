"""`POST /v1/responses`: a chat whose answer is a list of items, of reasoning, text, and calls of tools.

Nothing is stored, so that a conversation is sent whole each time; reasoning in it is left out.
"""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, ValidationError

from .answers import Event
from .calling import ToolChoice
from .choices import Delta
from .completions import ChatAnswer
from .errors import ApiError, field_and_message, invalid
from .job import Job
from .requests import ChatBody, Refused, Templated
from .service import Service
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

    input: str | Annotated[list[Message | _Call | _CallOutput | _Reasoning], Field(min_length=1)] = Field(
        description="a text, or messages, calls and what they gave; reasoning is left out"
    )
    instructions: str | None = Field(None, description="a system message before all others")
    max_output_tokens: int | None = Field(None, ge=1, description="tokens of an answer at most")
    tools: list[_Tool] | None = Field(None, description="functions alone")
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = Field(None, description="as in a chat")

    harmless = ChatBody.harmless
    refused: ClassVar[Refused] = {
        **{name: ChatBody.refused[name] for name in ("moderation", "service_tier", "store")},
        **dict.fromkeys(("access_programs", "context_management", "image", "max_tool_calls"), ("leave it out", ())),
        **dict.fromkeys(("conversation", "previous_response_id", "prompt"), ("send all of it as input", ())),
        "background": ("leave it out", (False,)),
        "include": ("leave it out", ([],)),
        "reasoning": ("give it in chat_template_kwargs, if the template has it", ()),
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

    def event(self, name: str, /, **data: Any) -> Event:
        """The next event of a stream."""
        return name, {"type": name, "sequence_number": next(self._numbers), **data}

    def push(self, delta: Delta) -> Iterator[Event]:
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

    def end(self, status: str) -> Iterator[Event]:
        """End the answer, whose last text has that status; one without items gets an empty message."""
        if not self.items:
            yield from self._begin("output_text")
        yield from self._end(status)

    def _begin(self, kind: str) -> Iterator[Event]:
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

    def _end(self, status: str) -> Iterator[Event]:
        """End the text that grows, if one does."""
        if self._kind is None:
            return
        kind, item = self._kind, self.items[-1]
        self._kind, item["status"] = None, status
        (part,) = item["content"]
        yield self._of_part(f"{kind}.done", text=part["text"], **_KINDS[kind][2])
        yield self._of_part("content_part.done", part=part)
        yield self._of_item("output_item.done", item=item)

    def _of_item(self, name: str, /, **data: Any) -> Event:
        return self.event(f"response.{name}", output_index=len(self.items) - 1, **data)

    def _of_part(self, name: str, /, **data: Any) -> Event:
        return self._of_item(name, item_id=self.items[-1]["id"], content_index=0, **data)


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


@dataclass
class ResponseAnswer(ChatAnswer):
    """The answer of /v1/responses: that of a chat, said as items."""

    prefix = "resp_"

    def __post_init__(self) -> None:
        self._output = _Output()
        self._whole: dict[str, Any] = {}

    @classmethod
    async def prepare(cls, service: Service, body: ResponsesBody, job: Job) -> ResponseAnswer:  # type: ignore[override]
        try:
            answer = await super().prepare(service, body.as_chat(), job)
        except ValidationError as error:
            raise invalid(*field_and_message(error.errors())) from error
        except ApiError as error:
            error.param = "input" if error.param == "messages" else error.param
            raise
        assert isinstance(answer, ResponseAnswer)
        return answer

    async def events(self) -> AsyncGenerator[Event]:
        output, reason = self._output, None
        for name in ("created", "in_progress"):
            yield output.event(f"response.{name}", response=self._response("in_progress"))
        async with contextlib.aclosing(self.deltas()) as deltas:
            async for _, delta, ended in deltas:
                reason = ended
                for event in output.push(delta):
                    yield event
        status = "incomplete" if reason == "length" else "completed"
        for event in output.end(status):
            yield event
        usage = self.usage()
        counted = {
            "input_tokens": usage.pop("prompt_tokens"),
            "input_tokens_details": {**usage.pop("prompt_tokens_details"), "cache_write_tokens": 0},
            "output_tokens": usage.pop("completion_tokens"),
            "output_tokens_details": {"reasoning_tokens": 0},
            **usage,
        }
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        self._whole = self._response(status, incomplete_details=details, usage=counted)
        yield output.event(f"response.{status}", response=self._whole)

    def whole(self) -> dict[str, Any]:
        return self._whole

    def failed(self, error: dict[str, Any]) -> Iterable[Event]:
        said = error["error"]
        yield self._output.event("error", message=said["message"], code=said["code"], param=said["param"])
        about = {"code": "server_error", "message": said["message"]}
        yield self._output.event("response.failed", response=self._response("failed", error=about))

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        about = {"id": self.job.id, "object": "response", "created_at": self.created, "status": status}
        # The official client wants these too.
        usual = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        return {**about, "model": self.service.settings.name, "output": self._output.items, **usual, **more}
