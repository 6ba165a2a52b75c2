"""Fields that vLLM and llama.cpp take beside OpenAI's, with the meaning that they have there."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, Field, StringConstraints, model_validator

from .errors import invalid

_MOST_IDS = 128
_Written = Annotated[str, StringConstraints(min_length=1)]
_Choices = Annotated[list[_Written], Field(min_length=1, max_length=1024)]
_Schema = dict[str, Any] | _Written
Asked = tuple[str, Any, bool]
"""A form: its name, what it is, and whether it is strict, as `hf.forms.compiled` takes them."""
_NAMES = {"json": "json_schema", "regex": "regex", "grammar": "grammar", "choice": "grammar"}
_OBJECT = {"type": "object", "additionalProperties": True}


class Ending(BaseModel):
    """When a text ends, and whether its beginning is looked for."""

    min_tokens: int | None = Field(
        None, ge=0, description="of vLLM: no end, and no id of `stop_token_ids`, before so many; not in a given form"
    )
    ignore_eos: bool | None = Field(
        None, description="of vLLM: the model's own end of text is a token as any other; not in a given form"
    )
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(
        None, max_length=_MOST_IDS, description="of vLLM: ids that end the text too, which is shown without them"
    )
    cache_prompt: bool | None = Field(
        None, description="of llama.cpp: false takes nothing that was kept of earlier texts, and keeps nothing"
    )

    @model_validator(mode="after")
    def _least_before_most(self) -> Ending:
        most = getattr(self, "max_completion_tokens", None) or getattr(self, "max_tokens", None)
        if most is not None and (self.min_tokens or 0) > most:
            raise invalid("min_tokens", f"expected at most max_tokens, {most}, got {self.min_tokens}")
        return self

    def ends(self, eos: int | list[int] | None, vocabulary: int) -> int | list[int] | None:
        """The ids that end a text where `eos` are the model's own; raises ApiError for one that is none."""
        more = self.stop_token_ids or []
        if max(more, default=0) >= vocabulary:
            raise invalid("stop_token_ids", f"expected token ids below {vocabulary}, got {max(more)}")
        if not (more or self.ignore_eos):
            return eos
        own = [] if self.ignore_eos or eos is None else [eos] if isinstance(eos, int) else eos
        # transformers puts the model's own where there are none: an id that no token has ends nothing.
        return [*own, *more] or [vocabulary]


class Continuing(BaseModel):
    """How a chat's prompt ends, and how much is reasoned after it."""

    continue_final_message: bool | None = Field(
        None, description="of vLLM and transformers: the answer goes on with the last message, the assistant's own"
    )
    add_generation_prompt: bool | None = Field(
        None, description="of vLLM and transformers: false ends the prompt with the last message"
    )
    reasoning_effort: _Written | None = Field(None, description="for templates that read it")

    @model_validator(mode="after")
    def _goes_on_with_an_answer(self) -> Continuing:
        messages: Any = getattr(self, "messages", None)
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid("add_generation_prompt", "expected false with continue_final_message, got true")
        if self.continue_final_message and (role := messages[-1].role) != "assistant":
            raise invalid("continue_final_message", f"expected a last message of the assistant, got one of the {role}")
        return self


class StructuredOutputs(BaseModel, extra="forbid", strict=True):
    """The form of an answer as vLLM's clients say it: one of these."""

    json_: _Schema | None = Field(None, alias="json")
    regex: _Written | None = None
    choice: _Choices | None = None
    grammar: _Written | None = None
    json_object: bool | None = None


class Structured(BaseModel):
    """The form of an answer."""

    structured_outputs: StructuredOutputs | None = Field(
        None,
        description="of vLLM, with the extra `grammar`: one of `json`, `regex`, `choice`, `grammar`, `json_object`",
    )
    guided_json: _Schema | None = Field(None, description="the same as `structured_outputs.json`")
    guided_regex: _Written | None = Field(None, description="the same as `structured_outputs.regex`")
    guided_choice: _Choices | None = Field(None, description="the same as `structured_outputs.choice`")
    guided_grammar: _Written | None = Field(None, description="the same as `structured_outputs.grammar`")

    @model_validator(mode="after")
    def _one_form(self) -> Structured:
        fields = [
            name for name in ("response_format", *Structured.model_fields) if getattr(self, name, None) is not None
        ]
        if len(fields) > 1:
            raise invalid(fields[1], f"expected none beside {fields[0]}, since an answer has one form; leave one out")
        if self.structured_outputs is not None and len(self._said()) != 1:
            names = ", ".join(name for _, name, _ in self._said()) or "none"
            raise invalid(
                "structured_outputs", f"expected one of json, regex, choice, grammar, json_object, got {names}"
            )
        for field, name, form in self._said():
            if name == "json" and isinstance(form, str):
                _parsed(field, form)
        return self

    def _said(self) -> list[tuple[str, str, Any]]:
        """Fields that say a form, what they say it is, and the form."""
        said = [
            (f"guided_{name}", name, form) for name in _NAMES if (form := getattr(self, f"guided_{name}")) is not None
        ]
        given = {} if self.structured_outputs is None else self.structured_outputs.model_dump(exclude_none=True)
        return said + [
            ("structured_outputs", name.rstrip("_"), form) for name, form in given.items() if form is not False
        ]

    @property
    def structured(self) -> tuple[str, Asked] | None:
        """The field that says the form of the answer, and the form; None where `response_format` says it or nothing."""
        if not self._said():
            return None
        ((field, name, form),) = self._said()
        if name == "json_object":
            return field, ("json_schema", _OBJECT, True)
        if name == "json" and isinstance(form, str):
            form = _parsed(field, form)
        if name == "choice":
            # A string of JSON is one of the grammar too.
            form = "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in form)
        return field, (_NAMES[name], form, name != "json")


def _parsed(field: str, schema: str) -> dict[str, Any]:
    try:
        parsed = json.loads(schema)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise invalid(field, "expected a JSON schema, an object or JSON of one, got another text")
    return parsed
