"""Facts about a model, kept for as long as the model stays the same.

A self-test, learned costs and captured passes are made once and used by every call. They are kept in this process next
to the model, not in it, so that it is saved, copied and pickled as before. A model is the same as long as its
`Fingerprint` is, which every call compares once: 0.7 ms for 423 modules.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PretrainedConfig, PreTrainedModel

from .._util.device import lasting
from .compat import BUFFERS, HOOKS_AFTER, HOOKS_BEFORE, KERNELS, KERNELS_AS_INSTALLED, PARAMETERS, version
from .origin import is_foreign, is_own
from .parts import (
    CALLED_INSTEAD,
    FAMILIES,
    LIBRARIES,
    code_around,
    foreign_hooks,
    is_graph,
    own_class,
    parts_of,
    replaced_in_libraries,
)

logger = logging.getLogger("token_recycling")

T = TypeVar("T")
Dependency = Literal["form", "numbers", "code"]
"""What of a model a result depends on; see `Facts`."""
_DECIDING = ("is_causal", "is_decoder", "layer_idx", "rope_type", "original_max_seq_len", "max_norm")
"""Attributes of parts that decide, besides a configuration, on whether and how a model is accelerated."""
_LOOKED_THROUGH = frozenset({object, *LIBRARIES})
"""Classes whose methods `replaced_in_libraries` tells."""
_DATA = frozenset(
    {
        *(type(None), bool, int, float, str, dict, OrderedDict, list, tuple, set),
        *(torch.dtype, torch.device, torch.Size, torch.Tensor, torch.nn.Parameter),
    }
)
"""Types of attributes of a module that cannot stand in place of a method or of a module."""
_CONTAINERS = (dict, list, tuple, set, frozenset, Mapping)
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
"""Types of values that are described by themselves."""
_WRAPPERS = frozenset({"builtins", "functools"})
"""Where the types of functions, methods and partials are."""


# Comparing


def address_of(weight: torch.Tensor) -> int:
    """Address of a tensor's numbers."""
    try:
        return weight.data_ptr()
    except RuntimeError:  # a tensor that wraps others has no memory of its own
        return 0


def times_written(tensor: torch.Tensor) -> int:
    """Count operations that have written to a tensor; 0 for one of inference mode, which counts none."""
    return 0 if tensor.is_inference() else version(tensor)


def describe(value: Any, values: list[Any], objects: list[Any], seen: set[int] | None = None) -> None:
    """Add to `values` something that is equal for equal plain values, and containers of them, of the same types; and to
    `objects` what counts by identity. `seen`: configurations that were described before, and containers around it.
    """
    cls, seen = type(value), set() if seen is None else seen
    if cls in PLAIN:
        values += (cls, value)
    elif issubclass(cls, torch.Tensor):
        objects.append(value)
        strides = value.stride() if value.layout is torch.strided else ()
        values += (address_of(value), value.dtype, value.device, value.shape, strides)
    elif issubclass(cls, PretrainedConfig):
        objects.append(value)
        if id(value) not in seen:
            seen.add(id(value))
            describe(vars(value), values, objects, seen)
    elif issubclass(cls, _CONTAINERS) and not issubclass(cls, torch.nn.Module):
        values += (cls, len(value))
        if id(value) not in seen:  # else it holds itself
            seen.add(id(value))
            items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else [*value]
            for item in [*items, *value.values()] if isinstance(value, Mapping) else items:
                if type(item) in PLAIN:  # the usual case, without a call
                    values += (type(item), item)
                else:
                    describe(item, values, objects, seen)
            seen.discard(id(value))
    else:
        values.append(cls)
        objects.append(value)


class Identities:
    """Objects that count by identity: equal to later ones while they are the same and none of them is gone."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self._objects: Sequence[Any] = [*objects]
        self._numbers = [*map(id, self._objects)]
        self._watches: list[weakref.ref] = []
        self._memory: list[StorageWeakRef] = []
        self._one_is_gone = False

    def __eq__(self, later: object) -> bool:
        if not isinstance(later, Identities) or self._numbers != later._numbers:
            return False
        return not self._one_is_gone and not any(memory.expired() for memory in self._memory)

    __hash__ = None  # type: ignore[assignment]

    def watch(self) -> Identities:
        """Let go of the objects, and notice when one of them is gone: another one may be given its number. Of tensors
        the memory is watched, since torch swaps no tensor that has a weak reference (`torch.utils.swap_tensors`).
        """
        for item in {id(item): item for item in self._objects}.values():
            if isinstance(item, torch.Tensor):
                with contextlib.suppress(RuntimeError):  # sparse ones have several
                    self._memory.append(StorageWeakRef(item.untyped_storage()))
            elif getattr(type(item), "__weakrefoffset__", 0):
                self._watches.append(weakref.ref(item, self._note))
        self._objects = ()
        return self

    def _note(self, gone: object) -> None:
        self._one_is_gone = True


class Fingerprint:
    """What facts about a model depend on, at one time: `form` is equal while parts, weights and configuration are the
    same ones, `numbers` while nothing was written to the weights, `code` while the same foreign code runs in the model.
    Writing through a tensor's `.data` is not counted by torch. Nothing is kept alive: objects count by their numbers,
    and one that is gone is no longer the same.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        parts = parts_of(model)
        attributes = [part.__dict__ for part in parts]
        weights: list[torch.Tensor] = [
            weight for own in attributes for weight in own.get(PARAMETERS, {}).values() if weight is not None
        ]
        try:  # the usual case in one go, since every call looks
            addresses, written = [weight.data_ptr() for weight in weights], [*map(version, weights)]
        except RuntimeError:
            addresses, written = [*map(address_of, weights)], [*map(times_written, weights)]
        away: list[Any] = []
        if 0 in addresses:
            # Weights that are offloaded between passes are other tensors after each: of them the form counts.
            away = [(weight.shape, weight.dtype) for weight in weights if weight.is_meta]
            written = [count for count, weight in zip(written, weights, strict=True) if not weight.is_meta]
            weights = [weight for weight in weights if not weight.is_meta]
        classes: list[Any] = [*map(type, parts)]
        classes[0] = own_class(model)
        forwards = [own["forward"] for own in attributes if "forward" in own]
        forwards = [
            forward
            for forward in forwards
            if not is_own(type(forward).__module__) or type(forward).__module__ in _WRAPPERS
        ]
        code = [*_code(model, parts, classes), *filter(is_foreign, forwards)]
        given = (own.get("config") for own in attributes)
        configs = {id(config): config for config in given if isinstance(config, PretrainedConfig)}.values()
        options: list[Any] = [*map(type, configs)]
        in_options: list[Any] = []
        for config in configs:
            describe(vars(config), options, in_options)
        self._identities = Identities(weights), Identities(parts[1:]), Identities(in_options), Identities(code)
        self.form: list[Any] = [
            *self._identities[:3],
            classes,
            addresses,
            away,
            "forward" in attributes[0],
            [name in own for name in CALLED_INSTEAD for own in attributes],
            [own[name] for name in _DECIDING for own in attributes if name in own],
            [*map(is_graph, forwards)].count(True),
            getattr(model, "is_quantized", False),
            options,
        ]
        self.numbers = written
        training = [part.training for part in parts]
        shares = [*itertools.compress(attributes, training)]  # such as what is dropped in training mode, and whether
        numbers = [value for own in shares for value in own.values() if isinstance(value, (int, float))]
        self.code = [self._identities[3], training, [*map(len, attributes)], numbers]

    def watch(self) -> Fingerprint:
        """Keep this one to be compared with later ones."""
        for identities in self._identities:
            identities.watch()
        return self


def _code(model: PreTrainedModel, parts: Sequence[torch.nn.Module], classes: Sequence[Any]) -> list[Any]:
    """Return code that runs in a model and may be replaced between calls: when any of it is another one, the model is
    searched again (`foreign.search`). `classes`: those of its `parts`.
    """
    code = [item for _, item in code_around(model)]
    code += [function for _, _, function in replaced_in_libraries()]
    code += KERNELS - KERNELS_AS_INSTALLED
    # With all that they derive from: a method may call that of its base. What of them is no code seldom changes.
    bases = dict.fromkeys(base for cls in dict.fromkeys(classes) for base in cls.__mro__ if base not in _LOOKED_THROUGH)
    families = {sys.modules[base.__module__] for base in bases if base.__module__.startswith(FAMILIES)}
    for holder in (*bases, *families):
        code += vars(holder).values()
    for part in parts:
        own = part.__dict__
        code += [value for value in own.values() if type(value) not in _DATA]
        if buffers := own.get(BUFFERS):  # code that was compiled ahead has them elsewhere
            code += map(type, buffers.values())
        if own[HOOKS_AFTER] or own[HOOKS_BEFORE]:
            code += foreign_hooks(part)
    return code


# Keeping


class Facts:
    """Facts about a model, for as long as it is as it was: by what of its fingerprint they depend on. Those of its
    "code" depend on its numbers too, and those of its "numbers" on its form.
    """

    def __init__(self, fingerprint: Fingerprint, before: Facts | None) -> None:
        """`before`: facts about the model as it was before, of which those of its form may still hold."""
        same_form = before is not None and before.fingerprint.form == fingerprint.form
        of_form = before._results["form"] if before is not None and same_form else {}
        self._results: dict[str, dict[Hashable, Any]] = {"form": of_form, "numbers": {}, "code": {}}
        self.fingerprint: Fingerprint = fingerprint.watch()
        self.lock: threading.RLock = threading.RLock() if before is None else before.lock
        """The model's, in whatever state."""

    def forget_code(self, fingerprint: Fingerprint) -> None:
        """Forget what depends on the code in the model, which is that of another fingerprint now."""
        self.fingerprint.code, self._results["code"] = fingerprint.watch().code, {}

    def recall(self, what: Hashable, of: Dependency = "numbers") -> Any | None:
        """Return what `get` has made before, or None."""
        return self._results[of].get(what)

    def get(self, what: Hashable, make: Callable[[], T], of: Dependency = "numbers") -> T:
        """Return what `make()` gave the first time. One thread makes it while others that want something of the same
        model wait; what is made may itself be made of such results.
        """
        results = self._results[of]
        if what not in results:
            with self.lock:
                if what not in results:
                    results[what] = _made(make)
        return results[what]

    def forget(self, what: Hashable) -> None:
        """Forget one result, whatever it depends on."""
        for results in self._results.values():
            results.pop(what, None)

    def say_once(self, message: str) -> None:
        """Log a warning about the model, the first time only."""
        self.get(("said", message), lambda: logger.warning(message), of="form")


@lasting
def _made(make: Callable[[], T]) -> T:
    return make()


_by_model: WeakKeyDictionary[PreTrainedModel, Facts] = WeakKeyDictionary()
_looking = threading.RLock()


def facts_of(model: PreTrainedModel) -> Facts:
    """Return the facts about a model as it is."""
    with _looking:
        before = _by_model.get(model)
    now = Fingerprint(model)
    if before is not None and before.fingerprint.form == now.form and before.fingerprint.numbers == now.numbers:
        if before.fingerprint.code != now.code:
            before.forget_code(now)
        return before
    with _looking:
        if (facts := _by_model.get(model)) is before or facts is None:  # no other thread has looked again meanwhile
            facts = _by_model[model] = Facts(now, before)
    return facts
