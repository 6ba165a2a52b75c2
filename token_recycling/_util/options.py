"""Options as users write them: the public fields of a dataclass, from `NAME=VALUE,...` or from a mapping.

The common parser for drafters, engines and the server. Types are the annotations of the fields; bounds are declared
with `option`, or checked by the dataclass itself. Errors name the accepted values, the given value and the available
options. Standard library only: shell completion lists the names of drafters.
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
"""Values of an option that is `auto`, `on` or `off`."""


def option(default: Any, help: str, min: float | None = None, **shown: Any) -> Any:
    """Return a dataclass field that is also a command option; `min` is its minimum, `shown` controls its help."""
    return dataclasses.field(default=default, metadata={"help": help, "min": min, **shown})


def options_of(kind: type) -> dict[str, dataclasses.Field[Any]]:
    """Return the options of a class: its public dataclass fields by name."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return {field.name: field for field in fields if field.init and not field.name.startswith("_")}


def is_required(option: dataclasses.Field[Any]) -> bool:
    """Return whether an option has no default."""
    return option.default is dataclasses.MISSING and option.default_factory is dataclasses.MISSING


def read_options(
    kind: type, owner: str, written: Mapping[str, str] | None = None, given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return arguments for the dataclass `kind`, from texts and from Python values; a value takes precedence over a
    text.

    `owner` names their owner in errors. Raises ValueError for an unknown option, a missing required one or an invalid
    text, and TypeError for a value of another type.
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
    """Raise ValueError for the first unknown name."""
    for name in names:
        if name not in known:
            raise ValueError(f"{owner} has no option {name!r}; its options: {', '.join(known) or 'none'}")


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the single type."""
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def described(hint: Any) -> str:
    """Return a description of the accepted values, for an error."""
    return " or ".join(
        " or ".join(map(str, words)) if (words := _words(kind)) else _WORDS.get(kind, getattr(kind, "__name__", ""))
        for kind in kinds_of(hint)
    )


def from_text(owner: str, name: str, text: str, hint: Any) -> Any:
    """Return an option's text as the first type of its annotation that accepts it; raises ValueError."""
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
    """Return whether a value is of a type; the dataclass itself checks which words and numbers are valid."""
    if kind in (int, float):
        wanted = numbers.Integral if kind is int else numbers.Real
        return isinstance(value, wanted) and not isinstance(value, bool)
    if kind in (bool, str):
        return isinstance(value, kind)
    if words := _words(kind):
        return isinstance(value, tuple(set(map(type, words))))
    # A model may be wrapped, a tokenizer custom: the drafter itself checks values of all other types.
    return not isinstance(value, (numbers.Number, str))


def check_at_least(least: float, options: Any, *names: str) -> None:
    """Raise ValueError for the first of these options whose value is below `least`; None is always valid."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not value >= least:
            raise ValueError(f"{name} must be >= {least}, got {value}")


def check_declared(options: Any) -> None:
    """Raise ValueError for the first option below the `min` or above the `max` that its field declares."""
    for field in dataclasses.fields(options):
        value, most = getattr(options, field.name), field.metadata.get("max")
        if field.metadata.get("min") is not None:
            check_at_least(field.metadata["min"], options, field.name)
        if most is not None and value is not None and value > most:
            raise ValueError(f"{field.name} must be <= {most:g}, got {value}")


def split_outside(text: str, sign: str) -> list[str]:
    """Return the pieces of `text` between the occurrences of `sign`, one character, outside parentheses; raises
    ValueError for unbalanced parentheses.
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
        raise ValueError(f"unbalanced parentheses in {text!r}")
    return pieces


def written_options(name: str, text: str, unnamed: str = "", known: Iterable[str] = ()) -> dict[str, str]:
    """Return the options written after `name`, as text; raises ValueError.

    `unnamed` is the option whose name may be omitted, empty if there is none; errors list `known`.
    """
    written: dict[str, str] = {}
    for piece in filter(None, split_outside(text, ",")):
        option, *values = split_outside(piece, "=")
        if values and not option.isidentifier():
            raise ValueError(
                f"options of {name!r} must be NAME=VALUE, got {piece!r}; put options of its parts in parentheses"
            )
        if not values and unnamed and unnamed not in written:
            option, values = unnamed, [piece]
        if not values:
            of = f" with a name among {', '.join(known)}" if known else ""
            raise ValueError(f"options after {name!r} must be NAME=VALUE{of}, got {piece!r}")
        if option in written:
            raise ValueError(f"options of {name} must be unique, got {option} twice")
        written[option] = "=".join(values)
    return written


def name_and_options(text: str) -> tuple[str, str]:
    """Return the name and the options of `NAME` or `NAME(OPTIONS)`; raises ValueError."""
    found = re.fullmatch(r"([^():,=]+)(?:\((.*)\))?", text.strip(), re.DOTALL)
    if found is None:
        raise ValueError(f"a name must be NAME or NAME(OPTION=VALUE,...), got {text!r}")
    return found[1], found[2] or ""
