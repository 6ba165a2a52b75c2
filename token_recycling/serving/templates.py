"""From messages to a prompt, through the chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from .._util.text_stream import one_line

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


class Part(BaseModel, extra="allow"):
    """A part of a message: text, since nothing else is supported."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class Message(BaseModel, extra="allow"):
    """One message of a chat."""

    role: str
    content: str | list[Part] | None = None


def _written(message: Message) -> dict[str, Any]:
    """A message as templates read it: its text in one string, the arguments of its calls as objects."""
    written, content = message.model_dump(exclude_none=True), message.content or ""
    written["content"] = content if isinstance(content, str) else " ".join(part.text for part in content)
    for call in written.get("tool_calls", ()):
        called = call.get("function", call)
        if isinstance(called["arguments"], str):
            called["arguments"] = json.loads(called["arguments"])
    return written


def rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **variables: Any) -> torch.Tensor:
    """The prompt (1, length) of a conversation; raises what the template raises."""
    return tokenizer.apply_chat_template(
        [_written(message) for message in messages],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
        **variables,
    )["input_ids"]


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError for a chat template that cannot render a message, rather than with the first request."""
    if not getattr(tokenizer, "chat_template", None):
        return
    try:
        length = rendered(tokenizer, [Message(role="user", content="Hello")]).shape[-1]
    except Exception as error:  # a template can fail in any way
        why = f"{type(error).__name__}: {one_line(error)}"
    else:
        if length:
            return
        why = "no token"
    raise ValueError(f"expected a chat template that renders a message, got {why}; give another, by --chat-template")
