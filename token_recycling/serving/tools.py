"""Tool calls: prompts that describe functions, and the grammars that constrain calls.

`grammar.calls` knows the delimiters that model families write around their calls. A model whose chat template shows no
functions, or whose calls cannot be read, gets prompted tools: a text at the head of the conversation lists the
functions as JSON and describes a call in the delimiters of Hermes and Qwen. Earlier calls and their results become
messages that every template shows. llama.cpp's generic handler does the same (`docs/function-calling.md` there).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from transformers import PreTrainedTokenizerBase

from ..grammar.calls import Calls, Function
from ..model.loading import Loaded
from .errors import ApiError
from .output import REASONING
from .protocol import ChatRequest, Form, Message
from .templates import CALL_MARKS, response_template, template_message

if TYPE_CHECKING:
    import torch

_CALL = "\n{}\n".join(CALL_MARKS)
_RESULT = "<tool_response>\n{}\n</tool_response>"
_EXAMPLE = '{"name": "NAME OF THE FUNCTION", "arguments": {"NAME": "VALUE"}}'
_PROBE = {"name": "probe", "description": "probe", "parameters": {"type": "object", "properties": {}}}
_FAMILIES = {"gpt_oss": "harmony", "kimi_k2": "kimi", "deepseek_v3": "deepseek_v3_1", "glm4_moe": "glm_4_7"}
"""Families of `grammar.calls` whose tokenizers bring a response template, by transformers' names of models."""
_PROMPTED = "qwen_3"
"""The family whose delimiters prompted tools have."""


# Prompted tools


def needs_prompted_tools(loaded: Loaded, body: ChatRequest) -> bool:
    """Return whether a chat needs prompted tools; raise ApiError where no calls can be read."""
    tools = body.shown_tools
    if not tools and not any(message.role == "tool" or message.tool_calls for message in body.messages):
        return False
    if tools and not hasattr(loaded.tokenizer, "get_response_parser"):
        raise ApiError(400, "tools need transformers 5.13 or later on the server; upgrade it", "unsupported", "tools")
    constrained = tools is not None and (body.constrained_by or body.form) is not None
    return why_prompted_tools(loaded) is not None or (constrained and family(loaded) is None)


def why_prompted_tools(loaded: Loaded) -> str | None:
    """Return why a model needs prompted tools; None where its template shows tools and its calls can be read."""
    if not _shows_tools(loaded.tokenizer):
        return "the chat template shows none"
    readable = "tool_calls" in (response_template(loaded) or {"fields": {}})["fields"]
    return None if readable else "how this model writes calls is not known"


def with_prompted_tools(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: list[dict[str, Any]] | None
) -> list[Message]:
    """Return the conversation with prompted tools: the text that lists `tools`, and calls and results as text."""
    said: list[Message] = []
    before = ""
    for message in messages:
        plain = template_message(message)
        role, text, calls = plain.pop("role"), plain.pop("content"), plain.pop("tool_calls", None) or []
        called = [call["function"] for call in calls]
        marked = [_CALL.format(_written_call(one["name"], one["arguments"])) for one in called]
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


def _written_call(name: str, arguments: dict[str, Any] | str) -> str:
    """Return a call as the model writes it; arguments that are no JSON object are text as it was written."""
    return f'{{"name": {_json(name)}, "arguments": {arguments if isinstance(arguments, str) else _json(arguments)}}}'


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
    return _shown_by(tokenizer, str(tokenizer.chat_template))[0]


def _shows_system(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a system message is shown, rather than refused or left out."""
    return _shown_by(tokenizer, str(tokenizer.chat_template))[1]


@lru_cache(maxsize=8)
def _shown_by(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[bool, bool]:
    """Return whether the chat template of a tokenizer shows tools, and whether it shows a system message; rendered
    once for each template.
    """
    with_tools = _rendered_text(tokenizer, tools=[{"type": "function", "function": _PROBE}])
    tools = with_tools is not None and with_tools != _rendered_text(tokenizer)
    one, other = (_rendered_text(tokenizer, {"role": "system", "content": text}) for text in ("one", "other"))
    return tools, one is not None and one != other


def _rendered_text(tokenizer: PreTrainedTokenizerBase, *before: dict[str, str], **variables: Any) -> str | None:
    """A short conversation as the chat template has it; None where the template fails, as it can in any way."""
    try:
        conversation = [*before, {"role": "user", "content": "Hello"}]
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, **variables))
    except Exception:
        return None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# Grammars of calls


def calls_form(loaded: Loaded, body: ChatRequest, ids: torch.Tensor, prompted: bool = False) -> tuple[str, Form] | None:
    """Return the field that constrains an output with tools after a prompt (1, length), and its grammar; None where
    tools are not constrained. `prompted`: the prompt says how functions are called. Raise ApiError.

    With an output format the output is either calls or text of that format: without that, a model whose every output
    must have the format could never call a function.
    """
    tools = body.shown_tools
    field = body.constrained_by or (body.form[0] if body.form and tools else None)
    if field is None or tools is None:
        return None
    delimiters = _PROMPTED if prompted else family(loaded)
    assert delimiters is not None, "tools of other families are prompted"
    functions = [
        Function(one["name"], one.get("parameters"), bool(one.get("strict")))
        for one in (tool["function"] for tool in tools)
    ]
    calls = Calls(
        delimiters,
        functions,
        body.tool_mode,
        body.parallel_tool_calls is not False,
        _thinking(loaded, ids, prompted),
        body.form[1] if body.form else None,
    )
    return field, ("calls", calls, True)


def _thinking(loaded: Loaded, ids: torch.Tensor, prompted: bool) -> Literal["none", "possible", "begun"]:
    """Whether the output after a prompt may begin with reasoning."""
    if loaded.tokenizer.decode(ids[0, -8:]).rstrip().endswith("<think>"):
        return "begun"
    thinks = (response_template(loaded) or {"fields": {}})["fields"].keys() & {*REASONING}
    return "possible" if thinks or not prompted else "none"


def family(loaded: Loaded) -> str | None:
    """Return the name of how the model writes calls; None where it has none, or they could not be read."""
    template = response_template(loaded)
    calls = (template or {}).get("fields", {}).get("tool_calls")
    if calls is None:
        return None
    if "<tool_call>" in str(calls.get("open_pattern")) + str(calls.get("open")):
        return {"json": "qwen_3", "xml-inline": "qwen_3_coder"}.get(calls.get("content"))
    return _FAMILIES.get(loaded.model.config.model_type)
