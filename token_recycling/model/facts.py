"""Facts about a model, kept for as long as the model stays the same.

A self-test, learned costs and captured passes are made once and used by every call. They are kept in this process next
to the model, not in it, so that it is saved, copied and pickled as before; facts that hold for later processes are kept
on disk, where a damaged file is replaced by the next one written.

A model is the same as long as its `Fingerprint` is: `form` while parts, weights and configuration are the same ones,
`numbers` while nothing was written to the weights, `code` while the same foreign code runs in it (`foreign`). Every
call compares them once: 0.4 ms for 423 modules. Writing through a tensor's `.data` is not counted by torch. A
fingerprint keeps nothing alive: objects count by their numbers, and one that is gone is no longer the same.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
import platform
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PretrainedConfig, PreTrainedModel

from .._util.device import lasting
from .._util.files import cache_folder, replacing
from .compat import CHILDREN, PARAMETERS, methods_of_the_loop, times_written, with_hooks
from .foreign import (
    CALLED_INSTEAD,
    OF_FAMILIES,
    attention_functions,
    foreign_hooks,
    global_hooks,
    is_graph,
    own_class,
)
from .homes import is_foreign, is_own
from .replaced import foreign_modes, replaced_in_libraries

logger = logging.getLogger("token_recycling")

T = TypeVar("T")

_METHODS_AROUND = ("__call__", "generate", *methods_of_the_loop())
"""Methods that stand between `generate` and the forward pass."""
_WRAPPERS = frozenset({"builtins", "functools"})
"""Where the types of functions, methods and partials are."""
_CONTAINERS = (dict, list, tuple, set, frozenset, Mapping)
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})


# The model as it is


def parts_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the model and all modules in it, each once, the model first."""
    parts, seen = [model], {model}
    for part in parts:  # which grows
        children = part.__dict__.get(CHILDREN)
        for child in dict(part.named_children()).values() if children is None else children.values():
            if child is not None and child not in seen:
                seen.add(child)
                parts.append(child)
    return parts


def place(weight: torch.Tensor) -> int:
    """Address of a tensor's numbers."""
    try:
        return weight.data_ptr()
    except RuntimeError:  # a tensor that wraps others has no memory of its own
        return 0


class Identities:
    """Objects that count by identity: equal to later ones while they are the same and none of them is gone."""

    def __init__(self, things: Iterable[Any]) -> None:
        self._things: Sequence[Any] = [*things]
        self._numbers = [*map(id, self._things)]
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
        for thing in {id(thing): thing for thing in self._things}.values():
            if isinstance(thing, torch.Tensor):
                with contextlib.suppress(RuntimeError):  # sparse ones have several
                    self._memory.append(StorageWeakRef(thing.untyped_storage()))
            elif getattr(type(thing), "__weakrefoffset__", 0):
                self._watches.append(weakref.ref(thing, self._note))
        self._things = ()
        return self

    def _note(self, gone: object) -> None:
        self._one_is_gone = True


class Fingerprint:
    """What facts about a model depend on, at one time."""

    def __init__(self, model: PreTrainedModel) -> None:
        parts = parts_of(model)
        attributes = [part.__dict__ for part in parts]
        weights: list[torch.Tensor] = [
            weight for own in attributes for weight in own.get(PARAMETERS, {}).values() if weight is not None
        ]
        try:  # the usual case in one go, since every call looks
            places = [weight.data_ptr() for weight in weights]
        except RuntimeError:  # wrapped tensors have no memory of their own
            places = [place(weight) for weight in weights]
        written = times_written(weights)
        away: list[Any] = []
        if 0 in places:
            # Weights that are offloaded between passes are other tensors after each: of them the form counts.
            away = [(weight.shape, weight.dtype) for weight in weights if weight.is_meta]
            written = [count for count, weight in zip(written, weights, strict=True) if not weight.is_meta]
            weights = [weight for weight in weights if not weight.is_meta]
        kinds: list[Any] = [*map(type, parts)]
        kinds[0] = own_class(model)
        forwards = [own["forward"] for own in attributes if "forward" in own]
        forwards = [
            forward
            for forward in forwards
            if not is_own(type(forward).__module__) or type(forward).__module__ in _WRAPPERS
        ]
        self._ids = Identities(weights), Identities(parts[1:])
        self.form: list[Any] = [
            *self._ids,
            kinds,
            places,
            away,
            "forward" in attributes[0],
            [name in own for name in CALLED_INSTEAD for own in attributes],
            [*map(is_graph, forwards)].count(True),
            getattr(model, "is_quantized", False),
            _values_of(getattr(model, "config", None)),
        ]
        self.numbers = written
        things = _code_in(model, parts, kinds)
        things += filter(is_foreign, forwards)
        self._code_ids = Identities(things)
        self.code: list[Any] = [self._code_ids, [part.training for part in parts], [*map(len, attributes)]]

    def watch(self) -> Fingerprint:
        """Keep this one to be compared with later ones."""
        for ids in (*self._ids, self._code_ids):
            ids.watch()
        self.form[-1] = copy.deepcopy(self.form[-1])  # lists in it may be changed
        return self


def _code_in(model: PreTrainedModel, parts: Sequence[torch.nn.Module], kinds: Sequence[Any]) -> list[Any]:
    """Return code that runs in a model and may be replaced, by identity; `kinds`: the classes of its parts."""
    things: list[Any] = [getattr(kinds[0], name, None) for name in _METHODS_AROUND]
    things += filter(is_foreign, global_hooks())
    things += [one.function for one in replaced_in_libraries()]
    things += foreign_modes()
    things += attention_functions(model)
    distinct = set(kinds)
    forwards = [getattr(kind, "forward", None) for kind in distinct]  # code that was compiled ahead has none
    things += [forward for forward in forwards if isinstance(forward, FunctionType)]
    of_families = [kind for kind in distinct if kind.__module__.startswith(OF_FAMILIES)]
    for names in (
        *map(vars, of_families),
        *(vars(sys.modules[name]) for name in {one.__module__ for one in of_families}),
    ):
        things += [function for function in names.values() if type(function) is FunctionType]
    for part in with_hooks(parts):
        things += foreign_hooks(part)
    return things


def _values_of(config: Any) -> dict[str, Any]:
    """Return all values of a configuration and of nested ones, whose `==` fails where layers differ in size."""
    return {
        name: _values_of(value) if isinstance(value, PretrainedConfig) else value
        for name, value in (vars(config) if config is not None else {}).items()
    }


def describe(value: Any, values: list[Any], things: list[Any], seen: set[int] | None = None) -> None:
    """Add to `values` something that is equal for equal plain values, and containers of them, of the same types; and to
    `things` what counts by identity. `seen`: configurations that were described before, and containers around this one.
    """
    kind, seen = type(value), set() if seen is None else seen
    if kind in PLAIN:
        values += (kind, value)
    elif issubclass(kind, torch.Tensor):
        things.append(value)
        strides = value.stride() if value.layout is torch.strided else ()
        values += (place(value), value.dtype, value.device, value.shape, strides)
    elif issubclass(kind, PretrainedConfig):
        things.append(value)
        if id(value) not in seen:
            seen.add(id(value))
            describe(vars(value), values, things, seen)
    elif issubclass(kind, _CONTAINERS) and not issubclass(kind, torch.nn.Module):
        values += (kind, len(value))
        if id(value) in seen:
            return  # it holds itself
        seen.add(id(value))
        for item in sorted(value, key=repr) if issubclass(kind, (set, frozenset)) else list(value):
            describe(item, values, things, seen)
        if issubclass(kind, Mapping):
            for item in list(value.values()):
                describe(item, values, things, seen)
        seen.discard(id(value))
    else:
        values.append(kind)
        things.append(value)


# In this process


class Kept:
    """Results about a model, for as long as it is as it was."""

    def __init__(self, fingerprint: Fingerprint, of_form: dict[Hashable, Any], lock: threading.RLock) -> None:
        """`of_form`: those that do not depend on the numbers in its weights; `lock`: the model's, in whatever state."""
        self.fingerprint, self.lock = fingerprint.watch(), lock
        self.code = fingerprint.code
        """The code in the model when it was compared last."""
        self._results: dict[bool, dict[Hashable, Any]] = {True: {}, False: of_form}

    @property
    def of_form(self) -> dict[Hashable, Any]:
        return self._results[False]

    def recall(self, what: Hashable, values_matter: bool = True) -> Any | None:
        """Return what `get` has made before, or None."""
        return self._results[values_matter].get(what)

    def get(self, what: Hashable, make: Callable[[], T], values_matter: bool = True) -> T:
        """Return what `make()` gave the first time. One thread makes it while others that want something of the same
        model wait; what is made may itself be made of such results.
        """
        results = self._results[values_matter]
        if what not in results:
            with self.lock:
                if what not in results:
                    with lasting():
                        results[what] = make()
        return results[what]

    def forget(self, what: Hashable) -> None:
        """Forget one result, or, of results named by tuples, all that begin with `what`."""
        for results in self._results.values():
            for name in list(results):
                if name == what or (isinstance(name, tuple) and name[:1] == (what,)):
                    results.pop(name, None)

    def count(self, what: Hashable) -> int:
        """Return the number of results named by tuples that begin with `what`."""
        return sum(isinstance(name, tuple) and name[:1] == (what,) for kept in self._results.values() for name in kept)

    def say_once(self, message: str) -> None:
        """Log a warning about the model, the first time only."""
        self.get(("said", message), lambda: logger.warning(message), values_matter=False)


_kept: WeakKeyDictionary[PreTrainedModel, Kept] = WeakKeyDictionary()
_looking = threading.RLock()


def kept_of(model: PreTrainedModel) -> Kept:
    """Return the results about a model as it is."""
    with _looking:
        before = _kept.get(model)
    now = Fingerprint(model)
    same_form = before is not None and before.fingerprint.form == now.form
    if before is not None and same_form and before.fingerprint.numbers == now.numbers:
        if before.code != now.code:
            before.code = now.watch().code
        return before
    with _looking:
        if (kept := _kept.get(model)) is before or kept is None:  # no other thread has looked again meanwhile
            of_form = before.of_form if before is not None and same_form else {}
            kept = _kept[model] = Kept(now, of_form, threading.RLock() if before is None else before.lock)
    return kept


# On disk


def file_of(kind: str, setting: dict[str, str]) -> Path:
    """Return the file of facts about a setting."""
    return cache_folder() / kind / f"{digest(setting)}.json"


def read(path: Path, parse: Callable[[Any], T], nothing: T) -> T:
    """Return the parsed content of a file; `nothing` if it is missing or, with a warning, damaged."""
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return nothing
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
        say(f"{path} does not hold facts learned about a model ({problem}); they are learned again")
        return nothing


def write(path: Path, found: dict[str, Any]) -> None:
    """Replace what is kept."""
    try:
        with replacing(path) as temporary:
            Path(temporary).write_text(json.dumps(found, indent=1), encoding="utf-8")
    except OSError as error:
        say(
            f"facts learned about a model cannot be written to {path} ({error}); set TOKEN_RECYCLING_CACHE to a "
            "writable folder"
        )


@cache
def say(message: str) -> None:
    """Log a warning, the first time only."""
    logger.warning(message)


def digest(of: Any) -> str:
    """A short name for what can be written as JSON, or else as text."""
    return hashlib.sha256(json.dumps(of, sort_keys=True, default=str).encode()).hexdigest()[:16]


def shape_of(config: PretrainedConfig) -> str:
    """A short name for a configuration, wherever the model was loaded from."""
    return digest({key: value for key, value in config.to_dict().items() if not key.startswith("_")})


@cache
def machine(device: torch.device) -> str:
    """The name of what computes."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor()
    return f"{device.type} {name}"
