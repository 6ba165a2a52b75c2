"""Translates regular expressions of JSON Schema (ECMA-262, or Python's `re`) to Rust's syntax for llguidance.

The dialects differ: Rust's classes have set operations (`[a&&b]`) and can be nested, Python's `\\w` includes all
letters, and `.` of ECMA-262 excludes more line ends. A translated pattern matches the strings that both `re.search` and
ECMA-262 match or, for names that other properties must not have, that either of them matches. Syntax with a different
meaning in both, or in neither of them, is rejected: Rust would read `a++`, `\\z` or `[]a]` in a third way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from .json_values import shown

_SPACE = r"\t\n\x0B\x0C\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""Whitespace in both dialects."""
_ANY_SPACE = _SPACE + r"\u0085\ufeff\x1c-\x1f"
"""Whitespace in either dialect."""
_WORD, _ANY_WORD = r"0-9A-Za-z_", r"\p{L}\p{N}\p{M}\p{Pc}"
_DIGIT, _ANY_DIGIT = r"0-9", r"\p{Nd}"
_CLASSES = {
    "w": (_WORD, _ANY_WORD),
    "d": (_DIGIT, _ANY_DIGIT),
    "s": (_SPACE, _ANY_SPACE),
}
"""For each class escape: its characters in both dialects, and its characters in either dialect."""
_NEWLINES = r"\n\r\u2028\u2029"
_UNWRITABLE = r"\x00-\x07\x0B\x0E-\x1f\x7f"
"""Control characters without a short escape in JSON, which are excluded from classes. llguidance 1.9.1 skips them in
patterns. In a string that may contain all of them it admits every escape, so that `[^"]` and `[^\\\\]` would match
quotation marks and backslashes.
"""
WRITABLE = f"[^{_UNWRITABLE}]"
"""Any character of a string."""
_WRITABLE = f"&&{WRITABLE}"


def others(members: str) -> str:
    """Return the class of all characters except `members`, in Rust's syntax."""
    return f"[^{members}{_UNWRITABLE}]"


_QUANTIFIER = re.compile(r"(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})\??")
_GROUP = re.compile(r"\((?!\?)|\(\?(?:[is]*:|P?<[A-Za-z_]\w*>)")
_FLAGS = re.compile(r"\(\?[is]+\)")
"""Flags of a whole pattern, in Python only."""
_LETTER_ESCAPE = re.compile(
    r"\\(?:[dDwWsSbBtnrfv]|0(?![0-9])|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}"
    r"|[pP]\{(?:[CLMNPSZ][a-z]?|(?:Script|sc|General_Category|gc)=[A-Z]\w*|Letter|Number|Alphabetic|Uppercase|Lowercase)\})"
)
"""Escapes that begin with a letter or a digit and mean the same in Rust as in the dialects that have them."""


def translated(pattern: str, either: bool = False) -> str:
    """Return a pattern in Rust's syntax for the strings that it matches in both dialects, or in `either` dialect. Raise
    ValueError for syntax in which the dialects differ, and for a pattern that ends within an escape or a class.
    """
    return "".join(_pieces(pattern, either))


def before_a_newline(pattern: str) -> str | None:
    """Return the pattern of strings with a final newline that only Python matches, since its `$` ignores the newline.
    Return None if the dialects differ in other strings too.
    """
    both = translated(pattern)
    return f"{both[:-1]}\\n$" if translated(pattern, either=True) == both[:-1] + _END_OF_EITHER else None


def apart(one: str, other: str) -> bool:
    """Return whether it is certain that no string matches both patterns, even in different dialects."""
    from llguidance import LLMatcher

    try:
        both = [{"pattern": translated(pattern, either=True)} for pattern in (one, other)]
    except ValueError:
        return False
    grammar = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "allOf": both}))
    return "Regex is empty" in LLMatcher.validate_grammar(grammar)


def whole(pattern: str) -> str:
    """Return a pattern of whole strings in Rust's syntax, without anchors at its ends."""
    return _without_anchors(translated(pattern))


def _without_anchors(text: str) -> str:
    start, end = text.startswith("^"), _ends(text)
    return text if (start or end) and alternatives(text) else text[start : len(text) - end]


def _ends(text: str) -> bool:
    """Return whether the last character of a pattern is the end anchor."""
    before = text[:-1]
    return text.endswith("$") and (len(before) - len(before.rstrip("\\"))) % 2 == 0


def searched(pattern: str) -> str:
    """Return a pattern of the whole strings in which a pattern in Rust's syntax is found."""
    if alternatives(pattern):
        return f"(?s:.*)(?:{pattern})(?s:.*)" if not set(pattern) & {"^", "$"} else pattern
    inner = _without_anchors(pattern)
    start = "" if pattern.startswith("^") else "(?s:.*)"
    end = "" if _ends(pattern) else "(?s:.*)"
    return f"{start}(?:{inner}){end}"


def excluding(texts: Sequence[str], beginnings: Sequence[str] = ()) -> str | None:
    """Return a pattern in Rust's syntax of all strings except `texts` and strings that begin with one of `beginnings`;
    None if the pattern would be too long.
    """
    words = [*texts, *beginnings]
    begun = dict.fromkeys(word[:end] for word in words for end in range(len(word) + 1)) or {"": None}
    if len(begun) > _MAX_BEGINNINGS:
        return None
    options = []
    for start in begun:
        if start.startswith(tuple(beginnings)):
            continue
        further = {word[len(start)] for word in words if word.startswith(start) and word != start}
        options.append(f"{_literal(start)}[^{''.join(map(_literal, sorted(further)))}{_UNWRITABLE}]{WRITABLE}*")
        options += [] if start in texts else [_literal(start)]
    return f"^(?:{'|'.join(options)})$"


_MAX_BEGINNINGS = 300
"""Maximum prefixes of excluded strings: the pattern has an alternative for each."""


def _literal(text: str) -> str:
    return "".join(f"\\u{{{ord(character):x}}}" for character in text)


def _pieces(pattern: str, either: bool) -> Iterator[str]:
    if any("\ud800" <= character <= "\udfff" for character in pattern):
        raise ValueError("lone surrogates are not characters")
    flags = _FLAGS.match(pattern)
    position = flags.end() if flags else 0
    yield pattern[:position]
    repeatable = False
    while position < len(pattern):
        character, quantifier = pattern[position], _QUANTIFIER.match(pattern, position)
        if quantifier is not None:
            if not repeatable:
                raise ValueError(f"{shown(quantifier[0])} has nothing before it to repeat")
            piece, position = quantifier[0], quantifier.end()
        elif character == "\\":
            piece, position = _escape(pattern, position, either)
        elif character == "[":
            piece, position = _class(pattern, position, either)
        elif character == "(":
            group = _GROUP.match(pattern, position)
            if group is None:
                raise ValueError(f"{shown(pattern[position : position + 4])} begins an unsupported group")
            piece, position = group[0], group.end()
        elif character == "{":
            raise ValueError(f"{shown(pattern[position : position + 4])} is not a repetition; write \\{{ for a brace")
        else:
            piece, position = (_EITHER if either else _BOTH).get(character, character), position + 1
            if not character.isprintable() and character.isascii():
                piece = f"[{character}{_WRITABLE}]"
        repeatable = quantifier is None and not piece.startswith("(") and piece not in _NEVER_REPEATED
        yield piece


_ANY, _END_OF_EITHER = r"[\s\S]", r"\n?$"
_NEVER_REPEATED = ("|", "^", "$", _END_OF_EITHER, r"\b", r"\B")
_BOTH = {".": rf"[^{_NEWLINES}]"}
_EITHER = {".": _ANY, "$": _END_OF_EITHER}
"""Rust's form of characters with a different meaning in Rust."""


def _escape(pattern: str, position: int, widest: bool, in_class: bool = False) -> tuple[str, int]:
    """Return the translated escape at a position, and the position after it; `widest`: for either dialect."""
    if position + 1 == len(pattern):
        raise ValueError("the pattern ends with a backslash")
    letter = pattern[position + 1]
    if letter.lower() in _CLASSES:
        both, either = _CLASSES[letter.lower()]
        if letter.islower():
            members = either if widest else both
            return (members if in_class else f"[{members}]"), position + 2
        return f"[^{both if widest else either}{_UNWRITABLE}]", position + 2
    if letter == "b" and in_class:
        return r"\x08", position + 2
    if letter.isascii() and letter.isalnum():
        escape = _LETTER_ESCAPE.match(pattern, position)
        if escape is None:
            raise ValueError(f"{shown(pattern[position : position + 2])} is not an escape in both Python and ECMA-262")
        text = r"\x00" if letter == "0" else escape[0]
        return (text if in_class or letter not in "xuv0" else f"[{text}{_WRITABLE}]"), escape.end()
    if letter.isspace() or letter in "<>" or not letter.isascii():
        return letter, position + 2
    return pattern[position : position + 2], position + 2


_CLASS_IN_A_RANGE = re.compile(r"\\[dDwWsSpP](?:\{\w+\})?-[^\]]|-\\[dDwWsSpP]")


def _class(pattern: str, position: int, either: bool) -> tuple[str, int]:
    """Return the translated character class at a position, and the position after it."""
    negated = pattern[position + 1 : position + 2] == "^"
    pieces, position = ["[^" if negated else "["], position + 1 + negated
    if pattern[position : position + 1] == "]":
        raise ValueError("a class that begins with ] contains ] in Python and is empty in ECMA-262")
    first = True
    while position < len(pattern):
        character = pattern[position]
        if _CLASS_IN_A_RANGE.match(pattern, position) and not (first and character == "-"):
            raise ValueError("a range in a character class begins or ends with a class")
        if character == "]":
            return f"{''.join(pieces)}{_UNWRITABLE if negated else _WRITABLE}]", position + 1
        if character == "\\":
            piece, position = _escape(pattern, position, negated != either, in_class=True)
            pieces.append(piece)
        elif character == "-" and not first and pattern[position + 1 : position + 2] == "-":
            pieces.append(r"-\-")  # a range that ends with a hyphen
            position += 2
        else:
            literal = character in "[&~" or (first and character == "-") or pattern[position : position + 2] == "-]"
            pieces.append("\\" * literal + character)
            position += 1
        first = False
    raise ValueError("a character class is not closed")


def alternatives(pattern: str) -> bool:
    """Return whether a translated pattern has alternatives outside groups."""
    depth = position = 0
    in_class = 0
    while position < len(pattern):
        character = pattern[position]
        if character == "\\":
            position += 1
        elif character == "[":
            in_class += 1
        elif character == "]":
            in_class -= 1
        elif not in_class:
            depth += (character == "(") - (character == ")")
            if character == "|" and not depth:
                return True
        position += 1
    return False


def group_end(pattern: str, position: int) -> int:
    """Return the position after the group that begins at `position`; raise ValueError if the group is not closed."""
    depth, in_class = 0, False
    while position < len(pattern):
        character = pattern[position]
        if character == "\\":
            position += 1
        elif in_class or character == "[":
            in_class = character != "]"
        else:
            depth += (character == "(") - (character == ")")
            if not depth:
                return position + 1
        position += 1
    raise ValueError("a group is not closed")
