"""Compiles JSON schemas, regular expressions and grammars with llguidance (the extra `grammar`).

llguidance combines an Earley parser with a lexer of regular-expression derivatives, and computes the mask of the next
token from a trie of the vocabulary (https://github.com/guidance-ai/llguidance). A schema compiles in a millisecond; a
mask takes about ten microseconds. llguidance bounds its own work (`LIMITS`), and releases the interpreter lock.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .._util.text_stream import one_line
from . import ebnf
from .json_schema import patterns
from .json_schema.complement import both
from .json_schema.enforce import Enforceable, enforceable
from .json_schema.errors import Part, UnenforceableError, Unenforced, shortened
from .json_schema.json_values import Schema, strings
from .masks import words_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LIMITS = {
    "max_items_in_row": 10_000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 10_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
"""Limits of llguidance's work and memory: compilation (usually 0.1 s, at most 2 s), a mask (about 15 ms), and lexer
states (one to two kB each).
"""
MAX_AMBIGUITY = 500
"""Maximum items in a parser row for user-supplied grammars: time grows with the cube of the number."""
MAX_CHARACTERS = 1_000_000
"""Maximum characters of a regular expression or grammar; schemas are limited by `json_schema.walk.MAX_NODES`."""
STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The format of JSON. Flexible whitespace would let a model emit spaces without end."""
OPTIONS = {"json_allowed_escapes": 'nrbtf\\"', "lenient": False, "coerce_one_of": False}
"""Without the escape `\\u`, which could spell a property name so that llguidance does not recognize it."""
_MAX_TRIALS = 64
"""Maximum number of subschemas that are compiled separately to find the faulty one."""
_UNSATISFIABLE = "Unsatisfiable schema"
_BOUNDED = "too"
"""A word in llguidance's errors about exceeded limits."""


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar, for any number of sequences."""

    pristine: LLMatcher
    """The matcher of an empty output; copied for each sequence."""
    words: int
    """Number of 32-bit words of a mask, one bit per token of the vocabulary."""
    stops: tuple[int, ...]
    """The tokens that end a sequence."""
    unenforced: list[Unenforced] = field(default_factory=list)
    """Keywords of its schema that are not enforced."""

    def admits(self, tokenizer: LLTokenizer, text: str) -> bool:
        """Return whether a text is a complete output."""
        return _admits(tokenizer, self.pristine, text)


def compiled(tokenizer: LLTokenizer, kind: str, form: Any, strict: bool = True) -> Grammar:
    """Compile a form: a `json_schema` (an object, a boolean, or JSON text), a `regex`, or a `grammar` in Lark, GBNF or
    EBNF syntax.

    Raise ValueError for a form that cannot be compiled or has no output. Schema keywords that cannot be enforced raise
    ValueError if `strict`, and are listed in the result otherwise.
    """
    from llguidance import LLMatcher

    if kind == "json_schema":
        enforced, matcher = _supported(tokenizer, json.loads(form) if isinstance(form, str) else form, strict)
        return _checked(tokenizer, kind, matcher, enforced.unenforced)
    if len(form) > MAX_CHARACTERS:
        raise ValueError(f"the {kind} must have at most {MAX_CHARACTERS:,} characters, got {len(form):,}")
    text = LLMatcher.grammar_from_regex(patterns.whole(form)) if kind == "regex" else ebnf.lark(form)
    return compiled_text(tokenizer, kind, text, [])


def compiled_text(tokenizer: LLTokenizer, kind: str, text: str, unenforced: list[Unenforced]) -> Grammar:
    """Compile a llguidance grammar of a form of this `kind`, without its `unenforced` keywords; raise ValueError."""
    limits = {"max_items_in_row": MAX_AMBIGUITY} if kind == "grammar" else {}
    return _checked(tokenizer, kind, _matcher(tokenizer, text, **limits), unenforced)


def _checked(tokenizer: LLTokenizer, kind: str, matcher: LLMatcher, unenforced: list[Unenforced]) -> Grammar:
    """Return the grammar of a new matcher; raise ValueError if it failed to compile or admits no output."""
    grammar = Grammar(matcher, words_of(tokenizer.vocab_size), tuple(tokenizer.eos_tokens), unenforced)
    first = matcher.deep_copy()
    has_output = not matcher.is_error() and _allows_more(first, grammar.stops)
    if first.is_error() and "NoExtension" not in first.get_error():
        raise ValueError(f"cannot compile the {kind}: {_reason(first)}")
    if not has_output:
        raise ValueError(f"the {kind} admits no output except the empty one; check its references")
    return grammar


def supported(
    tokenizer: LLTokenizer, schema: Any, strict: bool, closed: bool | None = None
) -> tuple[Schema, list[Unenforced]]:
    """Return the schema with only keywords that llguidance enforces, and the list of other keywords.

    `closed`: whether objects with `properties` exclude additional properties unless the schema allows them; default:
    `strict`. Raise ValueError for a schema that cannot be compiled or admits no value and, if `strict`, for unenforced
    keywords.
    """
    enforced, _ = _supported(tokenizer, schema, strict, closed)
    return enforced.schema, enforced.unenforced


def _supported(
    tokenizer: LLTokenizer, schema: Any, strict: bool, closed: bool | None = None
) -> tuple[Enforceable, LLMatcher]:
    """Return the schema as `supported` does, and its compiled matcher."""
    if not isinstance(schema, dict | bool):
        raise ValueError(f"a schema must be an object or a boolean, got {type(schema).__name__}")
    try:
        enforced = enforceable(schema, strict if closed is None else closed)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    if enforced.schema is False:
        place = Part("#", {}, schema).pointer("not") if isinstance(schema, dict) else "#"
        raise ValueError(f"{place}: admits no value; correct the schema")
    mistakes = [lost for lost in enforced.unenforced if lost.mistaken]
    if mistakes:
        raise UnenforceableError(mistakes)
    _list_names_of_patterns(tokenizer, enforced)
    while not (strict and enforced.unenforced):
        matcher = _matcher(tokenizer, schema_grammar(enforced.schema))
        if not matcher.is_error():
            return enforced, matcher
        enforced.unenforced += _fault(tokenizer, enforced, _reason(matcher))
    raise UnenforceableError(enforced.unenforced)


def _list_names_of_patterns(tokenizer: LLTokenizer, enforced: Enforceable) -> None:
    """Replace patterns that match only names stated in the schema by these names: after they are all written,
    llguidance 1.9.1 admits a comma and then nothing.
    """
    nodes = [part.schema for part in enforced.parts if "patternProperties" in part.schema]
    nodes = [node for node in nodes if node.get("additionalProperties") is False]
    stated = dict.fromkeys(_stated_names(enforced.schema) if nodes else ())
    matched: dict[str, set[str]] = {}
    for node in nodes:
        patterns = node["patternProperties"]
        for pattern in patterns.keys() - matched.keys():
            matched[pattern] = _matching(tokenizer, pattern, stated)
        schemas = {name: [patterns[pattern] for pattern in patterns if name in matched[pattern]] for name in stated}
        schemas = {name: found for name, found in schemas.items() if found}
        listed = dict.fromkeys((*node.get("properties", ()), *node.get("required", ()), *schemas), True)
        trial = {
            "properties": listed,
            "patternProperties": dict.fromkeys(patterns, True),
            "additionalProperties": False,
        }
        matcher = _matcher(tokenizer, schema_grammar({"type": "object", **trial}))
        text = "".join(f"{json.dumps(name, ensure_ascii=False)}: 0, " for name in listed)
        if text and not matcher.is_error() and not _goes_on(tokenizer, matcher, f"{{{text}"):
            own = node.setdefault("properties", {})
            own.update({name: both([own.get(name, True), *found]) for name, found in schemas.items()})
            del node["patternProperties"]


def _stated_names(schema: Schema) -> Iterator[str]:
    """Yield the names in `properties` and `required` of a schema and its subschemas, in their order."""
    left: list[Any] = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            for keyword in ("properties", "required"):
                yield from strings([*part.get(keyword, ())]) if isinstance(part.get(keyword), dict | list) else ()
            left += reversed(part.values())
        elif isinstance(part, list):
            left += reversed(part)


def _matching(tokenizer: LLTokenizer, pattern: str, names: Iterable[str]) -> set[str]:
    """Return the names that match a pattern in Rust's syntax."""
    matcher = _matcher(tokenizer, schema_grammar({"type": "string", "pattern": pattern}))
    texts = {name: json.dumps(name, ensure_ascii=False) for name in names}
    return {name for name, text in texts.items() if not matcher.is_error() and _admits(tokenizer, matcher, text)}


def _admits(tokenizer: LLTokenizer, pristine: LLMatcher, text: str) -> bool:
    """Return whether a text is a complete output, given the matcher of an empty output."""
    tokens, matcher = tokenizer.greedy_tokenize(text), pristine.deep_copy()
    if tokenizer.decode_bytes(tokens) != text.encode():  # the vocabulary cannot express the whole text
        return False
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def _goes_on(tokenizer: LLTokenizer, matcher: LLMatcher, text: str) -> bool:
    """Return whether a token other than an end token may follow a text."""
    matcher.consume_tokens(tokenizer.greedy_tokenize(text))
    return not matcher.is_error() and _allows_more(matcher, tokenizer.eos_tokens)


_OUTER = ("allOf", "required", "additionalProperties", "items", "prefixItems", "properties", "type")
"""Keywords that are dropped only if no other keyword is at fault, in this order."""
_SUSPECTS = {"pattern", "patternProperties", "multipleOf", "minProperties", "maxProperties"}
"""Keywords of subschemas that are suspected first."""
_COMPOSED = {"$ref", "allOf", "anyOf", "$defs"}
"""Schemas with only these keywords are suspected after their parts."""


_OF_THE_REST = {
    "properties": "additionalProperties",
    "patternProperties": "additionalProperties",
    "prefixItems": "items",
}
"""Keywords about the properties or items to which another keyword does not apply."""


def _fault(tokenizer: LLTokenizer, enforced: Enforceable, reason: str) -> list[Unenforced]:
    """Drop the keyword that prevents compilation of a schema, and one that would now apply to more properties or items;
    return them with the reason. Raise ValueError if no single keyword is at fault, or if the schema admits no value.
    """

    def error(schema: dict[str, Any]) -> str | None:
        matcher = _matcher(tokenizer, schema_grammar({**schema, "$defs": enforced.definitions}))
        return _reason(matcher) if matcher.is_error() else None

    if _BOUNDED in reason:
        raise ValueError(f"{_largest(enforced)}: cannot compile the json_schema: {reason}; make it smaller")
    parts = sorted(
        enforced.parts, key=lambda part: (part.schema.keys() <= _COMPOSED, not part.schema.keys() & _SUSPECTS)
    )
    for part in parts[:_MAX_TRIALS]:
        why = error(part.schema)
        if why is None:
            continue
        keywords = sorted(part.schema, key=lambda name: _OUTER.index(name) if name in _OUTER else -1)
        left = {name: error({other: part.schema[other] for other in keywords if other != name}) for name in keywords}
        cures = [name for name in keywords if left[name] is None]
        if why.startswith(_UNSATISFIABLE):
            raise part.no_value(cures, why.removeprefix(_UNSATISFIABLE).lstrip(": "))
        # An error quotes the schema: its text may change although its cause stays.
        suspects = [*(name for name in cures if name not in _OUTER), *(name for name in keywords if left[name] != why)]
        keyword = next((name for name in suspects if name != "type"), None)
        if keyword is not None:
            dropped = [name for name in (keyword, _OF_THE_REST.get(keyword)) if name in part.schema]
            for name in dropped:
                del part.schema[name]
            return [Unenforced(pointer, shortened(why)) for pointer in dict.fromkeys(map(part.pointer, dropped))]
        break
    raise ValueError(f"cannot compile the json_schema: {reason}")


def _largest(enforced: Enforceable) -> str:
    """Return the place of the largest keyword, in the innermost of the outer parts with at least half of the size."""
    parts = enforced.parts[-_MAX_TRIALS:]
    sizes = [{name: len(repr(value)) for name, value in part.schema.items() if name != "$defs"} for part in parts]
    most = max((sum(size.values()) for size in sizes), default=0)
    for part, size in zip(parts, sizes, strict=True):
        if size and 2 * sum(size.values()) >= most:
            return part.pointer(max(size, key=size.__getitem__))
    return "#"


def schema_grammar(schema: Schema, **style: Any) -> str:
    """Return llguidance's grammar of a schema that `supported` has returned; `style` as in `STYLE`."""
    from llguidance import LLMatcher

    text = json.dumps({} if schema is True else schema)
    options: Any = {**OPTIONS, **(style or STYLE)}
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides=options)
    except ValueError as error:  # llguidance's JSON parser
        raise ValueError(f"the schema cannot be parsed: {error}; reduce its nesting") from None


def _matcher(tokenizer: LLTokenizer, text: str, **limits: Any) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**{**LIMITS, **limits}))


def _reason(matcher: LLMatcher) -> str:
    return one_line(matcher.get_error().partition("<state>")[0].partition(" while processing ")[0])


def _allows_more(matcher: LLMatcher, stops: Sequence[int]) -> bool:
    """Return whether a token other than the end tokens `stops` may follow."""
    allowed = int.from_bytes(matcher.compute_bitmask(), "little")
    for token in stops:
        allowed &= ~(1 << token)
    return bool(allowed)
