"""Functions of torch and transformers that another package has put in their place, for every model of the process.

Libraries and scripts set `torch.nn.functional.scaled_dot_product_attention` or `DynamicLayer.update`, to quantise or to
measure, and modes of torch stand before all operations. Code of this kind belongs to no model, so that no module shows
it. `foreign` lists it beside the code in a model, and it is tried in the same way. Replaced methods of caches are left
to `generate`: accelerated calls keep keys and values in layers of their own. Cost: 50 microseconds a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from transformers import activations, cache_utils, masking_utils, modeling_rope_utils, pytorch_utils
from transformers.integrations import moe, sdpa_attention

from .compat import modes
from .homes import home_of, is_foreign, is_own, name_of

_CACHES: list[Any] = [
    cache_utils,
    *(
        kind
        for kind in vars(cache_utils).values()
        if isinstance(kind, type) and kind.__module__ == cache_utils.__name__
    ),
]
_HOLDERS: list[Any] = [
    torch,
    torch.nn.functional,
    torch.Tensor,
    activations,
    masking_utils,
    modeling_rope_utils,
    pytorch_utils,
    moe,
    sdpa_attention,
    *_CACHES,
]
"""Modules and classes whose functions a forward pass calls."""
_IMPORTED = frozenset({"numpy", "safetensors", "typing_extensions"})
"""Packages that these modules import functions of."""
_CHOOSING = frozenset({"argmax", "multinomial", "softmax"})
"""Functions by which a token is chosen, which no trial compares."""


@dataclass(frozen=True)
class Replaced:
    """A function of torch or transformers that is another package's."""

    name: str
    holder: Any
    """The module or class that has it."""
    function: Any

    def __str__(self) -> str:
        return f"the function {self.name} of {self.holder.__name__}, replaced by {name_of(self.function)}"


_found: tuple[list[list[Any]], tuple[Replaced, ...]] = [], ()
"""The functions as they were when they were last looked at, and those that were replaced."""


def replaced_in_libraries() -> tuple[Replaced, ...]:
    """Return the functions of torch and transformers that other packages have replaced, or added."""
    global _found
    functions = [[*vars(holder).values()] for holder in _HOLDERS]
    if not _equal(functions, _found[0]):
        _found = functions, tuple(_search())
    return _found[1]


def _equal(functions: list[list[Any]], before: list[list[Any]]) -> bool:
    try:
        return functions == before
    except Exception:  # what is set there may fail to compare
        return False


def _search() -> Iterator[Replaced]:
    for holder in _HOLDERS:
        for name, value in list(vars(holder).items()):
            if not callable(value) or isinstance(value, (type, ModuleType)):
                continue
            home = home_of(value)
            if not is_own(home) and str(home).partition(".")[0] not in _IMPORTED:
                yield Replaced(name, holder, value)


def replaced_for_choosing() -> Replaced | None:
    """Return a replaced function by which `generate` chooses tokens, or None."""
    return next((one for one in replaced_in_libraries() if one.name in _CHOOSING and one.holder not in _CACHES), None)


def replaced_in(cache: Any, callers: bool) -> str | None:
    """Describe a function of transformers' caches that was replaced, in their classes or, where the cache is its
    caller's, in the object itself; None if there is none.
    """
    for one in replaced_in_libraries():
        if one.holder in _CACHES:
            return str(one)
    for thing in (cache, *cache.layers) if callers else ():
        for name, value in list(vars(thing).items()):
            if isinstance(value, (FunctionType, MethodType)) and is_foreign(value):
                return f"the function {name_of(value)}, set as {name} of a {type(thing).__name__}"
    return None


def foreign_modes() -> list[Any]:
    """Modes of torch that are on in this thread and are another package's."""
    return [mode for mode in modes() if not is_own(type(mode).__module__)]
