"""From messages to a prompt, through the chat template, and back: how models write reasoning and tool calls.

A response template, which transformers reads since 5.13, says where the parts of an answer begin and end
(huggingface.co/docs/transformers, "Response Parsing"). A tokenizer may bring one; here are those of families whose
tokenizers did not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from .._util.text_stream import one_line
from ..model.loading import Loaded
from .errors import ApiError
from .protocol import Message, joined

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


def template_message(message: Message) -> dict[str, Any]:
    """Return a message as templates read it, with its text in one string."""
    return {**message.model_dump(exclude_none=True), "content": joined(message.content)}


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    continue_final: bool = False,
    add_prompt: bool = True,
    tools: list[dict[str, Any]] | None = None,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> torch.Tensor:
    """The prompt (1, length) of a conversation; raises ApiError where the template refuses it. `continue_final`: the
    output continues its last message; else, with `add_prompt`, it ends with how an answer begins.
    """
    conversation = [template_message(message) for message in messages]
    if not re.search(r"\bdeveloper\b", str(tokenizer.chat_template)):
        # OpenAI's newer name of the role, which only few templates know.
        for message in conversation:
            message["role"] = "system" if message["role"] == "developer" else message["role"]
    render = partial(
        tokenizer.apply_chat_template,
        add_generation_prompt=add_prompt and not continue_final,
        continue_final_message=continue_final,
        return_tensors="pt",
        return_dict=True,
        tools=tools,
        **variables,
    )
    try:
        try:
            return render(conversation)["input_ids"]
        except Exception:
            if not _wrap_malformed_arguments(conversation):
                raise
            return render(conversation)["input_ids"]
    except RecursionError as error:
        refusal = "the request is nested too deeply for the chat template"
        raise ApiError(400, refusal, "invalid_request", "messages") from error
    except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
        # Templates raise any of them for messages and variables that they cannot take.
        refusal = f"the chat template cannot render this request: {one_line(error) or type(error).__name__}"
        raise ApiError(400, refusal, "invalid_request", "messages") from error


def _wrap_malformed_arguments(conversation: list[dict[str, Any]]) -> bool:
    """Replace arguments of calls that are no JSON object, for a template that reads objects only, by an object with
    their text; return whether there were any.
    """
    functions = [call["function"] for message in conversation for call in message.get("tool_calls") or ()]
    malformed = [function for function in functions if isinstance(function["arguments"], str)]
    for function in malformed:
        function["arguments"] = {"arguments": function["arguments"]}
    return bool(malformed)


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError for a chat template that cannot render a message, rather than with the first request."""
    if not getattr(tokenizer, "chat_template", None):
        return
    try:
        length = render_prompt(tokenizer, [Message(role="user", content="Hello")]).shape[-1]
    except Exception as error:  # a template can fail in any way
        cause = error.__cause__ or error
        why = f"{type(cause).__name__}: {one_line(cause)}"
    else:
        if length:
            return
        why = "no token"
    raise ValueError(f"the chat template cannot render a message ({why}); set another with --chat-template")


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
CALL_MARKS = ("<tool_call>", "</tool_call>")
_MARKED: dict[str, Any] = {
    "open_pattern": rf"\s*{CALL_MARKS[0]}",
    "close": CALL_MARKS[1],
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
_JSON_CALLS = _template(*_QWEN, **_MARKED)
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


def response_parser(
    loaded: Loaded, ids: torch.Tensor, tools: list[dict[str, Any]] | None, prompted: bool = False
) -> Callable[[], Any] | None:
    """Return a function that makes a parser of the output after a prompt (1, length); None where the model's form of
    outputs is not known. `prompted`: the prompt says how functions are called.
    """
    tokenizer, template = loaded.tokenizer, response_template(loaded)
    prefix: torch.Tensor | str = ids[0]
    if prompted:
        if template is None:  # special tokens are no text, and where the answer begins is not known
            special = [one for one in tokenizer.all_special_tokens if one not in CALL_MARKS]
            content = {"content": "text", **({"close": special} if special else {})}
            template, prefix = {"start_anchor": "\n", "fields": {"content": content}}, ""
        template = {**template, "fields": {**template["fields"], "tool_calls": {"repeats": True, **_MARKED}}}
    if template is None:
        return None
    return partial(tokenizer.get_response_parser, _lenient(template), prefix=prefix, tools=tools)


def _lenient(template: dict[str, Any]) -> dict[str, Any]:
    """The template, where calls that are no JSON are text rather than an error."""
    calls = template["fields"].get("tool_calls", {})
    if calls.get("content") != "json":
        return template
    lenient = {**calls, "content_args": {**calls.get("content_args", {}), "allow_non_json": True}}
    return {**template, "fields": {**template["fields"], "tool_calls": lenient}}
