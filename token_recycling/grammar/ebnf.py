"""Converts llama.cpp's GBNF and xgrammar's EBNF (`root ::= ...`) to llguidance's Lark grammars.

llguidance matches terminals greedily, like Lark: for `"a" "b" "c" | "ab"` it would match `ab` and never `abc`. In GBNF,
every alternative counts. So a grammar without recursion becomes one terminal (a regular expression), and a recursive
grammar becomes rules over single characters.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)
    |(?P<literal>"(?:[^"\\]|\\.)*")
    |(?P<class>\[\^?(?:\\.|[^\]\\])*\])
    |(?P<define>::=)
    |(?P<count>\{\s*\d*\s*(?:,\s*\d*\s*)?\})
    |(?P<name>[A-Za-z_][\w-]*)
    |(?P<sign>[|()*+?.])""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x(..)|u(....)|U(........)|(.))", re.DOTALL)
_CONTROL = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "0": "\0"}
_MAX_DEPTH = 100
"""Maximum nesting depth of groups."""
_LARK = re.compile(r"(?m)^\s*(?:%llguidance\b|start\s*(?:\[[^\]]*\]\s*)?:(?!:))")


def lark(grammar: str, prefix: str = "") -> str:
    """Return a Lark grammar (with `start`) or GBNF grammar (with `root`) as Lark. Names of converted rules begin with
    `prefix`, in lower or upper case. Raise ValueError.
    """
    if _LARK.search(grammar):
        if prefix:
            raise ValueError("a Lark grammar cannot be combined with tools; write it as GBNF, with `root`")
        return "%llguidance {}\n" + grammar
    rules = _Parser(grammar).rules()
    if "root" not in rules:
        raise ValueError("a grammar needs a rule `root ::= ...` (GBNF, EBNF) or `start: ...` (Lark)")
    recursive = _recursive(rules)
    names = {
        name: f"{prefix}rule_{number}" if recursive else f"{prefix}rule_{number}".upper()
        for number, name in enumerate(rules)
    }
    lines = [f"{prefix}start: {names['root']}"]
    lines += [f"{names[name]}: {body.shown(names, recursive)}" for name, body in rules.items()]
    return "\n".join(lines)


@dataclass
class _Expression:
    """Alternatives, each a sequence of items with their repetition suffixes."""

    alternatives: list[list[tuple[_Item, str]]] = field(default_factory=lambda: [[]])

    def shown(self, names: dict[str, str], by_character: bool) -> str:
        return " | ".join(
            " ".join(item.shown(names, by_character) + suffix for item, suffix in sequence) or '""'
            for sequence in self.alternatives
        )

    def names(self) -> list[str]:
        names = []
        for sequence in self.alternatives:
            for item, _ in sequence:
                if isinstance(item.content, _Expression):
                    names += item.content.names()
                elif item.kind == "name":
                    names.append(item.content)
        return names


@dataclass
class _Item:
    """A string, a character class as a regular expression, the name of a rule, or a group."""

    kind: str
    content: str | _Expression

    def shown(self, names: dict[str, str], by_character: bool) -> str:
        if isinstance(self.content, _Expression):
            return f"({self.content.shown(names, by_character)})"
        if self.kind == "name":
            return names[self.content]
        if self.kind == "class":
            return f"/{self.content}/"
        if by_character and len(self.content) != 1:
            return f"({' '.join(map(_string, self.content))})" if self.content else '""'
        return _string(self.content)


class _Parser:
    """Parses rules token by token."""

    def __init__(self, grammar: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        position = 0
        while position < len(grammar):
            match = _TOKEN.match(grammar, position)
            if match is None:
                raise ValueError(f"the grammar cannot be parsed at {grammar[position : position + 30]!r}")
            position, kind = match.end(), str(match.lastgroup)
            if kind != "space":
                self._tokens.append((kind, match[0]))
        self._next, self._depth = 0, 0

    def rules(self) -> dict[str, _Expression]:
        rules: dict[str, _Expression] = {}
        while self._next < len(self._tokens):
            if not self._at_rule():
                raise ValueError(f"no rule `name ::= ...` begins at {self._tokens[self._next][1][:30]!r}")
            name = self._tokens[self._next][1]
            self._next += 2
            if name in rules:
                raise ValueError(f"the rule {name} is defined twice")
            rules[name] = self._expression()
        for name, body in rules.items():
            for used in body.names():
                if used not in rules:
                    raise ValueError(f"the rule {name} refers to {used}, which is not defined")
        return rules

    def _at_rule(self) -> bool:
        kinds = [kind for kind, _ in self._tokens[self._next : self._next + 2]]
        return kinds == ["name", "define"]

    def _expression(self) -> _Expression:
        """Return the alternatives up to the next rule, or up to the end of the group."""
        expression = _Expression()
        while self._next < len(self._tokens) and not self._at_rule():
            kind, text = self._tokens[self._next]
            if text == ")" and kind == "sign":
                break
            self._next += 1
            if kind == "sign" and text == "|":
                expression.alternatives.append([])
            else:
                expression.alternatives[-1].append((self._item(kind, text), self._suffix()))
        return expression

    def _item(self, kind: str, text: str) -> _Item:
        if kind == "literal":
            return _Item(kind, _unescaped(text[1:-1]))
        if kind == "class":
            return _Item(kind, _class(text))
        if kind == "name":
            return _Item(kind, text)
        if text == ".":
            return _Item("class", "(?s:.)")
        if text != "(":
            raise ValueError(f"{text!r} has nothing before it to repeat")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError(f"groups are nested more than {_MAX_DEPTH} levels deep")
        group = self._expression()
        if self._next == len(self._tokens) or self._tokens[self._next][1] != ")":
            raise ValueError("a group is not closed")
        self._next += 1
        self._depth -= 1
        return _Item("group", group)

    def _suffix(self) -> str:
        if self._next == len(self._tokens):
            return ""
        kind, text = self._tokens[self._next]
        if kind != "count" and not (kind == "sign" and text in "*+?"):
            return ""
        self._next += 1
        return "".join(text.split())


def _recursive(rules: dict[str, _Expression]) -> bool:
    """Return whether a rule refers to itself, directly or indirectly."""
    done, open_ = set[str](), list[str]()
    left = [(name, False) for name in rules]
    while left:
        name, closing = left.pop()
        if closing:
            open_.pop()
            done.add(name)
        elif name not in done:
            open_.append(name)
            left.append((name, True))
            for used in rules[name].names():
                if used in open_:
                    return True
                left.append((used, False))
    return False


def _unescaped(text: str) -> str:
    def character(match: re.Match[str]) -> str:
        digits = match[1] or match[2] or match[3]
        if digits is None:
            return _CONTROL.get(match[4], match[4])
        try:
            return chr(int(digits, 16))
        except (ValueError, OverflowError):
            raise ValueError(f"{match[0]!r} is not a character") from None

    return _ESCAPE.sub(character, text)


def _class(text: str) -> str:
    """Return a character class as a regular expression with code points."""
    negated = text.startswith("[^")
    pieces = re.findall(r"\\x..|\\u....|\\U........|\\.|.", text[1 + negated : -1], re.DOTALL)
    if not pieces:
        raise ValueError(f"the character class {text} is empty")
    members = [
        "-" if piece == "-" and 0 < number < len(pieces) - 1 else rf"\u{{{ord(_unescaped(piece)):x}}}"
        for number, piece in enumerate(pieces)
    ]
    return f"[{'^' * negated}{''.join(members)}]"


def _string(text: str) -> str:
    return json.dumps(text)
