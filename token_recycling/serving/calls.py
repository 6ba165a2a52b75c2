"""Tool calls that must be made, or made right: the form of such answers.

xgrammar has the marks that families write around their calls (structural tags), with reasoning before them left free.
Where a family is not known to it, the prompt says in words how functions are called (`tools`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..hf.forms import check_schema
from ..model.loading import Loaded
from .answer_form import Form
from .calling import NamedTool
from .errors import invalid
from .grammars import check_grammars
from .requests import ChatBody
from .templates import REASONING, response_template

if TYPE_CHECKING:
    import torch

_FAMILIES = {"gpt_oss": "harmony", "kimi_k2": "kimi", "deepseek_v3": "deepseek_v3_1", "glm4_moe": "glm_4_7"}
"""xgrammar's names of families whose tokenizers bring a response template, by transformers' names of models."""
_IN_WORDS = "qwen_3"
"""xgrammar's name of the marks between which functions in words are called."""
_ANY = {"type": "object", "additionalProperties": True}
_SPACE = 1
"""Spaces in a row between parts of JSON: where any number may follow, a model may go on with them for ever."""


def held_calls(loaded: Loaded, body: ChatBody, ids: torch.Tensor, in_words: bool = False) -> Form | None:
    """The form of an answer with calls after a prompt (1, length), None where all is left to the model. `in_words`: the
    prompt says how functions are called. Raises ApiError.
    """
    field = body.held
    if field is None:
        return None
    check_grammars(field)
    if body.form is not None:
        raise invalid(body.form[0], f"expected none beside {field}, since an answer has one form; leave one out")
    functions = [tool["function"] for tool in body.callable_tools]
    for function in functions:
        try:
            check_schema(function.get("parameters"), bool(function.get("strict")))
        except ValueError as error:
            raise invalid("tools", f"{function['name']}: {error}") from None
    return _tagged(loaded, body, functions, ids, in_words)


def family(loaded: Loaded) -> str | None:
    """xgrammar's name of how the model writes calls; None where it has none, or they could not be read."""
    template = response_template(loaded)
    calls = (template or {}).get("fields", {}).get("tool_calls")
    if calls is None:
        return None
    if "<tool_call>" in str(calls.get("open_pattern")) + str(calls.get("open")):
        return {"json": "qwen_3", "xml-inline": "qwen_3_coder"}.get(calls.get("content"))
    return _FAMILIES.get(loaded.model.config.model_type)


def _tagged(loaded: Loaded, body: ChatBody, functions: list[dict[str, Any]], ids: torch.Tensor, in_words: bool) -> Form:
    import xgrammar

    tools: list[Any] = [
        {"type": "function", "function": {"name": one["name"], "parameters": one.get("parameters") or _ANY}}
        for one in functions
    ]
    ends = loaded.tokenizer.decode(ids[0, -8:]).rstrip()
    marks = _IN_WORDS if in_words else family(loaded)
    assert marks is not None, "without marks of their own functions are told in words"
    thinks = not in_words or (response_template(loaded) or {"fields": {}})["fields"].keys() & {*REASONING}
    try:
        tag = xgrammar.get_model_structural_tag(
            marks,
            tools=tools,
            tool_choice=tools[0] if isinstance(body.tool_choice, NamedTool) else body.tool_choice or "auto",
            reasoning="enabled" if ends.endswith("<think>") else "auto" if thinks else "disabled",
            parallel_tool_calls=body.parallel_tool_calls is not False,
            max_whitespace_cnt=_SPACE,
        )
    except ValueError as error:
        raise invalid("tools", str(error).splitlines()[0]) from error
    made = tag.model_dump()
    if in_words and body.tool_choice == "required" and made["format"]["type"] == "triggered_tags":
        # Calls alone: a model that was told of them in words goes on at random behind them.
        how = {name: made["format"][name] for name in ("tags", "at_least_one", "stop_after_first")}
        made["format"] = {"type": "tags_with_separator", "separator": "\n", **how}
    return "structural_tag", json.dumps(made), True
