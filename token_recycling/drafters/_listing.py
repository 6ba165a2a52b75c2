"""The drafters with their options, as plain values.

All information about a drafter comes from its class: the fields of the dataclass and the docstrings below them.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from .._util.options import is_required, kinds_of, options_of
from ._base import Drafter
from ._registry import check_name, drafter_class, drafter_names


def drafters(names: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return name, summary and options of the named drafters, or of all. A drafter that cannot be imported has the
    reason as its summary. Raises ValueError for an unknown name.
    """
    entries = []
    for name in names or ():
        check_name(name)
    for name in names or drafter_names():
        try:
            entries.append(drafter(name, drafter_class(name)))
        except Exception as error:  # a dependency is missing; drafters of other packages can fail in any way
            entries.append({"name": name, "summary": f"not available: {error}", "options": []})
    return entries


def drafter(name: str, made_by: type[Drafter]) -> dict[str, Any]:
    """Return the entry of one drafter; `made_by` is its class."""
    hints, docs = typing.get_type_hints(made_by), field_docs(made_by)
    options = [
        {"name": option, "type": spelled(hints[option]), "default": _default(field), "summary": docs.get(option, "")}
        for option, field in options_of(made_by).items()
    ]
    return {"name": name, "summary": _summary(inspect.getdoc(made_by) or ""), "options": options}


def field_docs(made_by: type) -> dict[str, str]:
    """Return the first paragraph of the docstring below each field of a class, as one line; inherited fields too."""
    docs = {}
    for base in reversed(made_by.__mro__[:-1]):
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError):  # a class without a source file, or of the interpreter
            continue
        for pair in pairwise(tree.body if isinstance(tree, ast.ClassDef) else []):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = _summary(text)
    return docs


def spelled(hint: Any) -> str:
    """Return a type as users write its values: the words of a Literal, else the names of the types."""
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(map(str, typing.get_args(hint)))
    every = kinds_of(hint)
    if len(every) > 1:
        kinds = [kind for kind in every if kind in (str, int, float, bool) or typing.get_origin(kind)]
        return " | ".join(map(spelled, kinds or every))
    return getattr(hint, "__name__", str(hint))


def _default(field: dataclasses.Field[Any]) -> str:
    if is_required(field):
        return "required"
    return str(field.default if field.default_factory is dataclasses.MISSING else field.default_factory())


def _summary(doc: str) -> str:
    return " ".join(inspect.cleandoc(doc).partition("\n\n")[0].split())
