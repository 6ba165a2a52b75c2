"""What the library can tell a user, read from its source: errors, warnings and notes, with `…` for what is filled in.

A message is what is raised, logged or noted as a text, and every text that begins with `expected`, wherever it stands:
reasons are made in one place and raised in another.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "token_recycling"
_SAYS = {"warning", "info", "error", "exception", "note", "say_once"}
_VARIABLES = {"message", "reason"}
"""Names that hold what is raised or logged behind them."""
_INTERNAL = {"AssertionError", "AttributeError", "NotImplementedError", "Exit"}
"""Errors in a program's own code, and the end of a command."""


@cache
def messages() -> dict[str, str]:
    """All messages, each with the place where it is made; what stands before the first colon of a file is left out."""
    found: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for text, line in _of_file(ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault(text, f"{path.relative_to(PACKAGE).as_posix()}:{line}")
    return found


def _of_file(tree: ast.Module) -> Iterator[tuple[str, int]]:
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    passed_on: set[int] = set()
    for node in ast.walk(tree):
        call = node.exc if isinstance(node, ast.Raise) else node
        if isinstance(call, ast.Call) and (isinstance(node, ast.Raise) or _name(call) in _SAYS):
            if _name(call) in _INTERNAL:
                passed_on |= {id(part) for part in ast.walk(call)}
            else:
                said = [branch for each in call.args for branch in _branches(each)]
                passed_on |= {id(each) for each in said}
                yield from ((text, node.lineno) for each in said if " " in (text := _text(each)))
        elif isinstance(node, ast.Assign) and any(getattr(to, "id", "") in _VARIABLES for to in node.targets):
            yield from ((text, node.lineno) for each in _branches(node.value) if " " in (text := _text(each)))
    for node in ast.walk(tree):
        if id(node) not in parts | passed_on and re.match(r"(\S+: )?expected ", text := _text(node)):
            yield text, node.lineno


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _branches(node: ast.expr) -> list[ast.expr]:
    return [node.body, node.orelse] if isinstance(node, ast.IfExp) else [node]


def _text(node: ast.AST) -> str:
    """A text with `…` where something is filled in; empty for what is none."""
    if isinstance(node, ast.JoinedStr):
        found = "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    else:
        found = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
    return re.sub(r"^(…: )+", "", re.sub(r"%[sd]", "…", found))
