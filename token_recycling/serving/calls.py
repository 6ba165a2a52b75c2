"""Tool calls that must be made, or made right: the form of such answers, and how they are read.

xgrammar has the marks that families write around their calls (structural tags), with reasoning before them left free.
Where a family is not known to it, the whole answer is the calls, as JSON, and is read here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..hf.forms import check_schema
from ..model.loading import Loaded
from .errors import ApiError, invalid
from .grammars import Form, check_grammars
from .requests import ChatBody, NamedTool
from .templates import response_template

if TYPE_CHECKING:
    import torch

_FAMILIES = {"gpt_oss": "harmony", "kimi_k2": "kimi", "deepseek_v3": "deepseek_v3_1", "glm4_moe": "glm_4_7"}
"""xgrammar's names of families whose tokenizers bring a response template, by transformers' names of models."""
_SPACE = 1
"""Spaces in a row between parts of JSON: where any number may follow, a model may go on with them for ever."""


class HeldCalls(NamedTuple):
    """The form of an answer with calls, and what reads it."""

    form: Form
    parser: Callable[[], Any] | None
    """None where the family's own parser reads it."""


def held_calls(loaded: Loaded, body: ChatBody, ids: torch.Tensor) -> HeldCalls | None:
    """What a request says of its calls, after a prompt (1, length); None where all is left to the model. Raises
    ApiError.
    """
    tools, choice = body.tools or [], body.tool_choice
    strict = any(tool.get("function", {}).get("strict") for tool in tools)
    must = choice == "required" or isinstance(choice, NamedTool)
    if choice == "none" or not (must or (tools and (strict or body.parallel_tool_calls is False))):
        return None
    field = "tool_choice" if must else "tools" if strict else "parallel_tool_calls"
    check_grammars(field)
    if body.response_format is not None or body.structured is not None:
        formed = "response_format" if body.structured is None else body.structured[0]
        raise invalid(formed, f"expected none beside {field}, since an answer has one form; leave one out")
    tools = _chosen(tools, choice)
    for tool in tools:
        try:
            check_schema(tool["function"].get("parameters"), bool(tool["function"].get("strict")))
        except ValueError as error:
            raise invalid("tools", f"{tool['function'].get('name')}: {error}") from None
    family, several = _family(loaded), body.parallel_tool_calls is not False
    if family is not None:
        return HeldCalls(_tagged(loaded, family, tools, choice if must else "auto", several, ids), None)
    if not must:
        raise ApiError(
            400,
            f"{field}: expected a model whose calls xgrammar knows, got {loaded.model.config.model_type}; ask for "
            "calls by tool_choice=required",
            "unsupported",
            field,
        )
    return HeldCalls(_listed(tools, several), CallsParser)


def _chosen(tools: list[dict[str, Any]], choice: Any) -> list[dict[str, Any]]:
    """The tools that may be called; raises ApiError where there are none."""
    try:
        names = [tool["function"]["name"] for tool in tools]
    except (KeyError, TypeError):
        raise invalid("tools", "expected functions with names, got others") from None
    if isinstance(choice, NamedTool):
        wanted = choice.name or (choice.function or {}).get("name")
        tools = [tool for tool, name in zip(tools, names, strict=True) if name == wanted]
        if not tools:
            raise invalid("tool_choice", f"expected the name of one of the tools, {', '.join(names)}, got {wanted!r}")
    if not tools:
        raise invalid("tool_choice", "expected tools to choose from, got none")
    return tools


def _family(loaded: Loaded) -> str | None:
    """xgrammar's name of how the model writes calls; None where it has none, or they could not be read."""
    template = response_template(loaded)
    calls = (template or {}).get("fields", {}).get("tool_calls")
    if calls is None:
        return None
    if "<tool_call>" in str(calls.get("open_pattern")) + str(calls.get("open")):
        return {"json": "qwen_3", "xml-inline": "qwen_3_coder"}.get(calls.get("content"))
    return _FAMILIES.get(loaded.model.config.model_type)


def _tagged(
    loaded: Loaded, family: str, tools: list[dict[str, Any]], choice: Any, several: bool, ids: torch.Tensor
) -> Form:
    import xgrammar

    ends = loaded.tokenizer.decode(ids[0, -8:]).rstrip()
    try:
        tag = xgrammar.get_model_structural_tag(
            family,
            tools=tools,
            tool_choice={"type": "function", "function": tools[0]["function"]}
            if isinstance(choice, NamedTool)
            else choice,
            reasoning="enabled" if ends.endswith("<think>") else "auto",
            parallel_tool_calls=several,
            max_whitespace_cnt=_SPACE,
        )
    except ValueError as error:
        raise invalid("tools", str(error).splitlines()[0]) from error
    return "structural_tag", tag.model_dump_json(), True


def _listed(tools: list[dict[str, Any]], several: bool) -> Form:
    """The calls in a list of JSON."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": tool["function"].get("parameters") or {"type": "object", "additionalProperties": True},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    # References are to the beginning of the schema that they stand in.
    hoisted = {
        name: schema
        for call in calls
        for keyword in ("$defs", "definitions")
        for name, schema in (call["properties"]["arguments"].get(keyword) or {}).items()  # type: ignore[index]
    }
    listed = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "maxItems": 16 if several else 1}
    return "json_schema", {**listed, **({"$defs": hoisted, "definitions": hoisted} if hoisted else {})}, False


class CallsParser:
    """Reads an answer that is a list of calls, as transformers' parsers read those of families."""

    initial_events: tuple[dict[str, Any], ...] = ()

    def __init__(self) -> None:
        self._text = ""
        self._told = 0

    def feed(self, text: str) -> list[dict[str, Any]]:
        """The calls that are complete with this piece."""
        self._text += text
        events, place = [], self._text.find("[") + 1
        for number in range(16):
            while place < len(self._text) and self._text[place] in ", \n\t":
                place += 1
            try:
                call, place = json.JSONDecoder().raw_decode(self._text, place)
            except ValueError:
                break
            if number >= self._told:
                self._told += 1
                events.append({"type": "region_close", "field": "tool_calls", "value": {"function": call}})
        return events

    def finalize(self) -> tuple[None, list[dict[str, Any]]]:
        """What is left at the end of the text: nothing."""
        return None, []
