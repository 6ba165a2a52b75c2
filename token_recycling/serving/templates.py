"""From messages to a prompt, through the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel
from transformers.cli.serving.utils import BaseHandler, Modality

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


def rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **variables: Any) -> torch.Tensor:
    """The prompt (1, length) of a conversation; raises what the template raises."""
    written = [message.model_dump(exclude_none=True) for message in messages]
    inputs = BaseHandler.get_processor_inputs_from_messages(written, Modality.LLM)
    return tokenizer.apply_chat_template(
        inputs, add_generation_prompt=True, return_tensors="pt", return_dict=True, **variables
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
