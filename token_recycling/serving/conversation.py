"""The messages and tools of a chat as pydantic models, in all the formats that clients send."""

from __future__ import annotations

import contextlib
import json
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, StringConstraints, Tag, model_validator
from pydantic_core import PydanticOmit, from_json

from .errors import shown, warn_ignored

Object: TypeAlias = dict[str, Any]
_TEXT_PARTS = ("text", "input_text", "output_text")
_THOUGHTS = ("thinking", "reasoning")


class Part(BaseModel, extra="allow"):
    """A part of a message's content: text or a refusal."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _text_only(self) -> Part:
        if self.type == "refusal" and self.refusal is not None:
            self.text = self.refusal
        elif self.type not in _TEXT_PARTS:
            raise ValueError(f"content of type {self.type[:40]!r} is not supported: this server accepts text only")
        elif self.text is None:
            raise ValueError("text is missing")
        return self


def _some_part(part: Any) -> Any:
    """Return a part; skip reasoning, which templates read from a separate field. A bare string is text."""
    if isinstance(part, dict) and part.get("type") in (*_THOUGHTS, "redacted_thinking"):
        raise PydanticOmit
    return {"type": "text", "text": part} if isinstance(part, str) else part


def reasoning_text(reasoning: Any) -> str:
    """Return the text of reasoning: a string, or the texts of its parts; empty if it is encrypted."""
    pieces = reasoning if isinstance(reasoning, list) else [reasoning]
    texts = (piece.get("text") if isinstance(piece, dict) else piece for piece in pieces)
    return "".join(text for text in texts if isinstance(text, str))


def _reasoning_in(content: Any) -> str:
    """Return the text of the reasoning among the parts of a content, which may be of any type."""
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    thoughts = (part.get(part["type"], part.get("text")) for part in parts if part.get("type") in _THOUGHTS)
    return "".join(map(reasoning_text, thoughts))


Content: TypeAlias = str | list[Annotated[Part, BeforeValidator(_some_part)]]


def joined(content: Content | None) -> str:
    """Return the text of a content, with its parts joined without a separator."""
    return content if isinstance(content, str) else "".join(part.text or "" for part in content or ())


_MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image"), "a picture"),
    **dict.fromkeys(("audio", "input_audio"), "a recording"),
    **dict.fromkeys(("file", "input_file", "document"), "a file"),
}
"""Types of parts other than text, with a description; a document may contain text."""


def text_only(content: Any) -> Any:
    """Return a tool's result with each picture or file replaced by a text, with a warning. Otherwise an agent's
    conversation could not continue after a tool has returned one.
    """
    return [_as_text(part) for part in content] if isinstance(content, list) else content


def _as_text(part: Any) -> Any:
    medium = _MEDIA.get(str(part.get("type"))) if isinstance(part, dict) else None
    source = part.get("source") if medium else None
    if medium is None or (isinstance(source, dict) and source.get("type") in ("text", "content")):
        return part
    warn_ignored(f"{medium} in a tool result")
    return {"type": "text", "text": f"[{medium}, which this model cannot see]"}


def _arguments(value: Any) -> Object | str:
    """Return the arguments of a tool call as an object, which chat templates need. Null, the string "null" and an empty
    string become an empty object. Other non-objects stay text: the model wrote them, and the client only repeats them.
    """
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = from_json(value or "{}", allow_inf_nan=False)
    return {} if value is None else value if isinstance(value, dict) else text


Arguments: TypeAlias = Annotated[Object | str, BeforeValidator(_arguments)]


class Called(BaseModel, extra="allow"):
    """The function and the arguments of a tool call."""

    name: str
    arguments: Arguments = Field(default_factory=dict)


class ToolCall(BaseModel, extra="allow"):
    """A tool call of a message."""

    function: Called


class Message(BaseModel, extra="allow"):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    tool_calls: list[ToolCall] | None = None
    prefix: bool | None = None
    """DeepSeek and Mistral: the output continues the last message if it has this flag."""

    @model_validator(mode="before")
    @classmethod
    def _newest(cls, data: Any) -> Any:
        """Convert older fields of OpenAI's API: function calls and their results become those of tools, a refusal
        becomes the content. Pictures and files in tool results become text. Parts with reasoning become the field
        `reasoning_content`, which chat templates may show.
        """
        if not isinstance(data, dict):
            return data
        newest = {name: value for name, value in data.items() if name not in ("function_call", "refusal")}
        if (called := data.get("function_call")) is not None:
            newest["tool_calls"] = [{"type": "function", "function": called}]
        if data.get("role") in ("function", "tool"):
            newest |= {"role": "tool", "content": text_only(data.get("content"))}
        if data.get("refusal") and not data.get("content"):
            newest["content"] = data["refusal"]
        if newest.get("tool_calls") == []:  # some templates would show an empty list of calls, or fail
            del newest["tool_calls"]
        if not data.get("reasoning_content") and (thought := _reasoning_in(data.get("content"))):
            newest["reasoning_content"] = thought
        return newest


FunctionName = Annotated[str, StringConstraints(min_length=1, pattern=r'^[^"\\\x00-\x1f]*$')]
"""Excludes characters that must not occur between the quotes of a call."""


class Function(BaseModel, extra="allow"):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None


class Tool(BaseModel, extra="allow"):
    """A tool of a chat. Only functions are supported."""

    type: Literal["function"] | None = "function"
    function: Function

    def shown(self) -> Object:
        """Return the tool in the form of chat templates, without null fields, which they would show."""
        return {**self.model_dump(exclude_none=True), "type": "function"}


def tag_of(value: Any, usual: str) -> str:
    """Return the `type` of a request's object; `usual` if it has none or is not an object."""
    tag = (value.get("type") or usual) if isinstance(value, dict) else usual
    if not isinstance(tag, str):
        raise ValueError(f"type must be a string, got {shown(tag)}")
    return tag


def only_of_type(wanted: str) -> BeforeValidator:
    """Return a validator that skips tools of other types than `wanted`, with a warning."""

    def kept(tool: Any) -> Any:
        if (tag := tag_of(tool, wanted)) != wanted:
            warn_ignored(f"a tool of type {tag}")
            raise PydanticOmit
        return tool

    return BeforeValidator(kept)


Tools: TypeAlias = list[Annotated[Tool, only_of_type("function")]]


class _Named(BaseModel):
    name: str


class NamedTool(BaseModel, extra="allow"):
    """A tool by name. A chat has the name in `function`, /v1/responses next to the type."""

    type: str = "function"
    name: str | None = None
    function: _Named | None = None

    @property
    def named(self) -> str:
        """The name of the function."""
        return self.name or (self.function.name if self.function else "")


class Mode(BaseModel):
    """Whether functions are called, as a string or as the type of an object. `any` is Mistral's and Anthropic's name of
    `required`.
    """

    type: Literal["auto", "none", "required", "any"]
    names: ClassVar[None] = None

    @model_validator(mode="before")
    @classmethod
    def _from_word(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) else value

    @property
    def mode(self) -> str:
        """`auto`, `none` or `required`."""
        return "required" if self.type == "any" else self.type

    def stated(self) -> str:
        """Return the mode as /v1/responses echoes it."""
        return self.mode


class OneFunction(NamedTool):
    """A function that must be called."""

    type: Literal["function"]
    mode: ClassVar[str] = "named"

    @property
    def names(self) -> list[str]:
        """The name of the function."""
        return [self.named]

    def stated(self) -> Object:
        """Return the choice as the client sent it."""
        return self.model_dump(exclude_unset=True)


class AllowedTools(BaseModel):
    """A subset of the tools. A chat has it in `allowed_tools`, /v1/responses next to the type."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedTool]

    @model_validator(mode="before")
    @classmethod
    def _beside_the_type(cls, value: Any) -> Any:
        stated = value.get("allowed_tools") if isinstance(value, dict) else None
        return {**value, **stated} if isinstance(stated, dict) else value

    @property
    def names(self) -> list[str]:
        """The names of the allowed functions."""
        return [tool.named for tool in self.tools if tool.type == "function"]

    def stated(self) -> Object:
        """Return the choice as /v1/responses echoes it."""
        return self.model_dump(exclude_unset=True)


_MODES = ("auto", "none", "required", "any")


def _tag_of_choice(choice: Any) -> str | None:
    if isinstance(choice, dict):
        choice = choice.get("type")
    type_ = getattr(choice, "type", choice)
    if type_ in ("function", "allowed_tools"):
        return str(type_)
    return "mode" if type_ in _MODES else None


ToolChoice: TypeAlias = Annotated[
    Annotated[Mode, Tag("mode")]
    | Annotated[OneFunction, Tag("function")]
    | Annotated[AllowedTools, Tag("allowed_tools")],
    Discriminator(
        _tag_of_choice,
        custom_error_type="tool_choice",
        custom_error_message=f"Input should be {', '.join(_MODES)}, a function or allowed_tools",
    ),
]
"""Each choice has a `mode` (`auto`, `none`, `required` or `named`) and `names`: the allowed functions, None for all."""
