"""Drafters by name, and as a user writes them: `NAME:OPTION=VALUE,...`.

A drafter is a file or a folder in `token_recycling/drafters/` with one `Drafter` class in it. Its name is the drafter's
name, and the dataclass fields are its options, in Python and on the command line: `recycling:k=16,tree=paper`. Other
packages add theirs through the entry point group `token_recycling.drafters`.

Names are found without importing a drafter, so that a shell that completes them does not wait for torch.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import numbers
import pkgutil
import re
import types
import typing
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._base import Drafter

ENTRY_POINTS = "token_recycling.drafters"
"""The group in which other packages name theirs."""


def drafter_names() -> list[str]:
    """Names of all drafters, the package's own first."""
    ours = own_names()
    return ours + sorted({point.name for point in metadata.entry_points(group=ENTRY_POINTS)} - set(ours))


@functools.cache
def own_names() -> list[str]:
    """Names of the package's own drafters; modules whose name begins with an underscore are no drafters."""
    found = (module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return sorted(name for name in found if not name.startswith("_"))


def drafter_class(name: str) -> type[Drafter]:
    """The drafter class of that name; raises ValueError with all names."""
    from ._base import Drafter

    if name in own_names():
        module = importlib.import_module(f".{name}", __package__)
        (found,) = (
            value
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, Drafter) and value.__module__ == module.__name__
        )
    elif name in drafter_names():
        found = _of_another_package(name)
    else:
        raise ValueError(f"expected a drafter of {', '.join(drafter_names())}, got {name!r}")
    found.name = name
    return found


def _of_another_package(name: str) -> type[Drafter]:
    """The drafter class that an installed package names so; raises ValueError."""
    from ._base import Drafter

    points = metadata.entry_points(group=ENTRY_POINTS, name=name)
    got = " and ".join(point.value for point in points)
    loaded: list[Any] = []
    problem: Exception | None = None
    try:
        loaded = [point.load() for point in points]
    except Exception as error:  # somebody's package can be wrong in any way
        got, problem = f"{got} ({type(error).__name__}: {error})", error
    if len(loaded) != 1 or not isinstance(loaded[0], type) or not issubclass(loaded[0], Drafter):
        raise ValueError(
            f"expected one Drafter class behind the entry point {name!r} of {ENTRY_POINTS}, got {got}; "
            "correct or uninstall the package that names it"
        ) from problem
    return loaded[0]


def options_of(drafter: type[Drafter]) -> dict[str, dataclasses.Field[Any]]:
    """The options of a drafter class: its public dataclass fields by name."""
    if not dataclasses.is_dataclass(drafter):
        return {}
    return {field.name: field for field in dataclasses.fields(drafter) if field.init and not field.name.startswith("_")}


def is_required(option: dataclasses.Field[Any]) -> bool:
    """Whether an option has no default."""
    return option.default is dataclasses.MISSING and option.default_factory is dataclasses.MISSING


def make_drafter(spec: str | Drafter = "recycling", /, **options: Any) -> Drafter:
    """A drafter from its name and options, from a text such as `recycling:k=16,tree=paper`, or one that is made
    already.

    Raises ValueError or TypeError for an unknown drafter, an unknown option, a required one left out or a value of the
    wrong kind.
    """
    from ._base import Drafter

    if isinstance(spec, Drafter):
        if options:
            raise TypeError(
                f"expected options only with a drafter's name, got a made drafter and {', '.join(options)}; "
                "set them when making it"
            )
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"expected a drafter's name or a Drafter, got {type(spec).__name__}")
    name, _, text = spec.partition(":")
    found = drafter_class(name)
    known = options_of(found)
    written = written_options(name, text, found.unnamed)
    for option in {**written, **options}:
        if option not in known:
            raise ValueError(f"expected an option of {name}: {', '.join(known) or 'it has none'}; got {option!r}")
    missing = [option for option in known if is_required(known[option]) and option not in {**written, **options}]
    if missing:
        listed = ",".join(f"{option}=VALUE" for option in missing)
        raise ValueError(
            f"expected every required option of {name}, got none for {', '.join(missing)}: {name}:{listed}"
        )
    hints = typing.get_type_hints(found) if known else {}
    for option, value in options.items():
        _check_kind(name, option, value, hints[option])
    values = {option: _converted(name, option, value, hints[option]) for option, value in written.items()}
    return found(**{**values, **options})


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _listed(kinds: tuple[Any, ...]) -> str:
    return " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)


def _check_kind(name: str, option: str, value: Any, hint: Any) -> None:
    """Raises TypeError for a value that is of no type of the annotation; which words and numbers are right, a drafter
    checks itself.
    """
    kinds = _kinds(hint)
    if not any(_is_of(value, kind) for kind in kinds):
        raise TypeError(
            f"expected {_listed(kinds)} for option {option} of {name}, got {value!r} of type {type(value).__name__}"
        )


def _is_of(value: Any, kind: Any) -> bool:
    if kind in (int, float):
        wanted = numbers.Integral if kind is int else numbers.Real
        return isinstance(value, wanted) and not isinstance(value, bool)
    if kind in (bool, str):
        return isinstance(value, kind)
    if typing.get_origin(kind) is typing.Literal:
        return isinstance(value, tuple({type(one) for one in typing.get_args(kind)}))
    # A model may be wrapped, a tokenizer somebody's own: of anything else a drafter knows itself what it takes.
    return not isinstance(value, (numbers.Number, str))


def _converted(name: str, option: str, text: str, hint: Any) -> Any:
    """A written option as the first type of its annotation that takes it."""
    kinds = _kinds(hint)
    for kind in (int, float, bool):
        if kind not in kinds:
            continue
        if kind is bool:
            if text.lower() in {"true", "false"}:
                return text.lower() == "true"
            continue
        try:
            return kind(text)
        except ValueError:
            continue
    if str in kinds or any(typing.get_origin(kind) is typing.Literal for kind in kinds):
        return text
    raise ValueError(f"expected {_listed(kinds)} for option {option} of {name}, got {text!r}")


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
        raise ValueError(f"expected as many '(' as ')', each before its ')', got {text!r}")
    return pieces


def written_options(name: str, text: str, unnamed: str = "") -> dict[str, str]:
    """The options written after `name`, as text; raises ValueError.

    `unnamed` is the option whose name may be left out, empty if there is none.
    """
    written = {}
    for piece in filter(None, split_outside(text, ",")):
        option, *values = split_outside(piece, "=")
        if values and not option.isidentifier():
            raise ValueError(
                f"expected NAME=VALUE among the options of {name!r}, got {piece!r}; "
                "options of a part of it stand in parentheses"
            )
        if not values and unnamed and unnamed not in written:
            option, values = unnamed, [piece]
        if not values:
            raise ValueError(f"expected options as NAME=VALUE after {name!r}, got {piece!r}")
        if option in written:
            raise ValueError(f"expected every option of {name} once, got {option} twice")
        written[option] = "=".join(values)
    return written


def name_and_options(text: str) -> tuple[str, str]:
    """The name and the options of `NAME` or `NAME(OPTIONS)`; raises ValueError."""
    found = re.fullmatch(r"([^():,=]+)(?:\((.*)\))?", text.strip(), re.DOTALL)
    if found is None:
        raise ValueError(f"expected NAME or NAME(OPTION=VALUE,...), got {text!r}")
    return found[1], found[2] or ""
