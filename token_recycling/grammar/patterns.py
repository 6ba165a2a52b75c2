"""Regular expressions of JSON Schema (ECMA-262, or Python's `re`) in the syntax of Rust, which llguidance reads.

The dialects differ: a class of Rust has set operations (`[a&&b]`) and nested classes, `\\w` of Python knows all
letters, `.` of ECMA-262 excludes more line ends. A translated pattern matches strings that both `re.search` and
ECMA-262 match, or, of names that others must not have, either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_SPACE = r"\t\n\x0B\x0C\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""White space of both dialects."""
_ANY_SPACE = _SPACE + r"\u0085\ufeff\x1c-\x1f"
"""White space of either."""
_WORD, _ANY_WORD = r"0-9A-Za-z_", r"\p{L}\p{N}\p{M}\p{Pc}"
_DIGIT, _ANY_DIGIT = r"0-9", r"\p{Nd}"
_CLASSES = {
    "w": (_WORD, _ANY_WORD),
    "d": (_DIGIT, _ANY_DIGIT),
    "s": (_SPACE, _ANY_SPACE),
}
"""For each escape of a class: the characters that are in it in both dialects, and those that are in it in either."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]|\\[acev0]|\\[xu]\{?0*(?:[01][0-9a-fA-F]|[0-9a-fA-F]|7[fF])(?![0-9a-fA-F])")
WRITABLE = r"^[^\x00-\x07\x0B\x0E-\x1f\x7f]*$"
"""A pattern in Rust's syntax of all strings without control characters that have no short escape in JSON."""
_NEWLINES = r"\n\r\u2028\u2029"
_NEVER_WRITTEN = r"\x01"
"""A control character that is left out of classes. In a string that may hold all of them, llguidance 1.9.1 admits every
escape, so that quotation marks and backslashes are strings of `[^"]` and `[^\\\\]`.
"""


def translated(pattern: str, either: bool = False) -> str:
    """Return a pattern in Rust's syntax, of the strings that it matches in both dialects, or in `either`. What Rust
    cannot express, such as look-ahead, is passed on and refused there. Raise ValueError for a pattern that ends within
    an escape or a class.
    """
    return "".join(_pieces(pattern, either))


def may_name_control_characters(pattern: str) -> bool:
    """Whether a pattern may name control characters. Where those cannot be written, llguidance 1.9.1 skips them."""
    return _CONTROL.search(pattern) is not None


def whole(pattern: str) -> str:
    """Return a pattern that matches whole strings in Rust's syntax, without the anchors at its ends."""
    return _without_anchors(translated(pattern))


def _without_anchors(text: str) -> str:
    start, end = text.startswith("^"), _ends(text)
    return text if (start or end) and _alternatives(text) else text[start : len(text) - end]


def _ends(text: str) -> bool:
    """Whether the last character of a pattern is the anchor of the end."""
    before = text[:-1]
    return text.endswith("$") and (len(before) - len(before.rstrip("\\"))) % 2 == 0


def searched(pattern: str) -> str:
    """Return a pattern of whole strings in which a pattern in Rust's syntax is found."""
    if _alternatives(pattern):
        return f"(?s:.*)(?:{pattern})(?s:.*)" if not set(pattern) & {"^", "$"} else pattern
    inner = _without_anchors(pattern)
    start = "" if pattern.startswith("^") else "(?s:.*)"
    end = "" if _ends(pattern) else "(?s:.*)"
    return f"{start}(?:{inner}){end}"


def _pieces(pattern: str, either: bool) -> Iterator[str]:
    position = 0
    while position < len(pattern):
        character = pattern[position]
        if character == "\\":
            piece, position = _escape(pattern, position, either)
            yield piece
        elif character == "[":
            piece, position = _class(pattern, position, either)
            yield piece
        else:
            any_character = r"[^\n]" if either else rf"[^{_NEWLINES}]"
            yield any_character if character == "." else character
            position += 1


def _escape(pattern: str, position: int, widest: bool, in_class: bool = False) -> tuple[str, int]:
    """Return the escape at a position, and the position after it; `widest`: of the characters in either dialect."""
    if position + 1 == len(pattern):
        raise ValueError("the pattern ends with a backslash")
    letter = pattern[position + 1]
    if letter.lower() in _CLASSES:
        both, either = _CLASSES[letter.lower()]
        if letter.islower():
            members = either if widest else both
            return (members if in_class else f"[{members}]"), position + 2
        return f"[^{both if widest else either}{_NEVER_WRITTEN}]", position + 2
    if letter == "b" and in_class:
        return r"\x08", position + 2
    if not letter.isalnum() and (letter.isspace() or letter in "<>" or not letter.isascii()):
        return letter, position + 2
    return pattern[position : position + 2], position + 2


def _class(pattern: str, position: int, either: bool) -> tuple[str, int]:
    """Return the class of characters at a position, and the position after it."""
    negated = pattern[position + 1 : position + 2] == "^"
    pieces, position = ["[^" if negated else "["], position + 1 + negated
    first = True
    while position < len(pattern):
        character = pattern[position]
        if character == "]" and not first:
            members = "".join(pieces)
            if negated:
                members += _NEVER_WRITTEN
            elif may_name_control_characters(members):
                members += f"&&[^{_NEVER_WRITTEN}]"
            return f"{members}]", position + 1
        if character == "\\":
            piece, position = _escape(pattern, position, negated != either, in_class=True)
            pieces.append(piece)
        elif character == "-" and not first and pattern[position + 1 : position + 2] == "-":
            pieces.append(r"-\-")  # a range that ends with a hyphen
            position += 2
        else:
            literal = character in "[&~" or (first and character in "]-") or pattern[position : position + 2] == "-]"
            pieces.append("\\" * literal + character)
            position += 1
        first = False
    raise ValueError("a class of characters has no end")


def _alternatives(pattern: str) -> bool:
    """Whether a translated pattern has alternatives outside of groups."""
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
