"""Facts about a model, cached while the model stays the same.

Self-tests, learned costs and captured passes are made once and used by every call. They are stored in this process next
to the model, not in it, so the model is saved, copied and pickled as before. A model is the same while its
`Fingerprint` is equal, which every call checks once: 0.7 ms for 423 modules.
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

from .._util.device import outside_inference_mode
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
"""The part of a model's state that a result depends on; see `Facts`."""
_DECIDING = ("is_causal", "is_decoder", "layer_idx", "rope_type", "original_max_seq_len", "max_norm")
"""Attributes of parts, besides the configuration, that decide whether and how a model is accelerated."""
_LOOKED_THROUGH = frozenset({object, *LIBRARIES})
"""Classes that `replaced_in_libraries` already covers."""
_DATA = frozenset(
    {
        *(type(None), bool, int, float, str, dict, OrderedDict, list, tuple, set),
        *(torch.dtype, torch.device, torch.Size, torch.Tensor, torch.nn.Parameter),
    }
)
"""Types of module attributes that cannot replace a method or a module."""
_CONTAINERS = (dict, list, tuple, set, frozenset, Mapping)
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
"""Types whose values are part of the description itself."""
_WRAPPERS = frozenset({"builtins", "functools"})
"""Modules that define the types of functions, methods and partials."""


# Comparing


def address_of(weight: torch.Tensor) -> int:
    """Return the address of a tensor's elements, or 0."""
    try:
        return weight.data_ptr()
    except RuntimeError:  # a wrapper tensor has no memory of its own
        return 0


def times_written(tensor: torch.Tensor) -> int:
    """Return how many operations have written to a tensor; 0 for an inference tensor, on which torch counts none."""
    return 0 if tensor.is_inference() else version(tensor)


def describe(value: Any, values: list[Any], objects: list[Any], seen: set[int] | None = None) -> None:
    """Append to `values` a description that is equal for equal plain values, and containers of them, of the same types;
    and to `objects` the objects that are compared by identity. `seen`: configurations described before, and the
    containers around the value.
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
        if id(value) not in seen:  # else it contains itself
            seen.add(id(value))
            items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else [*value]
            for item in [*items, *value.values()] if isinstance(value, Mapping) else items:
                if type(item) in PLAIN:  # the common case, without a call
                    values += (type(item), item)
                else:
                    describe(item, values, objects, seen)
            seen.discard(id(value))
    else:
        values.append(cls)
        objects.append(value)


class Identities:
    """Objects compared by identity: equal to later ones while they are the same objects and none has been collected."""

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
        """Drop the strong references, and detect when an object is collected: a new object may get its id. For tensors
        the memory is watched instead, since torch swaps no tensor that has a weak reference
        (`torch.utils.swap_tensors`).
        """
        for item in {id(item): item for item in self._objects}.values():
            if isinstance(item, torch.Tensor):
                with contextlib.suppress(RuntimeError):  # sparse tensors have several
                    self._memory.append(StorageWeakRef(item.untyped_storage()))
            elif getattr(type(item), "__weakrefoffset__", 0):
                self._watches.append(weakref.ref(item, self._note))
        self._objects = ()
        return self

    def _note(self, gone: object) -> None:
        self._one_is_gone = True


class Fingerprint:
    """State of a model on which facts depend. `form` is equal while parts, weights and configuration are the same
    objects, `numbers` while nothing was written to the weights, `code` while the same foreign code runs in the model.
    Torch does not count writes through a tensor's `.data`. Nothing is kept alive: objects are compared by id, and a
    collected object is never equal.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        parts = parts_of(model)
        attributes = [part.__dict__ for part in parts]
        weights: list[torch.Tensor] = [
            weight for own in attributes for weight in own.get(PARAMETERS, {}).values() if weight is not None
        ]
        try:  # the common case in one go, since every call does this
            addresses, written = [weight.data_ptr() for weight in weights], [*map(version, weights)]
        except RuntimeError:
            addresses, written = [*map(address_of, weights)], [*map(times_written, weights)]
        away: list[Any] = []
        if 0 in addresses:
            # Offloaded weights are new tensors after each pass: of them only shapes and dtypes count, in the form.
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
        shares = [*itertools.compress(attributes, training)]  # such as dropout rates in training mode
        numbers = [value for own in shares for value in own.values() if isinstance(value, (int, float))]
        self.code = [self._identities[3], training, [*map(len, attributes)], numbers]

    def watch(self) -> Fingerprint:
        """Drop the strong references, and return this fingerprint for comparison with later ones."""
        for identities in self._identities:
            identities.watch()
        return self


def code_beyond(model: PreTrainedModel, classes: Iterable[type]) -> list[Any]:
    """Return code that may be replaced between calls and is not set on a module: around the model, in the libraries,
    and in the `classes` of its parts and their families.
    """
    code = [item for _, item in code_around(model)]
    code += [function for _, _, function in replaced_in_libraries()]
    code += KERNELS - KERNELS_AS_INSTALLED
    # With all base classes: a method may call that of its base. Their attributes that are not code seldom change.
    bases = dict.fromkeys(base for cls in dict.fromkeys(classes) for base in cls.__mro__ if base not in _LOOKED_THROUGH)
    families = {sys.modules[base.__module__] for base in bases if base.__module__.startswith(FAMILIES)}
    for holder in (*bases, *families):
        code += vars(holder).values()
    return code


def _code(model: PreTrainedModel, parts: Sequence[torch.nn.Module], classes: Sequence[Any]) -> list[Any]:
    """Return code that runs in a model and may be replaced between calls. If any of it changes, the model is searched
    again (`foreign.search`). `classes`: the classes of its `parts`.
    """
    code = code_beyond(model, classes)
    for part in parts:
        own = part.__dict__
        code += [value for value in own.values() if type(value) not in _DATA]
        if buffers := own.get(BUFFERS):  # modules compiled ahead of time keep them elsewhere
            code += map(type, buffers.values())
        if own[HOOKS_AFTER] or own[HOOKS_BEFORE]:
            code += foreign_hooks(part)
    return code


# Keeping


class Facts:
    """Facts about a model while it is unchanged, grouped by the part of its fingerprint on which they depend. Facts of
    "code" depend on the numbers too, and facts of "numbers" on the form.
    """

    def __init__(self, fingerprint: Fingerprint, before: Facts | None) -> None:
        """`before`: facts about the model's earlier state; those of its form may still hold."""
        same_form = before is not None and before.fingerprint.form == fingerprint.form
        of_form = before._results["form"] if before is not None and same_form else {}
        self._results: dict[str, dict[Hashable, Any]] = {"form": of_form, "numbers": {}, "code": {}}
        self.fingerprint: Fingerprint = fingerprint.watch()
        self.lock: threading.RLock = threading.RLock() if before is None else before.lock
        """One lock per model, kept across its states."""

    def forget_code(self, fingerprint: Fingerprint) -> None:
        """Discard the facts that depend on the code in the model, which has changed to that of `fingerprint`."""
        self.fingerprint.code, self._results["code"] = fingerprint.watch().code, {}

    def recall(self, what: Hashable, of: Dependency = "numbers") -> Any | None:
        """Return a result of an earlier `get`, or None."""
        return self._results[of].get(what)

    def get(self, what: Hashable, make: Callable[[], T], of: Dependency = "numbers") -> T:
        """Return the cached result of `make()`, which is called the first time. One thread calls it while others that
        need a fact about the same model wait. `make` may call `get` itself.
        """
        results = self._results[of]
        if what not in results:
            with self.lock:
                if what not in results:
                    results[what] = _made(make)
        return results[what]

    def forget(self, what: Hashable) -> None:
        """Discard one result, whatever it depends on."""
        for results in self._results.values():
            results.pop(what, None)

    def warn_once(self, message: str) -> None:
        """Log a warning about the model, once per message."""
        self.get(("said", message), lambda: logger.warning(message), of="form")


@outside_inference_mode
def _made(make: Callable[[], T]) -> T:
    return make()


_by_model: WeakKeyDictionary[PreTrainedModel, Facts] = WeakKeyDictionary()
_looking = threading.RLock()


def facts_of(model: PreTrainedModel) -> Facts:
    """Return the facts about a model in its present state."""
    with _looking:
        before = _by_model.get(model)
    now = Fingerprint(model)
    if before is not None and before.fingerprint.form == now.form and before.fingerprint.numbers == now.numbers:
        if before.fingerprint.code != now.code:
            before.forget_code(now)
        return before
    with _looking:
        if (facts := _by_model.get(model)) is before or facts is None:  # no other thread has updated it meanwhile
            facts = _by_model[model] = Facts(now, before)
    return facts
