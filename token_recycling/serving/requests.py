"""The bodies of requests, checked before anything is done: for fields of the wrong kind, and fields without effect.

The fields themselves are OpenAI's; transformers' handlers read them. A field that they ignore is refused, unless its
value asks for what happens anyway.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, StringConstraints, field_validator, model_validator
from transformers import PreTrainedTokenizerBase

_Text = Annotated[str, StringConstraints(min_length=1)]
_LISTED = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)


class Body(BaseModel, extra="allow", strict=True):
    """What all requests have in common. Other fields are left to transformers' handlers."""

    model: str | None = None
    temperature: Annotated[float | None, Field(ge=0, le=100)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    stream: bool | None = None
    generation_config: str | None = None

    ignored: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields without effect, with the values that are harmless."""

    @model_validator(mode="after")
    def _nothing_ignored(self) -> Body:
        for name, harmless in self.ignored.items():
            value = (self.model_extra or {}).get(name)
            if value is not None and value not in harmless:
                raise ValueError(f"{name}: this server does not support it; leave it out")
        return self

    @property
    def stops(self) -> Sequence[str]:
        """The stop strings."""
        return getattr(self, "stop", None) or ()


class _Completing(Body):
    stop: Annotated[list[_Text] | None, _LISTED, Field(max_length=16)] = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    frequency_penalty: Annotated[float | None, Field(gt=-1, le=2)] = None

    ignored = {
        "n": (1,), "best_of": (1,), "echo": (False,), "logprobs": (False,), "top_logprobs": (0,),
        "presence_penalty": (0, 0.0), "response_format": ({"type": "text"},), "modalities": (["text"],),
        "tool_choice": ("auto",), "audio": (), "prediction": (), "functions": (), "function_call": (),
        "web_search_options": (),
    }  # fmt: skip


class TextBody(_Completing):
    """Of /v1/completions."""

    prompt: str


class Part(BaseModel, extra="allow"):
    """A part of a message: text, since nothing else is supported."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class Message(BaseModel, extra="allow"):
    """One message of a chat."""

    role: str
    content: str | list[Part] | None = None


class _Templated(Body):
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _variables_only(self) -> _Templated:
        """Refuses arguments of `apply_chat_template`, above all another template."""
        arguments = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()
        taken = sorted(arguments & (self.chat_template_kwargs or {}).keys())
        if taken:
            raise ValueError(f"chat_template_kwargs: expected variables of the template, got {', '.join(taken)}")
        return self


class ChatBody(_Completing, _Templated):
    """Of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logit_bias: dict[Annotated[str, StringConstraints(pattern=r"^\d+$")], float] | None = None


class ResponsesBody(_Templated):
    """Of /v1/responses."""

    input: str | list[dict[str, Any]]
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    stream: bool | None = False
    """False by default, as in OpenAI's API; transformers' server streams unless told otherwise."""

    ignored = {
        "previous_response_id": (), "background": (False,), "top_logprobs": (0,), "truncation": ("disabled",),
        "tool_choice": ("auto",), "text": ({"format": {"type": "text"}},), "max_tool_calls": (), "prompt": (),
        "include": ([],),
    }  # fmt: skip

    @field_validator("input")
    @classmethod
    def _text_alone(cls, value: Any) -> Any:
        """Checks messages and their parts; items of other kinds, such as tool calls, are left to the handler."""
        for item in value if isinstance(value, list) else ():
            if "role" in item:
                Message.model_validate(item)
            elif str(item.get("type")).startswith("input_"):
                Part.model_validate(item)
        return value


class StepsBody(_Completing):
    """Of /v1/token_recycling/steps: the prompt as a text, or as messages of a chat."""

    prompt: str | None = None
    messages: Annotated[list[Message] | None, Field(min_length=1)] = None
    drafter: _Text = "accelerated"

    @model_validator(mode="after")
    def _one_prompt(self) -> StepsBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected a prompt or messages, one of both")
        return self
