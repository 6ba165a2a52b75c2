"""Renders a chat with the chat template, and finds how the model writes reasoning and tool calls in its output.

A response template (transformers >= 5.13; huggingface.co/docs/transformers, "Response Parsing") defines where the parts
of an output begin and end. A tokenizer may include one; this module has those of families whose tokenizers lack it.
`grammar.parts` has the delimiters that model families write around their calls.

A model whose chat template shows no functions, or whose calls cannot be parsed, gets prompted tools: a text at the
start of the conversation lists the functions as JSON and describes a call in the delimiters of Hermes and Qwen. Earlier
calls and their results become messages that every template can show. llama.cpp's generic handler does the same (its
`docs/function-calling.md`).
"""

from __future__ import annotations

import itertools
import json
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import regex
from jinja2 import TemplateError

from .._util.chat_templates import per_template, readable
from .._util.text_stream import one_line
from ..grammar.parts import Function, OutputParts, types_of_arguments
from ..model.loading import Loaded
from .conversation import Message, Part, joined
from .errors import ApiError
from .output import REASONING
from .protocol import ChatRequest, Constraint, Form

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


_SYSTEM = ("system", "developer")
_THINK = "<think>"


# Rendering


def template_message(message: Message) -> dict[str, Any]:
    """Return a message in the form of chat templates, with its text as one string."""
    return {**message.model_dump(exclude_none=True), "content": joined(message.content)}


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    continue_final: bool = False,
    add_prompt: bool = True,
    tools: list[dict[str, Any]] | None = None,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> torch.Tensor:
    """Return the prompt (1, length) of a conversation; raise ApiError if the template rejects it. `continue_final`: the
    output continues the last message. Otherwise, `add_prompt` appends the start of an assistant message.
    """
    render = partial(
        _rendered,
        tokenizer,
        add_generation_prompt=add_prompt and not continue_final,
        continue_final_message=continue_final,
        return_tensors="pt",
        return_dict=True,
        tools=tools,
        **variables,
    )
    ignores = partial(_ignores_system, tokenizer, tools=tools, **variables)
    try:
        return _first_rendered(render, ignores, _versions(tokenizer, messages))
    except RecursionError as error:
        refusal = "the request is nested too deeply for the chat template"
        raise ApiError(400, refusal, "invalid_request", "messages") from error
    except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
        # Templates raise any of these for messages and variables that they do not support.
        refusal = f"the chat template cannot render this request: {one_line(error) or type(error).__name__}"
        raise ApiError(400, refusal, "invalid_request", "messages") from error


def _rendered(tokenizer: PreTrainedTokenizerBase, conversation: list[dict[str, Any]], **options: Any) -> Any:
    return tokenizer.apply_chat_template(readable(tokenizer, conversation), **options)


def _first_rendered(
    render: Callable[..., Any],
    ignores: Callable[[list[dict[str, Any]]], bool],
    conversations: Iterable[list[dict[str, Any]]],
) -> torch.Tensor:
    """Return the prompt of the first conversation that can be rendered and of which the template ignores nothing; if
    there is none, raise the first one's error.
    """
    refused: Exception | None = None
    for conversation in conversations:
        try:
            prompt: torch.Tensor = render(conversation)["input_ids"]
            if not ignores(conversation):
                return prompt
            refused = refused or ValueError("it ignores a system message")
        except Exception as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _ignores_system(tokenizer: PreTrainedTokenizerBase, conversation: list[dict[str, Any]], **variables: Any) -> bool:
    """Return whether the template ignores a system message of a conversation that it can render. Many templates read
    only the first or the last one, or only one that precedes a message of the user.
    """
    places = [at for at, message in enumerate(conversation) if message["role"] in _SYSTEM and message["content"]]
    if not places or (places == [0] and len(conversation) > 1 and _shows_system(tokenizer)):
        return False
    mark, marked = uuid.uuid4().hex, [*conversation]
    for at in places:
        marked[at] = {**conversation[at], "content": f"{mark}{at}."}
    shown = re.findall(rf"{mark}(\d+)\.", _rendered(tokenizer, marked, tokenize=False, **variables))
    return not {*places} <= {*map(int, shown)}


def _versions(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> Iterator[list[dict[str, Any]]]:
    """Yield a conversation in the form of chat templates, then versions for templates that reject the first one, or
    ignore parts of it.
    """
    yield from _with_objects(tokenizer, messages)
    turns = _alternating(tokenizer, messages)
    yield from _with_objects(tokenizer, turns)
    start = next((at for at, message in enumerate(turns) if message.role not in _SYSTEM), 0)
    if turns[start].role == "assistant":  # a greeting, or the client has dropped earlier messages
        yield from _with_objects(tokenizer, [*turns[:start], Message(role="user"), *turns[start:]])


def _with_objects(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> Iterator[list[dict[str, Any]]]:
    """Yield a conversation. If arguments of a call are not a JSON object, then yield it with their text wrapped in an
    object, for templates that accept only objects.
    """
    conversation = _in_terms_of_template(tokenizer, messages)
    yield from _with_less_reasoning(conversation)
    functions = [call["function"] for message in conversation for call in message.get("tool_calls") or ()]
    malformed = [function for function in functions if isinstance(function["arguments"], str)]
    for function in malformed:
        function["arguments"] = {"arguments": function["arguments"]}
    if malformed:
        yield from _with_less_reasoning(conversation)


def _in_terms_of_template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return a conversation with the roles, reasoning fields and call ids that the chat template reads."""
    conversation, template = [template_message(message) for message in messages], str(tokenizer.chat_template)
    if not re.search(r"\bdeveloper\b", template):
        # OpenAI's newer name of the system role, which few templates support.
        for message in conversation:
            message["role"] = "system" if message["role"] == "developer" else message["role"]
    names = [name for name in REASONING if re.search(rf"\b{name}\b", template)]
    for message in conversation:  # gpt-oss reads `thinking`; transformers 5.10 does not rename the API's field
        thoughts = [message[name] for name in REASONING if isinstance(message.get(name), str) and message[name]]
        message.update(dict.fromkeys(names, thoughts[0]) if thoughts else {})
    if _shows_ids_for_names(tokenizer):
        _name_ids(conversation)
    return conversation


def _name_ids(conversation: list[dict[str, Any]]) -> None:
    """Change the ids of calls to `functions.NAME:NUMBER`, as Kimi's models write them. Results without ids belong to
    the calls without ids, in the same order.
    """
    ids, without, numbers = dict[str, str](), list[str](), itertools.count()
    for message in conversation:
        for call in message.get("tool_calls") or ():
            before, call["id"] = call.get("id"), f"functions.{call['function']['name']}:{next(numbers)}"
            if before is None:
                without.append(call["id"])
            else:
                ids[before] = call["id"]
        answered = message.get("tool_call_id")
        if answered in ids:
            message["tool_call_id"] = ids[answered]
        elif answered is None and message["role"] == "tool" and without:
            message["tool_call_id"] = without.pop(0)


def _with_less_reasoning(conversation: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield a conversation, then one without reasoning next to text and calls, which gpt-oss's template rejects."""
    yield conversation
    less = [
        {name: value for name, value in message.items() if name not in REASONING}
        if message["content"] and message.get("tool_calls")
        else message
        for message in conversation
    ]
    if less != conversation:
        yield less


def _alternating(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[Message]:
    """Return a conversation with all system messages merged at its start, and consecutive messages of the user or of
    the assistant merged: many templates reject anything else.
    """
    system = [message.content for message in messages if message.role in _SYSTEM]
    others = [message for message in messages if message.role not in _SYSTEM] or [Message(role="user")]
    conversation: list[Message] = []
    for message in _headed(tokenizer, others, _paragraphs(*system)):
        before = conversation[-1] if conversation else None
        plain = not message.tool_calls and message.role in ("user", "assistant")
        if before is not None and plain and before.role == message.role and not before.tool_calls:
            conversation[-1] = _with_text(message, before.content, message.content)
        else:
            conversation.append(message)
    return conversation


def _paragraphs(*contents: str | list[Part] | None) -> str:
    """Return the nonempty texts of contents as paragraphs."""
    return "\n\n".join(filter(None, map(joined, contents)))


def _with_text(message: Message, *contents: str | list[Part] | None) -> Message:
    return message.model_copy(update={"content": _paragraphs(*contents)})


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError at startup, not at the first request, if the chat template cannot render a message."""
    if not getattr(tokenizer, "chat_template", None):
        return
    try:
        length = render_prompt(tokenizer, [Message(role="user", content="Hello")]).shape[-1]
    except Exception as error:  # a template can raise any exception
        cause = error.__cause__ or error
        why = f"{type(cause).__name__}: {one_line(cause)}"
    else:
        if length:
            return
        why = "no token"
    raise ValueError(f"the chat template cannot render a message ({why}); set another with --chat-template")


# Response templates and parsers


def _template(anchor: Any, thought: dict[str, str], end: dict[str, Any], **calls: Any) -> dict[str, Any]:
    """Return a response template: the start of an answer, the delimiters of its reasoning, its end, and its calls."""
    fields = {
        "reasoning_content": {**thought, "content": "text"},
        "tool_calls": {"repeats": True, **calls},
        "content": {**end, "content": "text"},
    }
    return {"defaults": {"role": "assistant"}, "start_anchor": anchor, "fields": fields}


_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
# Reasoning stands only at the start of an answer; a later <think> is text. Whitespace between two delimiters is not
# text: it would replace the text before.
_QWEN: Any = (
    "<|im_start|>assistant\n",
    {"open_pattern": rf"\A\s*{_THINK}", "close": "</think>"},
    {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"},
)
CALL_MARKS = ("<tool_call>", "</tool_call>")
_MARKED: dict[str, Any] = {
    "open_pattern": rf"\s*{CALL_MARKS[0]}",
    "close": CALL_MARKS[1],
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
_JSON_CALLS = _template(*_QWEN, **_MARKED)
# One line end on each side is not part of the value; other whitespace, such as the indentation of code, is.
_PARAMETER = r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?{end}"
_XML_CALLS = _template(
    *_QWEN,
    open_pattern=r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    close_pattern=r"</function>\s*</tool_call>",
    content="xml-inline",
    content_args={"tag_pattern": _PARAMETER.format(end="</parameter>")},
    transform=_NAMED,
)
_GEMMA = _template(
    ["<|turn>model\n", "<tool_response|>"],
    {"open": "<|channel>thought\n", "close": "<channel|>"},
    {"close": ["<turn|>", "<|tool_response>", "<eos>"]},
    open_pattern=r"<\|tool_call>call:(?P<name>[^{\s]+)",
    close="<tool_call|>",
    content="json",
    content_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
    transform=_NAMED,
)


def response_template(loaded: Loaded) -> dict[str, Any] | None:
    """Return the response template of the tokenizer, else of its family; None without either, or without support for
    them.
    """
    tokenizer, family = loaded.tokenizer, loaded.model.config.model_type
    if not hasattr(tokenizer, "get_response_parser"):
        return None
    if getattr(tokenizer, "response_template", None) is not None:
        return tokenizer.response_template
    if family.startswith(("qwen2", "qwen3")):
        return _XML_CALLS if "<function=" in tokenizer.get_chat_template(tools=[]) else _JSON_CALLS
    return _GEMMA if family == "gemma4" else None


def response_parser(
    loaded: Loaded,
    ids: torch.Tensor,
    tools: list[dict[str, Any]] | None,
    prompted: bool = False,
    constrained: bool = False,
) -> Callable[[], Any] | None:
    """Return a function that creates a parser of the output after a prompt (1, length); None if the model's output
    format is unknown. `prompted`: the prompt describes how to call functions; `constrained`: a grammar enforces the
    delimiters of calls.
    """
    tokenizer, template = loaded.tokenizer, response_template(loaded)
    if prompted:
        if template is None:  # hide special tokens; the start of the answer is unknown
            special = [token for token in tokenizer.all_special_tokens if token not in CALL_MARKS]
            content = {"content": "text", **({"close": special} if special else {})}
            template = {"start_anchor": "\0", "fields": {"content": content}}
        template = {**template, "fields": {**template["fields"], "tool_calls": {"repeats": True, **_MARKED}}}
    if template is None:
        return None
    if not tools:  # what looks like a call is text, since no client expects a call
        fields = {name: field for name, field in template["fields"].items() if name != "tool_calls"}
        template = {**template, "fields": fields}
    prefix = tokenizer.decode(ids[0])
    if not _has_start(template, prefix):  # the parser would read the whole conversation as the start of the answer
        begun = prefix.rstrip().endswith(_THINK) and not template["fields"].keys().isdisjoint(REASONING)
        prefix = _THINK if begun else ""
    calls = template["fields"].get("tool_calls", {})
    if calls.get("content") == "xml-inline":
        tools = [_with_types(tool) for tool in tools or ()]
        if calls is _XML_CALLS["fields"]["tool_calls"] and not constrained:
            template = {**template, "fields": {**template["fields"], "tool_calls": _with_bare_calls(calls, tools)}}
    return partial(tokenizer.get_response_parser, _lenient(template), prefix=prefix, tools=tools)


def _with_bare_calls(calls: dict[str, Any], tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the format of XML calls, in which a call of one of the tools may lack its first delimiter, and an argument
    the delimiter before the next one: Qwen3-Coder often leaves them out (QwenLM/Qwen3-Coder#475, ollama/ollama#17914).
    """
    names = "|".join(re.escape(tool["function"]["name"]) for tool in tools)
    arguments = {name for tool in tools for name in tool["function"]["parameters"]["properties"]}
    bare = rf"<function=(?=(?:{names})>\s*(?:<parameter=|</function>))"
    begun = rf"(?=\n<parameter=(?:{'|'.join(map(re.escape, sorted(arguments)))})>)" if arguments else "(?!)"
    return {
        **calls,
        "open_pattern": rf"\s*(?:<tool_call>\s*<function=|{bare})(?P<name>[^>\n]+)>",
        "content_args": {"tag_pattern": _PARAMETER.format(end=f"(?:</parameter>|{begun})")},
    }


def _has_start(template: dict[str, Any], prompt: str) -> bool:
    """Return whether a prompt has the start of an answer, which a model with another chat template may lack."""
    if "start_anchor" not in template:
        return regex.search(template["start_anchor_pattern"], prompt) is not None
    anchors = template["start_anchor"]
    return any(anchor in prompt for anchor in ([anchors] if isinstance(anchors, str) else anchors))


def _with_types(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool whose parameters have explicit types. The parser reads an argument by its type, but ignores
    references and `enum`.
    """
    function = tool["function"]
    parameters = function.get("parameters") or {}
    properties = {name: {"type": types} for name, types in types_of_arguments(parameters).items()}
    return {**tool, "function": {**function, "parameters": {**parameters, "properties": properties}}}


def _lenient(template: dict[str, Any]) -> dict[str, Any]:
    """Return the template, changed so that malformed calls are text instead of an error."""
    calls = template["fields"].get("tool_calls", {})
    if calls.get("content") != "json":
        return template
    lenient = {**calls, "content_args": {**calls.get("content_args", {}), "allow_non_json": True}}
    return {**template, "fields": {**template["fields"], "tool_calls": lenient}}


# Prompted tools

_CALL = "\n{}\n".join(CALL_MARKS)
_RESULT = "<tool_response>\n{}\n</tool_response>"
_EXAMPLE = '{"name": "NAME OF THE FUNCTION", "arguments": {"NAME": "VALUE"}}'
_PROBE = {"name": "probe", "description": "probe", "parameters": {"type": "object", "properties": {}}}
_FAMILIES = {"gpt_oss": "harmony", "kimi_k2": "kimi", "deepseek_v3": "deepseek_v3_1", "glm4_moe": "glm_4_7"}
"""Families of `grammar.parts` whose tokenizers include a response template, by transformers' `model_type`."""
_PROMPTED = "qwen_3"
"""The family whose delimiters prompted tools use."""


def needs_prompted_tools(loaded: Loaded, body: ChatRequest) -> bool:
    """Return whether a chat needs prompted tools; raise ApiError if calls cannot be parsed at all."""
    tools = body.shown_tools
    if not tools and not any(message.role == "tool" or message.tool_calls for message in body.messages):
        return False
    if tools and not hasattr(loaded.tokenizer, "get_response_parser"):
        raise ApiError(400, "tools need transformers 5.13 or later on the server; upgrade it", "unsupported", "tools")
    constrained = tools is not None and (body.constrained_by or body.constraint) is not None
    return why_prompted_tools(loaded) is not None or (constrained and family(loaded) is None)


def why_prompted_tools(loaded: Loaded) -> str | None:
    """Return why a model needs prompted tools; None if its template shows tools and its calls can be parsed."""
    if not _shows_tools(loaded.tokenizer):
        return "the chat template shows no tools"
    readable = "tool_calls" in (response_template(loaded) or {"fields": {}})["fields"]
    return None if readable else "this model's format of calls is unknown"


def with_prompted_tools(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: list[dict[str, Any]] | None
) -> list[Message]:
    """Return the conversation with prompted tools: a text that lists `tools`, with calls and results as text."""
    conversation: list[Message] = []
    before = ""
    for message in messages:
        plain = template_message(message)
        role, text, calls = plain.pop("role"), plain.pop("content"), plain.pop("tool_calls", None) or []
        called = [call["function"] for call in calls]
        marked = [_CALL.format(_written_call(function["name"], function["arguments"])) for function in called]
        text = "\n".join([text] * bool(text) + marked)
        if role == "tool":
            plain.pop("tool_call_id", None)
            text = _RESULT.format(text)
        if before == "tool" and role in ("tool", "user"):  # many templates reject consecutive user messages
            conversation[-1] = conversation[-1].model_copy(update={"content": f"{conversation[-1].content}\n{text}"})
        else:
            conversation.append(Message(role="user" if role == "tool" else role, content=text, **plain))
        before = role
    return _headed(tokenizer, conversation, _listing(tools)) if tools else conversation


def _written_call(name: str, arguments: dict[str, Any] | str) -> str:
    """Return a call in the format that the prompt describes; arguments that are not an object are inserted as text."""
    return f'{{"name": {_json(name)}, "arguments": {arguments if isinstance(arguments, str) else _json(arguments)}}}'


def _listing(tools: list[dict[str, Any]]) -> str:
    functions = "\n".join(_json(tool["function"]) for tool in tools)
    return f"""You can call functions. All functions, one JSON object per line:

{functions}

To call a function, write its name and arguments as JSON between these tags, one pair of tags per call:

{_CALL.format(_EXAMPLE)}

You then get the result between <tool_response> and </tool_response>. If no function helps, answer without a call."""


def _headed(tokenizer: PreTrainedTokenizerBase, messages: list[Message], text: str) -> list[Message]:
    """Return the conversation with a system text: in its system message, in a new one, or in a user message."""
    first, *rest = messages
    if not text:
        return messages
    if first.role in _SYSTEM:
        return [_with_text(first, first.content, text), *rest]
    if _shows_system(tokenizer):
        return [Message(role="system", content=text), *messages]
    if first.role == "user":
        return [_with_text(first, text, first.content), *rest]
    return [Message(role="user", content=text), *messages]


def _shows_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    return _shown_by(tokenizer)[0]


def _shows_system(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the template shows a system message, instead of rejecting or ignoring it."""
    return _shown_by(tokenizer)[1]


@per_template
def _shown_by(tokenizer: PreTrainedTokenizerBase) -> tuple[bool, bool]:
    """Return whether a chat template shows tools, and whether it shows a system message."""
    with_tools = _rendered_text(tokenizer, tools=[{"type": "function", "function": _PROBE}])
    tools = with_tools is not None and with_tools != _rendered_text(tokenizer)
    first_system, second_system = (
        _rendered_text(tokenizer, {"role": "system", "content": text}) for text in ("one", "other")
    )
    return tools, first_system is not None and first_system != second_system


@per_template
def _shows_ids_for_names(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a chat template shows the ids of calls instead of their functions."""
    call = {"id": "probe-id", "type": "function", "function": {"name": "probe-name", "arguments": {}}}
    asked, called = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "", "tool_calls": [call]}
    shown = _rendered_text(tokenizer, asked, called, {"role": "tool", "tool_call_id": "probe-id", "content": "done"})
    return shown is not None and "probe-id" in shown and "probe-name" not in shown


def _rendered_text(tokenizer: PreTrainedTokenizerBase, *before: dict[str, Any], **variables: Any) -> str | None:
    """Return a short rendered conversation; None if the template raises any exception."""
    try:
        conversation = [*before, {"role": "user", "content": "Hello"}]
        return str(_rendered(tokenizer, conversation, tokenize=False, **variables))
    except Exception:
        return None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# Grammars of calls


def parts_constraint(loaded: Loaded, body: ChatRequest, ids: torch.Tensor, prompted: bool = False) -> Constraint | None:
    """Return the constraint of the output after a prompt (1, length) if it has calls, or reasoning before formatted
    text; None if neither is constrained. `prompted`: the prompt describes how to call functions. Raise ApiError.

    With an output format, the output is either calls or text in that format; otherwise the format would rule out every
    call. Reasoning that the prompt has begun is allowed before: without it in the grammar, all formatted output would
    be parsed as reasoning.
    """
    tools, field = body.shown_tools or [], body.constrained_by or (body.constraint and body.constraint.field)
    if field is None:
        return None
    delimiters, thinking = _PROMPTED if prompted else family(loaded), _thinking(loaded, ids, prompted)
    form = body.constraint.form if body.constraint else None
    if form is not None and not _reads_reasoning(loaded):
        thinking = "none"  # reasoning would be part of the formatted text
    if not (tools or thinking == "begun" or delimiters == "harmony"):
        return None
    functions = [
        Function(one["name"], one.get("parameters"), bool(one.get("strict")))
        for one in (tool["function"] for tool in tools)
    ]
    parts = OutputParts(
        delimiters or _PROMPTED,
        functions,
        body.tool_mode,
        body.parallel_tool_calls is not False,
        thinking,
        form,
    )
    return Constraint(field, Form("parts", parts, True))


def _thinking(loaded: Loaded, ids: torch.Tensor, prompted: bool) -> Literal["none", "possible", "begun"]:
    """Return whether the output after a prompt may begin with reasoning."""
    if loaded.tokenizer.decode(ids[0, -8:]).rstrip().endswith(_THINK):
        return "begun"
    return "possible" if _reads_reasoning(loaded) or not prompted else "none"


def _reads_reasoning(loaded: Loaded) -> bool:
    """Return whether the parser separates reasoning from the rest of an output."""
    return not (response_template(loaded) or {"fields": {}})["fields"].keys().isdisjoint(REASONING)


def family(loaded: Loaded) -> str | None:
    """Return the family of the model's call delimiters; None if it has none, or its calls cannot be parsed."""
    template = response_template(loaded)
    calls = (template or {}).get("fields", {}).get("tool_calls")
    if calls is None:
        return None
    if "<tool_call>" in str(calls.get("open_pattern")) + str(calls.get("open")):
        return {"json": "qwen_3", "xml-inline": "qwen_3_coder"}.get(calls.get("content"))
    return _FAMILIES.get(loaded.model.config.model_type)
