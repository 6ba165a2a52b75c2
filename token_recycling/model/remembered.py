"""Facts about a model, kept for as long as the model stays the same.

A self-test, learned costs and captured passes are made once and used by every call. They are kept in this process next
to the model, not in it, so that it is saved, copied and pickled as before; facts that hold for later processes are kept
on disk. They are dropped when weights or modules (adapters among them) change: by `load_state_dict`, an optimizer,
`model.to()` or an in-place write, but not through a tensor's `.data`, which torch does not count. A lookup costs 0.1 ms
for 423 modules with 291 parameters. A damaged file is replaced by the next one written.

A captured pass is replayed without Python and needs a stricter check (`State`): an adapter that was switched, disabled
or scaled, a replaced module, a moved weight, an option of the configuration or of torch. The attributes of every module
are compared, since peft and others keep the choices of their forward pass there; of tensors the address and shape.
Changes inside other objects, or in methods besides `forward`, are not seen. Nothing is kept alive. This costs 1.3 ms
for 320 modules with 220 weights.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from transformers import PretrainedConfig, PreTrainedModel

from .._util.files import cache_folder, replacing
from .foreign import CodeSeen, hooks_of

logger = logging.getLogger("token_recycling")

T = TypeVar("T")


def parts_of(model: torch.nn.Module) -> Collection[torch.nn.Module]:
    """The model and all modules in it, each once, in a fifth of the time that `modules()` takes to name them."""
    found, left = {id(model): model}, [model]
    while left:
        for part in left.pop()._modules.values():
            if part is not None and id(part) not in found:
                found[id(part)] = part
                left.append(part)
    return found.values()


# In this process


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


class _Seen:
    """A model's parts and tensors as they were: compared without finding the parts again."""

    def __init__(self, model: PreTrainedModel) -> None:
        parts = parts_of(model)
        self._parts = [weakref.ref(part) for part in parts]
        self._form, self._numbers = _looked_at(parts)
        self.code = CodeSeen(parts)
        """The code around and in the parts, as it was when they were compared last."""

    def compare(self) -> tuple[bool, bool]:
        """Whether parts and tensors are the same ones; and whether these have the numbers that they had, too."""
        parts = [part for part in (ref() for ref in self._parts) if part is not None]
        if len(parts) < len(self._parts):
            return False, False
        form, numbers = _looked_at(parts)
        if not self.code.is_same(parts):
            self.code = CodeSeen(parts)
        return form == self._form, form == self._form and numbers == self._numbers


def _looked_at(parts: Collection[torch.nn.Module]) -> tuple[list[Any], list[Any]]:
    """Equal as long as all parts and parameters are the same, of the same kinds and at their places; and what torch
    counts of writing in place.

    Weights that are offloaded between passes are other tensors after each, without numbers: of them the form counts.
    """
    (model, *below), attributes = parts, [part.__dict__ for part in parts]
    weights = [weight for own in attributes for weight in own["_parameters"].values() if weight is not None]
    here = [weight for weight in weights if not weight.is_meta]
    try:  # the usual case in one go, since every call looks
        places = [weight.data_ptr() for weight in here]
        written = [weight._version for weight in here]
    except RuntimeError:  # wrapped tensors have no memory of their own, those of inference mode count no writing
        places = [place(weight) for weight in here]
        written = [not weight.is_inference() and weight._version for weight in here]
    form = [
        type(model).__qualname__,  # not its class, which is another one once it is accelerated
        "forward" in attributes[0],
        [*map(type, below)],
        [id(part) for own in attributes if own["_modules"] for part in own["_modules"].values()],
        [own.get("_compiled_call_impl") is not None for own in attributes],
        [hasattr(own["forward"], "_torchdynamo_orig_callable") for own in attributes if "forward" in own].count(True),
        [*map(id, here)],
        [weight.dtype for weight in here],
        places,
        [(weight.shape, weight.dtype) for weight in weights if weight.is_meta],
    ]
    return form, written


class Kept:
    """Results about a model, for as long as it is as it was."""

    def __init__(self, model: PreTrainedModel, of_form: dict[Hashable, Any]) -> None:
        """`of_form`: those that do not depend on the numbers in its weights."""
        self.seen, self._turns = _Seen(model), turns(model)
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
            with self._turns:
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
_all_turns: WeakKeyDictionary[PreTrainedModel, _Turns] = WeakKeyDictionary()
_looking = threading.RLock()


def turns(model: PreTrainedModel) -> _Turns:
    """Per-model lock."""
    with _looking:
        return _all_turns.setdefault(model, _Turns())


def kept_of(model: PreTrainedModel) -> Kept:
    """Return the results about a model as it is."""
    with _looking:
        found = _kept.get(model)
    same_form, same = (False, False) if found is None else found.seen.compare()
    if found is not None and same:
        return found
    with _looking:
        if (made := _kept.get(model)) is found or made is None:  # no other thread has looked again meanwhile
            made = _kept[model] = Kept(model, found.of_form if found is not None and same_form else {})
    return made


def remembered(model: PreTrainedModel, what: Hashable, make: Callable[[], T], values_matter: bool = True) -> T:
    """Return what `make()` gave the first time since the model's weights changed.

    With `values_matter=False` new numbers in the same tensors, as after a training step, change nothing.
    """
    return kept_of(model).get(what, make, values_matter)


@contextmanager
def lasting() -> Iterator[None]:
    """Tensors that are made within may be written in place later, in inference mode or outside of it: one call may be
    within it and the next not.
    """
    with torch.inference_mode(False), torch.no_grad():  # the former alone would switch gradients on
        yield


def place(weight: torch.Tensor) -> int:
    """Address of a tensor's numbers."""
    try:
        return weight.data_ptr()
    except RuntimeError:  # a tensor that wraps others has no memory of its own
        return 0


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
        found = f"{type(error).__name__}: {error}"
        say(f"{path} does not hold facts learned about a model ({found}); they are learned again")
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
    return digest({key: value for key, value in config.to_dict().items() if key != "_name_or_path"})


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


_OF_TORCH = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has: weights, parts and hooks, which are compared separately."""
_ELSEWHERE = frozenset({"acceleration", "generation_config"})
"""Attributes that decide nothing of a pass."""
_SKIPPED = (_OF_TORCH | _ELSEWHERE) - {"training"}
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})


class State:
    """Equal to a later one as long as a forward pass runs the same operations on the same tensors."""

    def __init__(self, model: PreTrainedModel, attention: str) -> None:
        """`attention`: the implementation of the model's passes (`ModelInfo.attention`)."""
        self._parts: list[Any] = [attention, *_options()]
        """Plain values; of all else the identity, a number that is its own while it lives."""
        self._lives: list[weakref.ref] = []
        self._seen: set[int] = {id(model)}
        self._open: list[torch.nn.Module] = [model]
        self._hooks(None)
        while self._open:
            self._module(self._open.pop())

    def __eq__(self, later: object) -> bool:
        if not isinstance(later, State) or self._parts != later._parts:
            return False
        return all(alive() is not None for alive in self._lives)

    def _module(self, module: torch.nn.Module) -> None:
        kind, attributes = type(module), module.__dict__
        self._parts.append(kind.__qualname__)  # not the class, which is another one once the model is accelerated
        self._same(kind.forward)
        if attributes["_forward_hooks"] or attributes["_forward_pre_hooks"]:
            self._hooks(module)
        for tensors in (attributes["_parameters"], attributes["_buffers"]):
            for name, tensor in tensors.items():
                self._parts.append(name)
                self._value(tensor)
        for name, part in attributes["_modules"].items():
            self._parts.append(name)
            self._value(part)
        self._attributes(attributes)

    def _attributes(self, attributes: Mapping[str, Any]) -> None:
        for name, value in list(attributes.items()):  # another thread's pass may add some
            if name not in _SKIPPED:
                self._parts.append(name)
                self._value(value)

    def _value(self, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self._parts += (kind, value)
        elif isinstance(value, torch.Tensor):
            self._same(value)
            self._parts += (place(value), value.dtype, value.device, value.shape, value.stride())
        elif isinstance(value, torch.nn.Module):
            self._same(value)
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._open.append(value)
        elif isinstance(value, (Mapping, list, tuple, set, frozenset)):
            self._container(value)
        else:
            self._same(value)
            if isinstance(value, PretrainedConfig) and id(value) not in self._seen:
                self._seen.add(id(value))
                self._attributes(vars(value))

    def _container(self, values: Any) -> None:
        self._parts += (type(values), len(values))
        if id(values) in self._seen:
            return  # it holds itself
        self._seen.add(id(values))
        for value in sorted(values, key=repr) if isinstance(values, (set, frozenset)) else values:
            self._value(value)
        if isinstance(values, Mapping):
            for value in values.values():
                self._value(value)
        self._seen.discard(id(values))

    def _hooks(self, module: torch.nn.Module | None) -> None:
        for hook in hooks_of(module):
            self._same(hook)

    def _same(self, thing: Any) -> None:
        self._parts.append(id(thing))
        try:
            self._lives.append(weakref.ref(thing))
        except TypeError:  # a small object that is known by its number alone
            self._parts.append(type(thing))


def _options() -> list[Any]:
    """Options of torch that choose between operations, or their precision."""
    backends: Any = torch.backends
    cuda, matmul = backends.cuda, backends.cuda.matmul
    return [
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_deterministic_debug_mode(),
        backends.fp32_precision,
        backends.mkldnn.matmul.fp32_precision,
        matmul.fp32_precision,
        matmul.allow_fp16_accumulation,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        cuda.preferred_blas_library(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.fp16_bf16_reduction_math_sdp_allowed(),
        # There is no public way to read what `sdpa_kernel(..., set_priority=True)` sets.
        *getattr(torch._C, "_get_sdp_priority_order", tuple)(),
    ]
