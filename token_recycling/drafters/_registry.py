"""Drafters by name, and as users write them: `NAME:OPTION=VALUE,...`.

A drafter is a file or a folder in `token_recycling/drafters/` with one `Drafter` class in it. Its name is the drafter's
name, and the dataclass fields are its options, in Python and on the command line: `recycling:k=16,tree=paper`. Other
packages add drafters through the entry point group `token_recycling.drafters`.

Names are listed without importing a drafter, so that shell completion does not wait for torch.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._util.options import options_of, read_options, written_options

if TYPE_CHECKING:
    from ._base import Drafter

ENTRY_POINTS = "token_recycling.drafters"
"""The entry point group for drafters of other packages."""


def drafter_names() -> list[str]:
    """Return the names of all drafters, the package's own first."""
    ours = own_names()
    return ours + sorted({point.name for point in metadata.entry_points(group=ENTRY_POINTS)} - set(ours))


@functools.cache
def own_names() -> list[str]:
    """Return the names of the package's own drafters; modules whose name starts with an underscore are excluded."""
    names = (module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return sorted(name for name in names if not name.startswith("_"))


def drafter_class(name: str) -> type[Drafter]:
    """Return the drafter class of that name; raises ValueError that lists all names."""
    from ._base import Drafter

    check_name(name)
    if name in own_names():
        module = importlib.import_module(f".{name}", __package__)
        (result,) = (
            value
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, Drafter) and value.__module__ == module.__name__
        )
    else:
        result = _of_another_package(name)
    result.name = name
    return result


def check_name(name: str, what: str = "drafter", others: Sequence[str] = ()) -> None:
    """Raise ValueError, listing all names, for an unknown drafter; `others`: further names to list."""
    # Other packages come last: finding their drafters reads the metadata of every installed package.
    if name not in own_names() and name not in drafter_names():
        raise ValueError(f"unknown {what} {name!r}; available: {', '.join([*others, *drafter_names()])}")


def check_spec(spec: str, what: str = "drafter", others: Sequence[str] = ()) -> None:
    """Raise ValueError for an unknown drafter, or for options in the text that it does not have. See `check_name`."""
    name, _, text = spec.partition(":")
    check_name(name, what, others)
    if text:
        _read_options(drafter_class(name), text, {})


def _of_another_package(name: str) -> type[Drafter]:
    """Return the drafter class that another installed package registers under that name; raises ValueError."""
    from ._base import Drafter

    points = metadata.entry_points(group=ENTRY_POINTS, name=name)
    got = " and ".join(point.value for point in points)
    loaded: list[Any] = []
    problem: Exception | None = None
    try:
        loaded = [point.load() for point in points]
    except Exception as error:  # other packages can fail in any way
        got, problem = f"{got} ({type(error).__name__}: {error})", error
    if len(loaded) != 1 or not isinstance(loaded[0], type) or not issubclass(loaded[0], Drafter):
        raise ValueError(
            f"the entry point {name!r} of {ENTRY_POINTS} must name one Drafter class, got {got}; "
            "fix or uninstall the package that registers it"
        ) from problem
    return loaded[0]


def make_drafter(spec: str | Drafter = "recycling", /, *, reproducible: bool = False, **options: Any) -> Drafter:
    """Return a drafter from its name and options, from a text such as `recycling:k=16,tree=paper`, or from an instance.
    `reproducible`: it starts fresh for every sequence and measures nothing (docs/exactness.md).

    Raises ValueError or TypeError for an unknown drafter or option, a missing required option, a value of the wrong
    type, or a drafter that cannot be reproducible.
    """
    from ._base import Drafter

    if not isinstance(reproducible, bool):
        raise TypeError(f"reproducible must be True or False, got {reproducible!r}")
    if reproducible:
        from ._reproducible import Reproducible

        drafter = make_drafter(spec, **options)
        return drafter if isinstance(drafter, Reproducible) else Reproducible(drafter)
    if isinstance(spec, Drafter):
        if options:
            raise TypeError(
                f"options need a drafter's name, got a Drafter and {', '.join(options)}; set them when creating it"
            )
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"drafter must be a name or a Drafter, got {type(spec).__name__}")
    name, _, text = spec.partition(":")
    kind = drafter_class(name)
    return kind(**_read_options(kind, text, options))


def _read_options(kind: type[Drafter], text: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a drafter class, from the text after its name and from keyword values."""
    return read_options(kind, kind.name, written_options(kind.name, text, kind.unnamed, options_of(kind)), options)
