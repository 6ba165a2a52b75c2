"""Caches results about a model for as long as its weights stay as they are.

A self-test, a measured curve or captured steps are made once and needed with every call. They are kept here, beside the
model and not in it, so that it is saved, copied and pickled as before, and forgotten as soon as its weights have
changed: by `load_state_dict`, an optimiser, `model.to()` or writing in place, but through a tensor's `.data`, which
torch does not count. Cost of a look-up: 0.06 ms for 110 modules with 74 parameters.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from .inspection import parts_of

logger = logging.getLogger("token_recycling")

T = TypeVar("T")


class _Turns:
    """A re-entrant lock that any thread may give back, since a generator may be closed by another than began it."""

    def __init__(self) -> None:
        self._given_back = threading.Condition()
        self._owner, self._depth = 0, 0

    def __enter__(self) -> None:
        thread = threading.get_ident()
        with self._given_back:
            self._given_back.wait_for(lambda: not self._depth or self._owner == thread)
            self._owner, self._depth = thread, self._depth + 1

    def __exit__(self, *raised: object) -> None:
        with self._given_back:
            self._depth -= 1
            self._given_back.notify_all()


_entries: WeakKeyDictionary[PreTrainedModel, dict[Hashable, tuple[list[Any], Any]]] = WeakKeyDictionary()
_turns: WeakKeyDictionary[PreTrainedModel, _Turns] = WeakKeyDictionary()
_looking = threading.Lock()


@contextmanager
def lasting() -> Iterator[None]:
    """Tensors that are made within may be written in place later, in inference mode or outside of it: one call may be
    within it and the next not.
    """
    with torch.inference_mode(False), torch.no_grad():  # the former alone would switch gradients on
        yield


def turns(model: PreTrainedModel) -> _Turns:
    """Per-model lock."""
    with _looking:
        return _turns.setdefault(model, _Turns())


def remembered(model: PreTrainedModel, what: Hashable, make: Callable[[], T], values_matter: bool = True) -> T:
    """Return what `make()` gave the first time since the model's weights changed.

    With `values_matter=False` new numbers in the same tensors, as after a training step, change nothing. One thread
    makes it while others that want something of the same model wait; what is made may itself be made of such things.
    """
    found = _known(model, what, values_matter)
    if found is None:
        with turns(model):
            found = _known(model, what, values_matter)
            if found is None:
                state = _state(model, values_matter)
                with lasting():
                    found = _entries_of(model)[what] = state, make()
    return found[1]


def recalled(model: PreTrainedModel, what: Hashable, values_matter: bool = True) -> Any | None:
    """Return what `remembered` has made before for the weights as they are, or None."""
    found = _known(model, what, values_matter)
    return None if found is None else found[1]


def _known(model: PreTrainedModel, what: Hashable, values_matter: bool) -> tuple[list[Any], Any] | None:
    found = _entries_of(model).get(what)
    return found if found is not None and found[0] == _state(model, values_matter) else None


def _entries_of(model: PreTrainedModel) -> dict[Hashable, tuple[list[Any], Any]]:
    with _looking:
        return _entries.setdefault(model, {})


def forget(model: PreTrainedModel, what: Hashable) -> None:
    """Forget one thing, or, of things named by tuples, all that begin with `what`."""
    known = _entries_of(model)
    for name in list(known):
        if name == what or (isinstance(name, tuple) and name[:1] == (what,)):
            known.pop(name, None)


def say_once(model: PreTrainedModel, message: str) -> None:
    """A warning about a model, the first time only."""
    remembered(model, ("said", message), lambda: logger.warning(message), values_matter=False)


def _state(model: PreTrainedModel, values_matter: bool) -> list[Any]:
    """Equal as long as all parameters are the same tensors, at their places, with the numbers that they had.

    Weights that are offloaded between passes are other tensors after each, without numbers: of them the form counts.
    """
    held = (weight for part in parts_of(model) for weight in part._parameters.values() if weight is not None)
    return [
        (weight.shape, weight.dtype)
        if weight.is_meta
        # Those made in inference mode count no writing in place.
        else (id(weight), weight.dtype, place(weight), values_matter and not weight.is_inference() and weight._version)
        for weight in held
    ]


def place(weight: torch.Tensor) -> int:
    """Address of a tensor's numbers."""
    try:
        return weight.data_ptr()
    except RuntimeError:  # a tensor that wraps others has no memory of its own
        return 0
