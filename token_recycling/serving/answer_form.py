"""The form that a request asks of its answer: OpenAI's `response_format`, and the fields that vLLM has for it."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, Field, StringConstraints, field_validator, model_validator

from .errors import invalid
from .json_values import check_json

Form = tuple[str, Any, bool]
"""What is compiled: a name, a form and whether it is strict, as `hf.forms.compiled` takes them."""
_Written = Annotated[str, StringConstraints(min_length=1)]
_Choices = Annotated[list[_Written], Field(min_length=1, max_length=1024)]
_Schema = dict[str, Any] | _Written
_NAMES = {"json": "json_schema", "regex": "regex", "grammar": "grammar", "choice": "grammar"}
_OBJECT = {"type": "object", "additionalProperties": True}


class StructuredOutputs(BaseModel, extra="forbid", strict=True):
    """The form of an answer as vLLM's clients say it: one of these."""

    json_: _Schema | None = Field(None, alias="json")
    regex: _Written | None = None
    choice: _Choices | None = None
    grammar: _Written | None = None
    json_object: bool | None = None


class Formed(BaseModel):
    """The form of an answer: OpenAI's field, or one of vLLM's."""

    response_format: dict[str, Any] | None = Field(
        None,
        description="`text`; with the extra `grammar` also `json_object`, `json_schema`, and "
        '`{"type": "regex", "value": ...}`',
    )
    structured_outputs: StructuredOutputs | None = Field(
        None,
        description="of vLLM, with the extra `grammar`: one of `json`, `regex`, `choice`, `grammar`, `json_object`",
    )
    guided_json: _Schema | None = Field(None, description="the same as `structured_outputs.json`")
    guided_regex: _Written | None = Field(None, description="the same as `structured_outputs.regex`")
    guided_choice: _Choices | None = Field(None, description="the same as `structured_outputs.choice`")
    guided_grammar: _Written | None = Field(None, description="the same as `structured_outputs.grammar`")

    @field_validator("response_format")
    @classmethod
    def _known_format(cls, form: dict[str, Any] | None) -> dict[str, Any] | None:
        kind = None if form is None else form.get("type")
        if form is None or kind == "text":
            return None
        named = form.get("json_schema")
        if kind == "json_schema" and not (isinstance(named, dict) and isinstance(named.get("schema"), dict)):
            raise ValueError("expected a schema in json_schema.schema, got none")
        if kind == "regex" and not isinstance(form.get("value"), str):
            raise ValueError("expected a regular expression in value, got none")
        if kind not in ("json_object", "json_schema", "regex"):
            raise ValueError(f"expected the type text, json_object, json_schema or regex, got {kind!r}")
        return form

    @model_validator(mode="after")
    def _one_form(self) -> Formed:
        fields = [name for name in Formed.model_fields if getattr(self, name) is not None]
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
    def form(self) -> tuple[str, Form] | None:
        """The field that says the form of the answer, and the form; None where it is free."""
        if self.response_format is not None:
            return "response_format", _of_openai(self.response_format)
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


def _of_openai(form: dict[str, Any]) -> Form:
    if form["type"] == "json_object":
        return "json_schema", _OBJECT, True
    if form["type"] == "regex":
        return "regex", form["value"], True
    wanted = form["json_schema"]
    return "json_schema", wanted["schema"], bool(wanted.get("strict"))


def _parsed(field: str, schema: str) -> dict[str, Any]:
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise invalid(field, "expected a JSON schema, an object or JSON of one, got another text")
    check_json(field, parsed)
    return parsed
