"""Functions in words, for a model whose chat template shows none, or whose own way of writing calls cannot be read.

A text at the head of the conversation lists them as JSON and says how a call is written: between the marks that Hermes
and Qwen were trained on, which xgrammar can hold an answer to. Earlier calls, and what they gave, become messages that
every template shows. llama.cpp does the same for such templates (`docs/function-calling.md` there, "generic").
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..model.loading import Loaded
from .calls import family
from .errors import ApiError
from .protocol import ChatRequest, Message
from .templates import CALL_MARKS, response_template, written

_CALL = "\n{}\n".join(CALL_MARKS)
_RESULT = "<tool_response>\n{}\n</tool_response>"
_EXAMPLE = '{"name": "NAME OF THE FUNCTION", "arguments": {"NAME": "VALUE"}}'
_PROBE = {"name": "probe", "description": "probe", "parameters": {"type": "object", "properties": {}}}


def in_words(loaded: Loaded, body: ChatRequest) -> bool:
    """Whether a chat needs its functions in words; raises ApiError where no calls can be read."""
    tools = body.shown_tools
    if not tools and not any(message.role == "tool" or message.tool_calls for message in body.messages):
        return False
    if tools and not hasattr(loaded.tokenizer, "get_response_parser"):
        raise ApiError(400, "tools need transformers 5.13 or later on the server; upgrade it", "unsupported", "tools")
    constrained = tools is not None and (body.held or body.form) is not None
    return why_in_words(loaded) is not None or (constrained and family(loaded) is None)


def why_in_words(loaded: Loaded) -> str | None:
    """Why a model is told of functions in words; None where its template shows them and its calls can be read."""
    if not _shows_tools(loaded.tokenizer):
        return "the chat template shows none"
    readable = "tool_calls" in (response_template(loaded) or {"fields": {}})["fields"]
    return None if readable else "how this model writes calls is not known"


def told(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: list[dict[str, Any]] | None
) -> list[Message]:
    """The conversation with its functions in words: the text that lists `tools`, and calls and results as text."""
    said: list[Message] = []
    before = ""
    for message in messages:
        plain = written(message)
        role, text, calls = plain.pop("role"), plain.pop("content"), plain.pop("tool_calls", None) or []
        called = [call["function"] for call in calls]
        marked = [_CALL.format(_json({"name": one["name"], "arguments": one["arguments"]})) for one in called]
        text = "\n".join([text] * bool(text) + marked)
        if role == "tool":
            plain.pop("tool_call_id", None)
            text = _RESULT.format(text)
        if before == "tool" and role in ("tool", "user"):  # many templates refuse two messages of a user in a row
            said[-1] = said[-1].model_copy(update={"content": f"{said[-1].content}\n{text}"})
        else:
            said.append(Message(role="user" if role == "tool" else role, content=text, **plain))
        before = role
    return _headed(tokenizer, said, _listing(tools)) if tools else said


def _listing(tools: list[dict[str, Any]]) -> str:
    functions = "\n".join(_json(tool["function"]) for tool in tools)
    return f"""You can call functions. These are all of them, each as JSON:

{functions}

To call one, write its name and its arguments as JSON between these marks, one pair of marks for each call:

{_CALL.format(_EXAMPLE)}

What it gives is then told between <tool_response> and </tool_response>. If no function helps, answer without a call."""


def _headed(tokenizer: PreTrainedTokenizerBase, messages: list[Message], text: str) -> list[Message]:
    """The conversation with a text for the system: in its system message, in one of its own, or in that of the user."""
    first, *rest = messages
    if first.role in ("system", "developer"):
        return [first.model_copy(update={"content": f"{first.content}\n\n{text}"}), *rest]
    if _shows_system(tokenizer):
        return [Message(role="system", content=text), *messages]
    if first.role == "user":
        return [first.model_copy(update={"content": f"{text}\n\n{first.content}"}), *rest]
    return [Message(role="user", content=text), *messages]


def _shows_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    shown = _text(tokenizer, tools=[{"type": "function", "function": _PROBE}])
    return shown is not None and shown != _text(tokenizer)


def _shows_system(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a system message is shown, rather than refused or left out."""
    one, other = (_text(tokenizer, {"role": "system", "content": text}) for text in ("one", "other"))
    return one is not None and one != other


def _text(tokenizer: PreTrainedTokenizerBase, *before: dict[str, str], **variables: Any) -> str | None:
    """A short conversation as the chat template has it; None where the template fails, as it can in any way."""
    try:
        conversation = [*before, {"role": "user", "content": "Hello"}]
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, **variables))
    except Exception:
        return None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
