"""Grammars of multi-part outputs: reasoning, then text, tool calls or a form, with the delimiters of the model family.

Calls have the format of the family's chat template. Reasoning before them is unconstrained, and so is text, unless a
call is required. A delimiter that is a special token is matched as that token, which text and JSON strings cannot
contain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from . import ebnf
from .compile import OPTIONS, Grammar, compiled_text, schema_grammar, supported
from .json_schema import patterns
from .json_schema.disjoint import Comparison
from .json_schema.errors import UnenforceableError, Unenforced
from .json_schema.json_values import Schema, escaped, strings, types_named
from .json_schema.keywords import about, keywords
from .json_schema.references import References

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_STYLE = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]", "item_separator": ",", "key_separator": ":"}
"""JSON with at most one whitespace character between its parts: a model might repeat whitespace without end."""
_THINK = "<think>", "</think>"


class Family(NamedTuple):
    """The call format of a model family; `{name}` is the name of a function."""

    begin: str
    end: str
    separator: str = ""
    """Text between two calls."""
    section: tuple[str, str] = ("", "")
    """Delimiters around all calls."""
    parameter: tuple[str, str] | None = None
    """Delimiters around each argument, if arguments are not a JSON object; strings then have no quotes."""

    @property
    def trigger(self) -> str:
        """The text that begins the first call."""
        return self.section[0] or self.begin.partition("{name}")[0].partition("\n")[0]


FAMILIES: dict[str, Family | None] = {
    "qwen_3": Family('<tool_call>\n{{"name": "{name}", "arguments": ', "}}\n</tool_call>", "\n"),
    "qwen_3_coder": Family(
        "<tool_call>\n<function={name}>\n",
        "</function>\n</tool_call>",
        "\n",
        parameter=("<parameter={name}>\n", "\n</parameter>\n"),
    ),
    "kimi": Family(
        "<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "deepseek_v3_1": Family(  # with a full-width bar and a lower block, as in its tokenizer
        "<\uff5ctool\u2581call\u2581begin\uff5c>{name}<\uff5ctool\u2581sep\uff5c>",
        "<\uff5ctool\u2581call\u2581end\uff5c>",
        section=("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"),
    ),
    "glm_4_7": Family(
        "<tool_call>{name}\n",
        "</tool_call>",
        "\n",
        parameter=("<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    "harmony": None,
}
"""By name. Harmony's messages have a different structure (`_Writer._harmony`)."""


_OF_WHOLE_ARGUMENTS = (
    "allOf", "anyOf", "$ref", "enum", "const", "patternProperties", "minProperties", "maxProperties"
)  # fmt: skip
"""Keywords that do not concern a single argument."""


_TYPES = ("integer", "number", "boolean", "null", "object", "array", "string")
"""Types in the order in which readers try them on an unquoted argument."""
_DIGITS, _EXPONENT = "[0-9](_?[0-9])*", "[eE][+-]?[0-9]{1,2}"
_DECIMAL = rf"[+-]?({_DIGITS}(\.({_DIGITS})?)?|\.{_DIGITS})"
_READ_AS = {
    "integer": rf"[+-]?{_DIGITS}(\.0*)?",
    "number": f"{_DECIMAL}({_EXPONENT})?",
    "boolean": "(?i:true|false)|[01]",
    "null": "null|None",
    "object": r"\{(?s:.*)",
    "array": r"\[(?s:.*)",
}
"""For each type a pattern of the unquoted texts that readers take for a value of it, or that begin like one."""
_READABLE_NAME = re.compile(r"[^\s<>]([^<>\n]*[^\s<>])?")
"""The names of arguments that readers find between delimiters."""


class FunctionError(ValueError):
    """The parameters of a function cannot be enforced; the message has its name and the place of the keyword."""


def types_of_arguments(parameters: dict[str, Any]) -> dict[str, list[str]]:
    """Return the types that readers try on each argument that is written without JSON, in order. Text that may be of
    any type stays a string.
    """
    listed, others = parameters.get("properties"), parameters.get("additionalProperties", True)
    properties = {
        **dict.fromkeys(strings(parameters.get("required")), others),
        **(listed if isinstance(listed, dict) else {}),
    }
    comparison, types = Comparison(parameters, References(parameters)), dict[str, list[str]]()
    for name, schema in properties.items():
        kinds = comparison.types(schema)
        if isinstance(schema, dict) and schema.get("nullable"):  # OpenAPI's keyword, which readers know
            kinds |= {"null"}
        types[name] = ["string"] if len(kinds) == len(_TYPES) else [kind for kind in _TYPES if kind in kinds]
    return types


@dataclass(frozen=True)
class Function:
    """A function that may be called."""

    name: str
    parameters: dict[str, Any] | None = None
    """The schema of its arguments; None or {} for none."""
    strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of its arguments; raises ValueError if arguments are not an object."""
        schema = self.parameters or {"properties": {}, "additionalProperties": False}
        kinds = schema.get("type")
        if kinds not in (None, "object") and not (isinstance(kinds, list) and "object" in kinds):
            raise ValueError(f"#/type: arguments must be an object, got {kinds!r}")
        return (
            {**schema, "type": "object"} if kinds is None or (isinstance(kinds, list) and "object" in kinds) else schema
        )


@dataclass(frozen=True)
class OutputParts:
    """The allowed parts of an output: reasoning, then free text or a form, and calls."""

    family: str
    functions: Sequence[Function]
    """May be empty if there is a form."""
    mode: str = "auto"
    """`auto` (text with or without calls), `none` (no calls), `required` (only calls) or `named` (one call)."""
    parallel: bool = True
    """Whether several calls are allowed."""
    thinking: Literal["none", "possible", "begun"] = "none"
    """Whether the output may begin with reasoning, or the prompt has already begun the reasoning."""
    form: tuple[str, Any, bool] | None = None
    """The form of an output without calls, as arguments of `compile.compiled`; it replaces free text."""


def compiled_parts(tokenizer: LLTokenizer, parts: OutputParts, special: Mapping[str, int]) -> Grammar:
    """Compile the grammar of an output in parts; `special`: the special tokens of the tokenizer.

    Raise FunctionError for parameters that cannot be enforced.
    """
    writer = _Writer(tokenizer, parts, special)
    return compiled_text(tokenizer, "tools", writer.lark(), writer.unenforced)


@dataclass(frozen=True)
class _Argument:
    """An argument that is written without JSON."""

    function: Function
    schema: Schema
    definitions: dict[str, Any]
    types: Sequence[str]
    """The types that its reader tries, in order."""
    end: str
    """The delimiter after it."""

    def target(self, reference: str) -> Schema:
        """Return the definition that a reference names."""
        target: Schema = self.definitions[reference.rpartition("/")[2]]
        return target

    def read_as(self, kinds: Iterable[str]) -> str:
        """Return a pattern of the texts that are read as values of some types; empty where it has none of them."""
        return "|".join(dict.fromkeys(_READ_AS[kind] for kind in kinds if kind in self.types))

    def reads(self, text: str, value: Any) -> bool:
        """Whether the text of a constant is read as its value."""
        if text != text.strip() or self.end.strip() in text:
            return False
        others = self.read_as(_READ_AS)
        return not (others and re.fullmatch(others, text)) if isinstance(value, str) else bool(others)

    def unlimited(self, schema: Schema, within: Set[str] = frozenset()) -> set[str]:
        """Return types of which a schema admits every value; `within`: references that have led to it."""
        if isinstance(schema, bool):
            return {*_TYPES} if schema else set()
        if schema.keys() == {"$ref"}:
            name = schema["$ref"]
            return set() if name in within else self.unlimited(self.target(name), {*within, name})
        if schema.keys() == {"anyOf"}:
            return set().union(*(self.unlimited(part, within) for part in schema["anyOf"]))
        stated = schema.get("type", _TYPES)
        kinds = types_named([stated] if isinstance(stated, str) else stated)
        limited = [about(keyword) for keyword in keywords(schema) - {"type"}]
        return {kind for kind in kinds if all(types and kind not in types for types in limited)}


class _Writer:
    """Writes the grammar in Lark syntax, rule by rule."""

    def __init__(self, tokenizer: LLTokenizer, parts: OutputParts, special: Mapping[str, int]) -> None:
        self._tokenizer, self._parts, self._special = tokenizer, parts, special
        self._rules: list[str] = []
        self._names = 0
        self._schemas: dict[str, Schema] = {}
        self.unenforced: list[Unenforced] = []
        by_length = sorted(special, key=len, reverse=True)
        self._delimiters = re.compile("|".join(map(re.escape, by_length)) or r"(?!)")

    def lark(self) -> str:
        """Return the whole grammar."""
        family = FAMILIES[self._parts.family]
        body = self._harmony() if family is None else self._body(family)
        self._rules.insert(0, f"start: {body}")
        return "\n".join(self._rules)

    # The output

    def _body(self, family: Family) -> str:
        parts = self._parts
        if parts.form is not None and not parts.functions:
            return f"{self._reasoning()} {self._form(*parts.form)}"
        one = self._any(*(self._call(family, function) for function in parts.functions))
        several = parts.parallel and parts.mode != "named"
        more = f" ({self._text(family.separator)} {one})*" if several else ""
        alone = f"{self._text(family.section[0])} {one}{more} {self._text(family.section[1])}"
        if parts.form is not None and parts.mode == "auto":
            return f"{self._reasoning()} ({alone} | {self._form(*parts.form)})"
        if parts.mode != "auto":
            return f"{self._reasoning()} {alone}"
        return self._among_text(family, alone, several)

    def _among_text(self, family: Family, alone: str, several: bool) -> str:
        """Return the body of free text in which each trigger begins calls."""
        trigger = family.trigger
        if trigger in self._special:
            text = f"{self._free_text()}?"
            return f"{self._reasoning()} ({text} {alone}){'*' if several and not family.section[0] else '?'} {text}"
        head = self._rule(f"{self._free_text()} {json.dumps(trigger)}", "[lazy]")
        if family.section[0]:
            calls = alone.removeprefix(self._text(trigger))
        else:
            calls = self._any(*(self._call(family, function, len(trigger)) for function in self._parts.functions))
        if several and not family.section[0]:
            return f"{self._reasoning()} ({head} {calls})* {self._free_text()}?"
        return f"{self._reasoning()} ({head} {calls} | {self._free_text(without=trigger)}?)"

    def _free_text(self, without: str = "") -> str:
        """Return a terminal of free text without reasoning and without the text `without`."""
        excluded = [without] if without else []
        if self._parts.thinking != "none" and _THINK[0] not in self._special:
            excluded.append(_THINK[0])
        return self._terminal(
            " & ".join(["/(?s:.*)/", *(f"~/(?s:.*){_slashed(re.escape(excerpt))}(?s:.*)/" for excerpt in excluded)])
        )

    def _reasoning(self) -> str:
        """Return the body of the reasoning at the start of the output; empty if there is none."""
        begin, end = (self._text(mark) for mark in _THINK)
        special = _THINK[1] in self._special
        thought = f"/(?s:.*)/? {end}" if special else self._rule(r"/(?s:.*)<\/think>/", "[lazy]")
        match self._parts.thinking:
            case "none":
                return ""
            case "begun":
                return rf"{thought} /\n{{1,2}}/?"
            case "possible":
                return rf"({begin} {thought} /\n{{1,2}}/?)?"

    def _harmony(self) -> str:
        """Return the body of Harmony's messages, by channel; a call ends the output."""
        parts = self._parts
        begin, end = self._text("<|message|>"), self._text("<|end|>")
        channel, constrain = self._text("<|channel|>"), self._text("<|constrain|>")
        commentary = f'{channel} "commentary"'
        one_call = []
        for function in parts.functions:
            to = json.dumps(f" to=functions.{function.name}")
            heads = [
                f'{commentary} {to} " "? {constrain} "json" {begin}',
                f'{to} {commentary} " "? {constrain} "json" {begin}',
                f'{to} {commentary} " json" {begin}',
            ]
            one_call.append(f"{self._any(*heads)} {self._arguments(function)} {self._text('<|call|>')}")
        again = self._text("<|start|>") + ' "assistant"'
        analysis = f'{channel} "analysis" {begin} /(?s:.*)/? {end} {again}'
        ends = not self._text("<|call|>")
        options = []
        if one_call:
            call = self._any(*one_call)
            several = parts.parallel and parts.mode != "named" and not ends
            options.append(f"{call} ({again} {call})*" if several else call)
        if parts.mode not in ("required", "named"):
            answer = "/(?s:.*)/?" if parts.form is None else self._form(*parts.form)
            options.append(f'{channel} "final" {begin} {answer} ({end})?')
        return f"({analysis})* ({' | '.join(options)})"

    # Calls

    def _call(self, family: Family, function: Function, skipped: int = 0) -> str:
        """Return the body of one call, without its first `skipped` characters."""
        begin, end = family.begin, family.end
        before, _, number = begin.partition("{number}")
        before = before.format(name=function.name)[skipped:]
        after = f"/[0-9]+/ {self._text(number)}" if number else ""
        arguments = self._arguments(function) if family.parameter is None else self._parameters(family, function)
        return f"{self._text(before)} {after} {arguments} {self._text(end.format())}"

    def _arguments(self, function: Function) -> str:
        return self._json(self._schema(function))

    def _schema(self, function: Function) -> Schema:
        if function.name not in self._schemas:
            try:
                schema, unenforced = supported(self._tokenizer, function.schema, function.strict, closed=True)
            except ValueError as error:
                raise FunctionError(f"{function.name}: {error}") from None
            self.unenforced += [keyword._replace(place=f"{function.name}{keyword.place}") for keyword in unenforced]
            self._schemas[function.name] = schema
        return self._schemas[function.name]

    # Arguments without JSON

    def _parameters(self, family: Family, function: Function) -> str:
        """Return the body of all arguments between their delimiters, in the order of the schema."""
        assert family.parameter is not None
        schema = self._schema(function)
        own = schema if isinstance(schema, dict) else {}
        for keyword in _OF_WHOLE_ARGUMENTS:
            if keyword in own:
                self._lost(function, keyword)
        required = own.get("required", [])
        properties = {**own.get("properties", {})}
        for name in required:
            properties.setdefault(name, own.get("additionalProperties", True))
        types = types_of_arguments(function.schema)
        parts = []
        for name, value in properties.items():
            if value is not False and not _READABLE_NAME.fullmatch(name):
                self._lost(function, f"properties/{escaped(name)}")
            elif value is not False:
                begin, end = (text.format(name=name) for text in family.parameter)
                argument = _Argument(function, value, own.get("$defs", {}), types.get(name, ["string"]), end)
                body = self._value(argument, value)
                if body is not None:
                    parts.append(f"({self._text(begin)} {body}){'' if name in required else '?'}")
                elif name in required:
                    self._lost(function, "required")
        return " ".join(parts)

    def _value(self, argument: _Argument, schema: Schema, within: Set[str] = frozenset()) -> str | None:
        """Return the body of a value and its end: strings without quotes, other values as JSON; None without a possible
        value. `within`: references that have led to the schema.
        """
        if schema is True:
            return self._string(argument, {})
        assert isinstance(schema, dict)
        (only,) = schema if len(schema) == 1 else ("",)
        if only == "$ref":
            name = schema["$ref"]
            return None if name in within else self._value(argument, argument.target(name), {*within, name})
        if only == "anyOf" or (only == "allOf" and len(schema["allOf"]) == 1):
            parts = [self._value(argument, part, within) for part in schema[only] if part is not False]
            options = [option for option in parts if option is not None]
            return self._any(*options) if options else None
        if "enum" in schema or "const" in schema:
            values = self._listed(schema, argument.definitions)
            texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
            readable = [text for text, value in zip(texts, values, strict=True) if argument.reads(text, value)]
            if len(readable) < len(texts):
                self._lost(argument.function, "enum" if "enum" in schema else "const")
            return f"{self._any(*map(json.dumps, readable))} {self._text(argument.end)}" if readable else None
        kinds = types_named([schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type", _TYPES))
        forms = [self._string(argument, schema)] if "string" in kinds else []
        if others := kinds.intersection(argument.types) - {"string"}:
            value = self._json({**schema, "type": sorted(others), "$defs": argument.definitions})
            forms.append(f"{value} {self._text(argument.end)}")
        options = [form for form in forms if form is not None]
        return self._any(*options) if options else None

    def _listed(self, schema: dict[str, Any], definitions: dict[str, Any]) -> list[Any]:
        """Return the values of `enum` or `const` that the other keywords of a schema admit."""
        values = schema.get("enum", [schema.get("const")])
        if len(schema) == 1:
            return list(values)
        try:
            grammar = compiled_text(
                self._tokenizer, "json_schema", schema_grammar({**schema, "$defs": definitions}), []
            )
        except ValueError:  # the schema admits no value
            return []
        return [value for value in values if grammar.admits(self._tokenizer, json.dumps(value, ensure_ascii=False))]

    def _string(self, argument: _Argument, schema: dict[str, Any]) -> str | None:
        """Return the body of an unquoted string, which ends at the first end of the argument; None without any.

        Numbers, booleans and null that the argument may be are texts of the same terminal: llguidance follows the
        longest match, so that 12 would begin a string and could not end as a number. The reader takes all of them for
        such values, so that their limits are not enforced.
        """
        for keyword in ("allOf", "format", "$ref"):
            if keyword in schema:
                self._lost(argument.function, keyword)
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if most != "" and least > most:
            return None
        text = f"/(?s:.{{{least},{most}}})/"
        if least or "pattern" in schema:
            # What is read as the string has no surrounding whitespace, and ends at the first delimiter.
            text += rf" & /(\S((?s:.*)\S)?)?/ & ~/(?s:.*){_slashed(re.escape(argument.end.strip()))}(?s:.*)/"
        if "pattern" in schema:
            text += f" & /{_slashed(patterns.searched(schema['pattern']))}/"
        limited = {*argument.types} - argument.unlimited(argument.schema)
        if limited & {"integer", "number", "boolean"}:
            self._lost(argument.function, "type")
        if containers := argument.read_as({"object", "array"} & limited):
            text += rf" & ~/\s*({containers})/"
        if scalars := argument.read_as(("integer", "number", "boolean", "null")):
            text = f"({text} | /{scalars}/)"
        return self._rule(f"{self._terminal(text)} {json.dumps(argument.end)}", "[lazy]")

    def _lost(self, function: Function, keyword: str) -> None:
        lost = Unenforced(f"#/{keyword}", "is not supported in the arguments of this model's calls, which are not JSON")
        if function.strict:
            raise FunctionError(f"{function.name}: {UnenforceableError([lost])}")
        named = lost._replace(place=f"{function.name}{lost.place}")
        if named not in self.unenforced:
            self.unenforced.append(named)

    # Pieces

    def _form(self, kind: str, form: Any, strict: bool) -> str:
        """Return the body of the form of an output without calls."""
        if kind == "json_schema":
            schema, unenforced = supported(self._tokenizer, form, strict)
            self.unenforced += unenforced
            return self._json(schema)
        if kind == "regex":
            return self._terminal(f"/{_slashed(patterns.whole(form))}/")
        lines = ebnf.lark(form, prefix="form_").splitlines()
        self._rules += lines
        return "form_start"

    def _json(self, schema: Schema) -> str:
        body = {} if schema is True else schema
        assert isinstance(body, dict)
        return self._rule("%json " + json.dumps({**body, "x-guidance": {**_STYLE, **OPTIONS}}))

    def _text(self, text: str) -> str:
        """Return the body of a text, with special tokens as tokens."""
        parts, position = [], 0
        for match in self._delimiters.finditer(text):
            parts += [json.dumps(text[position : match.start()])] if match.start() > position else []
            token = self._special[match[0]]
            if token not in self._tokenizer.eos_tokens:  # an end token ends the output anyway
                parts.append(f"<[{token}]>")
            position = match.end()
        parts += [json.dumps(text[position:])] if position < len(text) else []
        return " ".join(parts)

    def _any(self, *options: str) -> str:
        return options[0] if len(options) == 1 else f"({' | '.join(options)})"

    def _rule(self, body: str, options: str = "") -> str:
        self._names += 1
        self._rules.append(f"part_{self._names}{options}: {body}")
        return f"part_{self._names}"

    def _terminal(self, body: str) -> str:
        self._names += 1
        self._rules.append(f"PART_{self._names}: {body}")
        return f"PART_{self._names}"


def _slashed(pattern: str) -> str:
    r"""Return a regular expression escaped for use between slashes."""
    return re.sub(r"\\.|/", lambda match: r"\/" if match[0] == "/" else match[0], pattern, flags=re.DOTALL)
