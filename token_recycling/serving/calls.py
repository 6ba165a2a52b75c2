"""Grammars of outputs with tool calls: calls that must be made, calls with arguments of their schemas, and calls beside
an output format.

xgrammar has the delimiters that model families write around their calls (structural tags), with reasoning before them
left free. Where it does not know a family, the prompt says in words how functions are called (`tools`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..hf.forms import check_schema
from ..model.loading import Loaded
from .errors import invalid
from .protocol import ChatRequest, Form
from .templates import REASONING, response_template

if TYPE_CHECKING:
    import torch

_FAMILIES = {"gpt_oss": "harmony", "kimi_k2": "kimi", "deepseek_v3": "deepseek_v3_1", "glm4_moe": "glm_4_7"}
"""xgrammar's names of families whose tokenizers bring a response template, by transformers' names of models."""
_IN_WORDS = "qwen_3"
"""xgrammar's name of the delimiters that the prompt describes in words."""
_ANY = {"type": "object", "additionalProperties": True}
_MAX_SPACES = 1
"""Spaces in a row between parts of JSON: where any number may follow, a model may repeat them for ever."""


def calls_form(loaded: Loaded, body: ChatRequest, ids: torch.Tensor, in_words: bool = False) -> tuple[str, Form] | None:
    """Return the field that constrains an output with tools after a prompt (1, length), and its grammar; None where
    tools are not constrained. `in_words`: the prompt says how functions are called. Raise ApiError.

    With an output format the output is either calls or text of that format: without that, a model whose every output
    must have the format could never call a function.
    """
    tools = body.shown_tools
    field = body.held or (body.form[0] if body.form and tools else None)
    if field is None or tools is None:
        return None
    functions = [tool["function"] for tool in tools]
    for function in functions:
        try:
            check_schema(function.get("parameters"), bool(function.get("strict")))
        except ValueError as error:
            raise invalid("tools", f"{function['name']}: {error}") from None
    tag = _tag(loaded, body, functions, ids, in_words)
    if body.form is not None and body.calls == "auto":
        *before, calls = tag["elements"] if tag["type"] == "sequence" else [tag]
        either = {"type": "or", "elements": [_calls_alone(calls), _text(body.form[1])]}
        tag = {"type": "sequence", "elements": [*before, either]}
    elif in_words and body.calls == "required":
        # A model that was told of calls in words continues at random after them.
        tag = _calls_alone(tag)
    return field, ("structural_tag", json.dumps({"type": "structural_tag", "format": tag}), True)


def family(loaded: Loaded) -> str | None:
    """Return xgrammar's name of how the model writes calls; None where it has none, or they could not be read."""
    template = response_template(loaded)
    calls = (template or {}).get("fields", {}).get("tool_calls")
    if calls is None:
        return None
    if "<tool_call>" in str(calls.get("open_pattern")) + str(calls.get("open")):
        return {"json": "qwen_3", "xml-inline": "qwen_3_coder"}.get(calls.get("content"))
    return _FAMILIES.get(loaded.model.config.model_type)


def _tag(
    loaded: Loaded, body: ChatRequest, functions: list[dict[str, Any]], ids: torch.Tensor, in_words: bool
) -> dict[str, Any]:
    """Return the structural tag of an output with calls, as xgrammar's own function makes it for the family."""
    import xgrammar

    tools: list[Any] = [
        {"type": "function", "function": {"name": one["name"], "parameters": one.get("parameters") or _ANY}}
        for one in functions
    ]
    ends = loaded.tokenizer.decode(ids[0, -8:]).rstrip()
    delimiters = _IN_WORDS if in_words else family(loaded)
    assert delimiters is not None, "functions of other families are told in words"
    thinks = not in_words or (response_template(loaded) or {"fields": {}})["fields"].keys() & {*REASONING}
    try:
        tag = xgrammar.get_model_structural_tag(
            delimiters,
            tools=tools,
            tool_choice=tools[0] if body.calls == "named" else body.calls,  # type: ignore[arg-type]
            reasoning="enabled" if ends.endswith("<think>") else "auto" if thinks else "disabled",
            parallel_tool_calls=body.parallel_tool_calls is not False,
            max_whitespace_cnt=_MAX_SPACES,
        )
    except ValueError as error:
        raise invalid("tools", str(error).splitlines()[0]) from error
    return tag.model_dump()["format"]


def _calls_alone(tag: dict[str, Any]) -> dict[str, Any]:
    """Return the tag of one call or more without text between or after them."""
    if tag["type"] != "triggered_tags":
        return tag
    return {
        "type": "tags_with_separator",
        "separator": "\n",
        "tags": tag["tags"],
        "at_least_one": True,
        "stop_after_first": tag["stop_after_first"],
    }


def _text(form: Form) -> dict[str, Any]:
    """Return the structural tag of an output format."""
    kind, definition, strict = form
    if kind == "json_schema":
        try:
            check_schema(definition, strict)
        except ValueError as error:
            raise invalid("response_format", str(error)) from None
        return {"type": "json_schema", "json_schema": definition, "max_whitespace_cnt": _MAX_SPACES}
    return {"type": "regex", "pattern": definition} if kind == "regex" else {"type": "grammar", "grammar": definition}
