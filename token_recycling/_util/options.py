"""Options as users write them: the public fields of a dataclass, from `NAME=VALUE,...` or from a mapping.

The one reader for drafters, engines and the server. Types are the annotations of the fields, bounds are declared with
`option`, or checked by the dataclass itself. An error says what was expected, what came, and which options
there are. Standard library only: the names of drafters are completed in a shell.
"""

from __future__ import annotations

import dataclasses
import numbers
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
SWITCH: dict[str, bool | Literal["auto"]] = {"auto": "auto", "on": True, "off": False}
"""Values of an option `auto`, `on` or `off`."""


def option(default: Any, help: str, min: float | None = None, **shown: Any) -> Any:
    """A dataclass field that is an option of a command too; `min` is its least value, `shown` how help shows it."""
    return dataclasses.field(default=default, metadata={"help": help, "min": min, **shown})


def options_of(kind: type) -> dict[str, dataclasses.Field[Any]]:
    """The options of a class: its public dataclass fields by name."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return {field.name: field for field in fields if field.init and not field.name.startswith("_")}


def is_required(option: dataclasses.Field[Any]) -> bool:
    """Whether an option has no default."""
    return option.default is dataclasses.MISSING and option.default_factory is dataclasses.MISSING


def read_options(
    kind: type, owner: str, written: Mapping[str, str] | None = None, given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Arguments for the dataclass `kind`, from texts and from values of Python; a value counts before a text.

    `owner` says in errors whose options they are. Raises ValueError for an unknown option, a required one left out or a
    text that is no such value, and TypeError for a value of another type.
    """
    written, given, known = written or {}, given or {}, options_of(kind)
    check_known(owner, {**written, **given}, known)
    missing = [name for name in known if is_required(known[name]) and name not in {**written, **given}]
    if missing:
        listed = ",".join(f"{name}=VALUE" for name in missing)
        raise ValueError(f"{owner} needs {', '.join(missing)}, got none: write {owner}:{listed}")
    hints = typing.get_type_hints(kind) if known else {}
    for name, value in given.items():
        if not any(_is_of(value, one) for one in kinds_of(hints[name])):
            raise TypeError(
                f"option {name} of {owner} must be {described(hints[name])}, got {value!r} of type "
                f"{type(value).__name__}"
            )
    return {**{name: from_text(owner, name, text, hints[name]) for name, text in written.items()}, **given}


def check_known(owner: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise ValueError for the first name that is not known."""
    for name in names:
        if name not in known:
            raise ValueError(f"{owner} has no option {name!r}; its options: {', '.join(known) or 'none'}")


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def described(hint: Any) -> str:
    """What a user may give, for an error."""
    return " or ".join(
        " or ".join(map(str, words)) if (words := _words(kind)) else _WORDS.get(kind, getattr(kind, "__name__", ""))
        for kind in kinds_of(hint)
    )


def from_text(owner: str, name: str, text: str, hint: Any) -> Any:
    """A written option as the first type of its annotation that takes it; raises ValueError."""
    kinds = kinds_of(hint)
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if str in kinds:
        return text
    for word in (word for kind in kinds for word in _words(kind)):
        if str(word) == text:
            return word
    raise ValueError(f"option {name} of {owner} must be {described(hint)}, got {text!r}")


def _words(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value is of a type; which words and numbers are right, the dataclass checks itself."""
    if kind in (int, float):
        wanted = numbers.Integral if kind is int else numbers.Real
        return isinstance(value, wanted) and not isinstance(value, bool)
    if kind in (bool, str):
        return isinstance(value, kind)
    if words := _words(kind):
        return isinstance(value, tuple(set(map(type, words))))
    # A model may be wrapped, a tokenizer somebody's own: of anything else a drafter knows itself what it takes.
    return not isinstance(value, (numbers.Number, str))


def check_at_least(least: float, options: Any, *names: str) -> None:
    """Raises ValueError for the first of these options whose value is below `least`; None is any."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not value >= least:
            raise ValueError(f"{name} must be >= {least}, got {value}")


def check_declared(options: Any) -> None:
    """Raises ValueError for the first option that is below what its field declares as `min`, or above its `max`."""
    for field in dataclasses.fields(options):
        value, most = getattr(options, field.name), field.metadata.get("max")
        if field.metadata.get("min") is not None:
            check_at_least(field.metadata["min"], options, field.name)
        if most is not None and value is not None and value > most:
            raise ValueError(f"{field.name} must be <= {most:g}, got {value}")


def split_outside(text: str, sign: str) -> list[str]:
    """The pieces of `text` between the occurrences of `sign`, one character, outside parentheses; raises ValueError
    for parentheses without their other half.
    """
    pieces, open_at = [""], 0
    for character in text:
        open_at += (character == "(") - (character == ")")
        if open_at < 0:
            break
        if character == sign and not open_at:
            pieces.append("")
        else:
            pieces[-1] += character
    if open_at:
        raise ValueError(f"parentheses do not match in {text!r}")
    return pieces


def written_options(name: str, text: str, unnamed: str = "", known: Iterable[str] = ()) -> dict[str, str]:
    """The options written after `name`, as text; raises ValueError.

    `unnamed` is the option whose name may be left out, empty if there is none; `known` are named where one is wrong.
    """
    written: dict[str, str] = {}
    for piece in filter(None, split_outside(text, ",")):
        option, *values = split_outside(piece, "=")
        if values and not option.isidentifier():
            raise ValueError(
                f"options of {name!r} must be NAME=VALUE, got {piece!r}; options of a part of it are in parentheses"
            )
        if not values and unnamed and unnamed not in written:
            option, values = unnamed, [piece]
        if not values:
            of = f" with a name of {', '.join(known)}" if known else ""
            raise ValueError(f"options after {name!r} must be NAME=VALUE{of}, got {piece!r}")
        if option in written:
            raise ValueError(f"options of {name} may be given once, got {option} twice")
        written[option] = "=".join(values)
    return written


def name_and_options(text: str) -> tuple[str, str]:
    """The name and the options of `NAME` or `NAME(OPTIONS)`; raises ValueError."""
    found = re.fullmatch(r"([^():,=]+)(?:\((.*)\))?", text.strip(), re.DOTALL)
    if found is None:
        raise ValueError(f"a name must be NAME or NAME(OPTION=VALUE,...), got {text!r}")
    return found[1], found[2] or ""
