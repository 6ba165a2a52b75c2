"""Options of the package's own drafters, read from their source: a mistyped option is refused without importing torch.

What a dataclass declares is read: fields, defaults and annotations, inherited ones too. Annotations other than words,
numbers and strings are not checked here, but when the drafter is made.
"""

from __future__ import annotations

import ast
import functools
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .._util.options import check_known, from_text, kinds_of, written_options
from ._registry import drafter_names, own_names

_HERE = Path(__file__).parent
_KNOWN: dict[str, Any] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "None": type(None),
    "Literal": typing.Literal,
}


class Declared(NamedTuple):
    """An option as its drafter's source declares it."""

    hint: Any
    """None for other than words, numbers and strings."""
    required: bool


def check_spec(spec: str, what: str = "drafter", others: tuple[str, ...] = ()) -> None:
    """Raise ValueError for an unknown drafter or option, a missing required one, or a text that is no value of its
    type. `others`: further names to list.
    """
    name, _, text = spec.partition(":")
    if name not in drafter_names():
        known = ", ".join([*others, *drafter_names()])
        raise ValueError(f"unknown {what} {name!r}; known are {known}")
    if name not in own_names():  # of another package: checked when it is imported
        return
    options, unnamed = declared(name)
    written = written_options(name, text, unnamed, options)
    check_known(name, written, options)
    missing = [option for option, found in options.items() if found.required and option not in written]
    if missing:
        listed = ",".join(f"{option}=VALUE" for option in missing)
        raise ValueError(f"{name} requires {' and '.join(missing)}: {name}:{listed}")
    for option, value in written.items():
        if options[option].hint is not None:
            from_text(name, option, value, options[option].hint)


@functools.cache
def declared(name: str) -> tuple[dict[str, Declared], str]:
    """Return the options of one of the package's own drafters, and the one whose name may be omitted, if any."""
    path = _HERE / f"{name}.py"
    path = path if path.exists() else _HERE / name / "__init__.py"
    module = _Module(path)
    made_by = next(one for one in module.classes.values() if _is_drafter(module, one))
    fields: dict[str, Declared] = {}
    unnamed = ""
    for node in _fields(module, made_by):
        match node:
            case ast.AnnAssign(target=ast.Name("unnamed"), value=ast.Constant(str(value))):
                unnamed = value
            case ast.AnnAssign(target=ast.Name(field)) if _is_no_option(node):
                fields.pop(field, None)  # an inherited option that this class fixes
            case ast.AnnAssign(target=ast.Name(field)) if not field.startswith("_"):
                fields[field] = Declared(_hint(node.annotation), node.value is None)
    return fields, unnamed


class _Module:
    """The classes of a source file, and the modules of imported names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        body = ast.parse(path.read_text(encoding="utf-8")).body
        self.classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
        self._imports = {
            alias.name: (node.level, node.module or "")
            for node in body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    def found(self, name: str) -> tuple[_Module, ast.ClassDef] | None:
        """Return the class that a name stands for, if it is of this package."""
        if name in self.classes:
            return self, self.classes[name]
        level, module = self._imports.get(name, (0, ""))
        if not level:
            return None
        path = self.path.parents[level - 1].joinpath(*module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        return _Module(path).found(name)


def _bases(module: _Module, node: ast.ClassDef) -> Iterator[tuple[_Module, ast.ClassDef]]:
    for base in node.bases:
        named = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(named, ast.Name) and (found := module.found(named.id)) is not None:
            yield found


def _is_drafter(module: _Module, node: ast.ClassDef) -> bool:
    return any(base.name == "Drafter" or _is_drafter(where, base) for where, base in _bases(module, node))


def _fields(module: _Module, node: ast.ClassDef) -> Iterator[ast.stmt]:
    """Yield the declarations of a class and its bases, in the order of a dataclass's fields."""
    for where, base in reversed([*_bases(module, node)]):
        yield from _fields(where, base)
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        yield from node.body


def _is_no_option(node: ast.AnnAssign) -> bool:
    """Return whether a field is a class variable, or not an argument of `__init__`."""
    if "ClassVar" in ast.unparse(node.annotation):
        return True
    given = node.value.keywords if isinstance(node.value, ast.Call) else []
    return any(one.arg == "init" and isinstance(one.value, ast.Constant) and not one.value.value for one in given)


def _hint(annotation: ast.expr) -> Any:
    try:
        hint = eval(ast.unparse(annotation), {"__builtins__": {}}, _KNOWN)
    except (NameError, TypeError):  # names a class of its own
        return None
    simple = all(kind in _KNOWN.values() or typing.get_origin(kind) is typing.Literal for kind in kinds_of(hint))
    return hint if simple else None
