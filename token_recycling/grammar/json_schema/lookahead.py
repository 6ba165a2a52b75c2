"""Expresses look-ahead at the beginning of a pattern by additional patterns that the string must match.

`^(?=.*[A-Z])(?!-).{8,}$` becomes three patterns: `^.*[A-Z]`, a pattern of strings that do not begin with a hyphen, and
`^.{8,}$`. llguidance has neither look-ahead nor complements, but can enforce several patterns on a string. `(?!...)`
may forbid a character at the beginning (`(?!\\d)`), words there (`(?!tmp|test$)`), strings of certain characters only
(`(?!\\s*$)`), a character at the end (`(?!.*-$)`), or one character anywhere or two in a row (`(?!.*\\.\\.)`).
"""

from __future__ import annotations

import re

from .json_values import shown
from .patterns import WRITABLE, alternatives, excluding, group_end, translated

_SET = r"(?:\\[dDwWsS]|\\[^\w\s]|\[(?:\\.|[^\]\\])+\]|[^\\^$.|?*+()\[\]{}])"
"""Regular expression of a literal character, an escape or a class."""
_MAX_PATTERNS = 16
"""Maximum look-aheads of a pattern: llguidance tracks each as a pattern."""
_LITERAL = r"(?:\\[^\w\s]|[^\\^$.|?*+()\[\]{}])"
_POSITIVE = rf"(?!\[\^){_SET}"
_NEWLINE = r"\n"
"""In Python, `$` also matches before a final newline."""
_BEGINS, _IS_ONLY = re.compile(f"({_SET})"), re.compile(rf"({_POSITIVE})([*+])\$")
_HAS, _ENDS = re.compile(rf"\.\*({_SET})"), re.compile(rf"\.\*({_POSITIVE})\$")
_HAS_TWO = re.compile(rf"\.\*({_SET})({_SET})")
_ESCAPE_OR_CLASS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]")
_WORD, _GROUP = re.compile(f"{_LITERAL}+"), re.compile(r"\((?:\?:)?([^()]*)\)(\$?)")


def conjuncts(pattern: str) -> list[str]:
    """Return patterns in Rust's syntax; a string that matches all of them matches `pattern` in both dialects. Negative
    look-ahead excludes some further strings with line ends. Raise ValueError for unsupported syntax.
    """
    patterns, position = list[str](), 1
    while pattern.startswith("^") and pattern.startswith(("(?=", "(?!"), position):
        end = group_end(pattern, position)
        inner = pattern[position + 3 : end - 1].removeprefix("^")
        patterns.append(translated(f"^(?:{inner})") if pattern[position + 2] == "=" else _without(inner))
        position = end
        if len(patterns) > _MAX_PATTERNS:
            raise ValueError(f"more than {_MAX_PATTERNS} look-aheads are not supported")
    rest = translated(f"^{pattern[position:]}" if patterns else pattern)
    if patterns and alternatives(rest):
        raise ValueError("look-ahead applies only to the first alternative; put the alternatives into a group")
    return [rest, *patterns]


def nowhere(pattern: str) -> list[str]:
    """Return patterns in Rust's syntax; a string that matches all of them matches `pattern` in neither dialect. Raise
    ValueError if they cannot be expressed.
    """
    return [_without(one[1:] if one.startswith("^") else f".*{one}") for one in _alternatives(pattern)]


def _alternatives(pattern: str) -> list[str]:
    """Return the alternatives of a pattern outside groups."""
    parts, start, position = list[str](), 0, 0
    while position < len(pattern):
        if skipped := _ESCAPE_OR_CLASS.match(pattern, position):
            position = skipped.end()
        elif pattern[position] == "(":
            position = group_end(pattern, position)
        else:
            position += 1
            if pattern[position - 1] == "|":
                parts.append(pattern[start : position - 1])
                start = position
    return [*parts, pattern[start:]]


def _without(pattern: str) -> str:
    """Return the pattern of strings that do not begin with a match of `pattern`."""
    if match := _BEGINS.fullmatch(pattern):
        return f"^(?:{_other(match[1])}{WRITABLE}*)?$"
    if match := _IS_ONLY.fullmatch(pattern):
        other = _other(match[1], _NEWLINE)
        return other if match[2] == "*" else f"^(?:{WRITABLE}*{other}{WRITABLE}*)?$"
    if match := _ENDS.fullmatch(pattern):
        return rf"^(?:{WRITABLE}*{_other(match[1], _NEWLINE)})?$"
    if match := _HAS.fullmatch(pattern):
        return f"^{_other(match[1])}*$"
    if match := _HAS_TWO.fullmatch(pattern):
        one, two = match.groups()
        if one == two:
            here = translated(one, either=True)
            return f"^(?:(?:{here})?{_other(one)})*(?:{here})?$"
        if re.fullmatch(_LITERAL, one) and re.fullmatch(_LITERAL, two):
            return f"^(?:{_other(one)}|{translated(one)}+{_other(one, two)})*{translated(one)}*$"
    words = _words(pattern)
    excluded = None if words is None else excluding(*words)
    if excluded is None:
        look_ahead = shown(f"(?!{pattern})")
        raise ValueError(f"{look_ahead} is not supported; use single characters, two in a row, or words")
    return excluded


def _other(*sets: str) -> str:
    """Return the class of the characters that are in none of the sets, in either dialect."""
    if len(sets) == 1 and sets[0].startswith("["):
        return translated(f"[{sets[0][2:]}" if sets[0].startswith("[^") else f"[^{sets[0][1:]}")
    members = (
        one[1:-1] if one.startswith("[") else one if len(one) > 1 or one.isalnum() else f"\\{one}" for one in sets
    )
    return translated(f"[^{''.join(members)}]")


def _words(pattern: str) -> tuple[list[str], list[str]] | None:
    """Return the whole strings and the prefixes that a pattern of words matches; None for other patterns."""
    group = _GROUP.fullmatch(pattern)
    options, end = group.groups() if group else (pattern, "")
    texts, beginnings = list[str](), list[str]()
    for option in options.split("|"):
        word = option.removesuffix("$")
        if not _WORD.fullmatch(word):
            return None
        text = re.sub(r"\\(.)", r"\1", word)
        if end or word != option:
            texts += [text, text + "\n"]
        else:
            beginnings.append(text)
    return texts, beginnings
