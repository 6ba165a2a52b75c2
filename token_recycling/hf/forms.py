"""Compiles JSON schemas, regular expressions, grammars and structural tags with xgrammar.

Nothing here imports transformers or torch: the server compiles in a separate process that must start quickly.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from .._util.text_stream import one_line

_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]', re.DOTALL)
"""A string or a class of characters in a grammar of xgrammar."""
_SOURCE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: (?:Check failed: \(.*\) is false: )?")
"""Location in xgrammar's C++ sources at the start of its errors."""
_CHARACTER, _JSON_CHARACTER = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\\r\n]"
"""xgrammar's class for a character of a string whose length is limited, and without what JSON leaves out of it too:
control characters.
"""


def compiled(compiler: Any, name: str, form: Any, strict: bool = True) -> Any:
    """Compile a form, by the name of its argument of `constrain`, or a `structural_tag`. Raises ValueError. If not
    `strict`, unsupported keywords of a schema are ignored, and objects may have further properties.
    """
    try:
        if name == "json_schema":
            schema = json.loads(form) if isinstance(form, str) else form
            check_schema(schema, strict)
            # Where any whitespace may follow, a model may emit spaces for ever.
            how = {"any_whitespace": False, "strict_mode": strict}
            grammar = str(_grammar(json.dumps(schema), **how))
            limited = _LITERAL.sub(lambda found: _JSON_CHARACTER if found[0] == _CHARACTER else found[0], grammar)
            if limited != grammar:
                return compiler.compile_grammar(limited)
            return compiler.compile_json_schema(json.dumps(schema), **how)
        if name == "structural_tag":
            return compiler.compile_structural_tag(form)
        return compiler.compile_regex(form) if name == "regex" else compiler.compile_grammar(form)
    except (RuntimeError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"cannot compile the {name}: {_SOURCE.sub('', one_line(error))}") from error


def check_output(grammar: Any, name: str) -> None:
    """Raise ValueError for a compiled grammar whose only output is the empty one, or that has none, such as a schema
    that refers to itself or `a ::= b` with `b ::= a`.
    """
    import xgrammar

    known = grammar.tokenizer_info
    mask = xgrammar.allocate_token_bitmask(1, known.vocab_size)
    xgrammar.GrammarMatcher(grammar).fill_next_token_bitmask(mask)
    allowed = mask.numpy().view("uint32")[0]
    for token in known.stop_token_ids:
        allowed[token // 32] &= ~np.uint32(1 << token % 32)
    if not allowed.any():
        raise ValueError(f"the {name} admits no output but the empty one; check its references")


def _grammar(schema: str, **how: Any) -> Any:
    import xgrammar

    return xgrammar.Grammar.from_json_schema(schema, **how)


_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_IN_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ALONE = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems")
"""Keywords that hold schemas: under names, in a list, or one."""
_NEVER = ("not",)
_LOOSE = (
    "if", "then", "else", "contains", "uniqueItems", "dependentRequired", "dependentSchemas", "dependencies",
    "$dynamicRef", "$recursiveRef",
)  # fmt: skip
"""Keywords that xgrammar leaves out without a word."""


def check_schema(schema: Any, strict: bool = True) -> None:
    """Raises ValueError for a keyword that would not be held to: `not` and references to elsewhere, and where the
    schema is `strict` every other one that xgrammar leaves out.
    """
    left = [schema]
    while left:
        one = left.pop()
        if not isinstance(one, dict):
            continue
        wrong = [name for name in (*_NEVER, *(_LOOSE if strict else ())) if one.get(name) not in (None, False)]
        if strict and isinstance(one.get("allOf"), list) and len(one["allOf"]) > 1:
            wrong.append("allOf of several schemas")
        if strict and "pattern" in one and one.keys() & {"minLength", "maxLength"}:
            wrong.append("pattern with minLength or maxLength")
        if not str(one.get("$ref", "#")).startswith("#"):
            wrong.append(f"$ref to {one['$ref']}")
        if wrong:
            raise ValueError(f"unsupported keywords of JSON Schema: {', '.join(wrong)}; leave them out")
        for name in _BY_NAME:
            left.extend(one[name].values() if isinstance(one.get(name), dict) else ())
        for name in _IN_LISTS:
            left.extend(one[name] if isinstance(one.get(name), list) else ())
        left.extend(one[name] for name in _ALONE if name in one)
