"""From messages to a prompt, through the chat template, and back: how models write reasoning and tool calls.

A response template, which transformers reads since 5.13, says where the parts of an answer begin and end
(huggingface.co/docs/transformers, "Response Parsing"). A tokenizer may bring one; here are those of families whose
tokenizers did not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from .._util.text_stream import one_line
from ..model.loading import Loaded
from .json_values import check_json

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
            check_json("messages", called["arguments"])
    return written


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    goes_on: bool = False,
    prompts: bool = True,
    **variables: Any,
) -> torch.Tensor:
    """The prompt (1, length) of a conversation; raises what the template raises. `goes_on`: its last message is not
    ended, so that the answer goes on with it; else, if it `prompts`, it ends with how an answer begins.
    """
    return tokenizer.apply_chat_template(
        [_written(message) for message in messages],
        add_generation_prompt=prompts and not goes_on,
        continue_final_message=goes_on,
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


REASONING = ("reasoning_content", "thinking", "reasoning")
"""What templates call the field with the reasoning."""


def _template(anchor: Any, thought: tuple[str, str], end: dict[str, Any], **calls: Any) -> dict[str, Any]:
    """A response template: how an answer begins, the marks of its reasoning, its end, and its calls."""
    fields = {
        "reasoning_content": {"open": thought[0], "close": thought[1], "content": "text"},
        "tool_calls": {"repeats": True, **calls},
        "content": {**end, "content": "text"},
    }
    return {"defaults": {"role": "assistant"}, "start_anchor": anchor, "fields": fields}


_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
# Blanks between two marks are no text: they would take the place of the text before.
_QWEN = "<|im_start|>assistant\n", ("<think>", "</think>"), {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"}
_JSON_CALLS = _template(
    *_QWEN,
    open_pattern=r"\s*<tool_call>",
    close="</tool_call>",
    content="json",
    transform={"type": "function", "function": "{content}"},
)
_XML_CALLS = _template(
    *_QWEN,
    open_pattern=r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    close_pattern=r"</function>\s*</tool_call>",
    content="xml-inline",
    content_args={"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
    transform=_NAMED,
)
_GEMMA = _template(
    ["<|turn>model\n", "<tool_response|>"],
    ("<|channel>thought\n", "<channel|>"),
    {"close": ["<turn|>", "<|tool_response>", "<eos>"]},
    open_pattern=r"<\|tool_call>call:(?P<name>\w+)",
    close="<tool_call|>",
    content="json",
    content_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
    transform=_NAMED,
)


def response_template(loaded: Loaded) -> dict[str, Any] | None:
    """The tokenizer's own, or that of a family; None where neither is known, or this transformers reads none."""
    tokenizer, family = loaded.tokenizer, loaded.model.config.model_type
    if not hasattr(tokenizer, "get_response_parser"):
        return None
    if getattr(tokenizer, "response_template", None) is not None:
        return tokenizer.response_template
    if family.startswith(("qwen2", "qwen3")):
        return _XML_CALLS if "<function=" in tokenizer.get_chat_template(tools=[]) else _JSON_CALLS
    return _GEMMA if family == "gemma4" else None


def response_parser(loaded: Loaded, ids: torch.Tensor, tools: list[dict[str, Any]] | None) -> Any:
    """A parser of the answer to a prompt (1, length), None where the form of answers is not known."""
    template = response_template(loaded)
    return template and loaded.tokenizer.get_response_parser(template, prefix=ids[0], tools=tools)
