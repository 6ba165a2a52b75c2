"""What was found out about a model, for as long as it stays as it is.

A self-test, a measured curve or captured steps are made once and needed with every call. They are kept here, beside the
model and not in it, so that it is saved, copied and pickled as before, and forgotten as soon as its weights have
changed: by `load_state_dict`, an optimiser, `model.to()` or writing in place. Only what is written through a tensor's
`.data` torch does not count. Cost of a look-up: a glance at every parameter, a tenth of a millisecond for 74.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

logger = logging.getLogger("token_recycling")

T = TypeVar("T")

_entries: WeakKeyDictionary[PreTrainedModel, dict[Hashable, tuple[Hashable, Any]]] = WeakKeyDictionary()


def remembered(model: PreTrainedModel, what: Hashable, make: Callable[[], T], values_matter: bool = True) -> T:
    """What `make()` gave the first time since the model's weights changed.

    With `values_matter=False` new numbers in the same tensors, as after a training step, change nothing.
    """
    known, state = _entries.setdefault(model, {}), _state(model, values_matter)
    if what not in known or known[what][0] != state:
        known[what] = state, make()
    return known[what][1]


def forget(model: PreTrainedModel, what: Hashable) -> None:
    """Forgets one thing, or, of things named by tuples, all that begin with `what`."""
    known = _entries.get(model, {})
    for name in [name for name in known if name == what or (isinstance(name, tuple) and name[:1] == (what,))]:
        del known[name]


def say_once(model: PreTrainedModel, message: str) -> None:
    """A warning about a model, the first time only."""
    remembered(model, ("said", message), lambda: logger.warning(message), values_matter=False)


def _state(model: PreTrainedModel, values_matter: bool) -> Hashable:
    """Equal as long as all parameters are the same tensors, at their places, with the numbers that they had.

    Weights that are offloaded between passes are other tensors after each, without numbers: of them the form counts.
    """
    return tuple(
        (weight.shape, weight.dtype)
        if weight.device.type == "meta"
        else (id(weight), weight.dtype, place(weight), _version(weight) if values_matter else 0)
        for weight in model.parameters()
    )


def place(weight: torch.Tensor) -> int:
    """Where a tensor's numbers lie."""
    try:
        return weight.data_ptr()
    except RuntimeError:  # a tensor that wraps others has no memory of its own
        return 0


def _version(weight: torch.Tensor) -> int:
    """How often a tensor was written in place; those made in inference mode do not count."""
    return 0 if weight.is_inference() else weight._version
