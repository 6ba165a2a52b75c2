"""Plain code: foreign code in a model that keeps no state, so that one trial is valid while the code's values stay
equal.

Code is plain if its functions store nothing outside their local variables, use only harmless names, and reach only
immutable values, tensors, modules, plain functions, and libraries without state. The search follows functions through
closures, defaults and the globals that they name, and modules through the attributes that are named. A name is harmless
if it belongs to an operation on tensors, to a method of an immutable type, or to a module or configuration within
reach, or if it is listed here. All other code runs through `generate`, whatever its purpose: code that uses an object
of a user's class, `random` or `torch.manual_seed`, or that appends to a list, which would record the passes of drafts.
Adapters of peft, and functions that trl sets on a model, are known to keep no state and are not searched.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import typing
import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator
from enum import Enum
from types import FunctionType, GenericAlias, MappingProxyType, MethodType, ModuleType, UnionType
from typing import Any

import torch
from torch.overrides import get_overridable_functions
from transformers import PretrainedConfig, modeling_outputs
from transformers.utils import ModelOutput

from ..facts import address_of, describe, times_written
from ..origin import held_by, is_foreign, is_own, package_of
from ..parts import ATTRIBUTES_OF_TORCH, FAMILIES, foreign_hooks, own_class, parts_of
from ..prepacking import is_packed
from .bytecode import operations_in
from .search import Foreign, codes_within

_LIBRARIES = frozenset(
    {
        *("torch", "transformers", "accelerate", "token_recycling", "einops", "typing", "types", "__future__"),
        *("math", "functools", "itertools", "collections", "enum", "dataclasses", "logging", "warnings", "time"),
    }
)
"""Packages whose functions keep no state that a forward pass could change."""
_LIBRARIES_BY_NAME = frozenset({"torch", "time"})
"""Packages among `_LIBRARIES` for which this holds only for harmless names."""
_BUILTINS = frozenset(
    {
        *("abs", "divmod", "max", "min", "pow", "round", "sum", "len", "range", "slice", "sorted", "reversed"),
        *("all", "any", "enumerate", "filter", "map", "zip", "callable", "getattr", "hasattr", "isinstance"),
        *("bool", "complex", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple"),
        *("issubclass", "super", "repr", "NotImplemented", "Ellipsis"),
    }
)
"""Builtin functions that keep no state; exception classes are allowed too."""
_FURTHER_NAMES = frozenset(
    {
        *("nn", "functional", "linalg", "fft", "special", "utils", "checkpoint", "Tensor", "Size", "is_tensor"),
        *("no_grad", "inference_mode", "enable_grad", "set_grad_enabled", "autocast", "is_grad_enabled"),
        *("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "tensor", "zeros", "finfo", "iinfo"),
        *("dropout", "scaled_dot_product_attention"),  # random only in training mode
        *("forward", "training", "get_submodule", "children", "named_children", "modules", "named_modules"),
        *("warning_once", "warn", "sleep", "value", "wraps", "partial"),
        *("__name__", "__version__", "__class__", "__init__", "__getitem__"),
    }
)
"""Harmless names of torch namespaces, modes and factories, and of methods of modules."""
_CHANGING = frozenset({"append", "extend", "insert", "pop", "remove", "sort", "reverse", "update", "clear", "add"})
"""Methods that change lists and dictionaries: harmless on those that the code creates, unless it has a configuration.
"""
_LOGGING = frozenset({"debug", "info", "warning", "error"})
"""Methods of loggers: harmless in classes, which log exceptions from the rule. A hook or function would log other
forward passes than those of `generate`.
"""
_NAMES_OF_CLASSES = frozenset(
    {
        *("past_key_values", "get_seq_length", "get_mask_sizes", "attention_mask", "cache_position"),
        *("prepare_inputs_for_generation", "get_input_embeddings", "get_output_embeddings", "get_decoder"),
        *("gradient_checkpointing", "get_text_config", "to_tuple", "use_return_dict"),
        *("requires_grad", "grad", "grad_fn", "is_leaf", "retains_grad", "is_inference"),
    }
)
"""Names that are harmless only in a class of modules or outputs, which passes the values on. A hook could branch by
them on the length of a sequence, or on values that change between calls, which no trial varies.
"""
_NOT_IN_A_PASS = (
    *("__", "set_", "get_", "_get_", "_init", "_set_", "from_", "_from_", "save_", "_load", "resize_", "generate"),
    *("_prepare_generation", "reset_parameters", "tie_weights", "extra_repr"),
)
"""Prefixes of methods that no forward pass calls unless the code names them."""
_CALLED_BY_PYTHON = frozenset({"__call__", "__getattr__", "__getattribute__", "__getitem__", "__post_init__"})
_IMMUTABLE = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, type(...), Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.finfo, torch.iinfo),
)
_HINTS = (GenericAlias, UnionType, typing.TypeVar, type(typing.Any), type(typing.Optional[int]), type(typing.List[int]))  # noqa: UP006, UP045
_SMALL = 4096
"""Elements up to which a tensor is compared in every call; of a larger one, its address and version counter."""
_EXPONENTS = 4
"""Binary exponents per magnitude, so that training seldom changes it."""
_FEW = 16
_MOST_NUMBERS = 24
_INTEGERS = {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}

Gist = tuple[float | None, int]
"""The number that fills a weight, or None, and the magnitude of a sample of its elements."""
Gists = dict[Any, tuple[int, Gist]]
"""By weight, its version counter when it was last read, and its gist."""


@functools.cache
def _harmless_names() -> frozenset[str]:
    """Return names whose use only reads or computes, and changes at most objects that the code created itself."""
    operations = {function.__name__ for functions in get_overridable_functions().values() for function in functions}
    # A function that a library has put in the place of an operation may have another `__name__`.
    operations |= {name for name in vars(torch.nn.functional) if hasattr(torch.ops.aten, name)}
    names = {*operations, *(name for cls in torch.Tensor.__mro__ for name in vars(cls))}
    names |= {name for cls in (*_IMMUTABLE, tuple, frozenset, MappingProxyType, math) for name in dir(cls)}
    names |= {name for name, value in vars(torch).items() if isinstance(value, _IMMUTABLE)}
    names |= {name for name, value in vars(torch.nn).items() if isinstance(value, type)}
    names |= {name for cls in vars(modeling_outputs).values() for name in getattr(cls, "__dataclass_fields__", ())}
    names = {name for name in names if not name.startswith("_")}
    return frozenset(names - _NAMES_OF_CLASSES | _FURTHER_NAMES | _CHANGING)


@functools.cache
def _is_harmless(name: str) -> bool:
    return name in _FURTHER_NAMES or (name in _harmless_names() and "rand" not in name and not _is_random(name))


def _is_random(name: str) -> bool:
    """Return whether a torch operation uses random numbers."""
    operation = getattr(torch.ops.aten, name, None)
    variants = [getattr(operation, variant) for variant in getattr(operation, "overloads", list)()]
    return any(torch.Tag.nondeterministic_seeded in variant.tags for variant in variants)


class Reachable:
    """Objects that a piece of foreign code reaches, and whether it is plain."""

    def __init__(self, model: torch.nn.Module, piece: Foreign) -> None:
        self.description, self.code = piece.description, piece.code
        self.reason: str | None = None
        """Why the code is not plain, or None."""
        self.functions: list[FunctionType] = []
        self.values: list[tuple[str, Any]] = []
        """Immutable values, configurations and tensors, by name."""
        self.variables: list[tuple[str, Any]] = []
        """Outside variables and defaults of the functions, by name."""
        self._names: set[str] = set()
        self._strings: set[str] = set()
        self._namespaces: list[ModuleType] = []
        """Python modules; their contents are followed once the code names them."""
        self._resolved: set[str] = set()
        """Names found in those modules and in classes."""
        self._in_place = self._names_attributes_by_strings = self._reaches_a_logger = False
        self._seen: dict[int, Any] = {}
        self._modules: list[torch.nn.Module] = parts_of(model)
        self._parts = {id(part) for part in self._modules}
        self._methods: list[tuple[str, Any]] = []
        """Methods that are followed once the code names them."""
        self._unread: list[tuple[str, Any]] = [(piece.description, piece.code)]
        self.is_class = isinstance(piece.code, type)
        """Whether the code is a class, which also names sizes of its weights."""
        while self.reason is None and (self._unread or self._follow_names()):
            name, item = self._unread.pop()
            if id(item) not in self._seen:
                self._seen[id(item)] = item
                self._follow(name, item)
        if self.reason is None:
            self.reason = self._why_not_names()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors that the code reaches."""
        return [value for _, value in self.values if isinstance(value, torch.Tensor)]

    def _follow_names(self) -> bool:
        """Queue the contents of modules and classes that the code names; return whether there is anything new."""
        names = self._names | self._strings
        named = [(name, method) for name, method in self._methods if name in names]
        named += [item for namespace in self._namespaces for item in self._contents(namespace, names)]
        named += [item for module in self._modules for item in _attributes(module, names)]
        self._unread += [(name, item) for name, item in named if id(item) not in self._seen]
        return bool(self._unread)

    def _why_not_names(self) -> str | None:
        """Return a reason that gives a name which is not harmless, or None."""
        strings = self._strings if self._names_attributes_by_strings else set()
        names = self._names | strings
        unknown = {name for name in names - self._resolved if not _is_harmless(name)}
        if self._reaches_a_logger and not self.is_class and (logged := names & _LOGGING):
            return f"it logs its calls ({min(logged)})"
        if self.is_class:
            unknown -= _NAMES_OF_CLASSES | _LOGGING
        elif unvaried := (self._names | self._strings) & _NAMES_OF_CLASSES:
            return f"it reads {min(unvaried)}, which no trial varies"
        for module in self._modules if unknown else ():
            unknown.difference_update(_names_of(module))
        if unknown:
            return f"it uses {min(unknown)}"
        configs = [value for _, value in self.values if isinstance(value, PretrainedConfig)]
        if configs and not self.is_class and names & _CHANGING:
            return "it may change a configuration"
        containers = {
            name for config in configs for name, value in vars(config).items() if isinstance(value, (dict, list))
        }
        if self._in_place and (written := names & containers):
            return f"it may write to {min(written)} of a configuration"
        tensors = {name for module in self._modules if self._in_place for name in _tensors(module)}
        if written := names & tensors:
            return f"it may write to {min(written)} of a module"
        return None

    def _follow(self, name: str, item: Any) -> None:
        foreign = not is_own(type(item).__module__)  # whatever its bases, its methods may keep state
        if type(item) in weakref.ProxyTypes or (
            foreign and not isinstance(item, (type, torch.nn.Module, PretrainedConfig))
        ):
            self.reason = f"it reaches {name}, a {type(item).__name__}, which may change"
        elif isinstance(item, (*_IMMUTABLE, torch.Tensor, PretrainedConfig)):
            self.values.append((name, item))
        elif isinstance(item, (tuple, frozenset)):
            self._unread += [(name, member) for member in item]
        elif isinstance(item, functools.partial):
            self._unread += [(name, part) for part in (item.func, *item.args, *item.keywords.values())]
        elif isinstance(item, MethodType):
            self._unread += [(name, item.__func__), (name, item.__self__)]
        elif isinstance(item, (staticmethod, classmethod)):
            self._unread.append((name, item.__func__))
        elif isinstance(item, property):
            self._unread += [(name, function) for function in (item.fget, item.fset) if function is not None]
        elif isinstance(item, FunctionType):
            self._function(name, item)
        elif isinstance(item, type):
            self._class(name, item)
        elif isinstance(item, torch.nn.Module):
            self._module(name, item)
        elif isinstance(item, ModuleType):
            self._namespace(item)
        elif not self._is_stateless(item):
            self.reason = f"it reaches {name}, a {type(item).__name__}, which may change"

    def _is_stateless(self, item: Any) -> bool:
        """Return whether an object written in a compiled language, or by this package, keeps no state."""
        if isinstance(item, logging.Logger):
            self._reaches_a_logger = True
            return True
        if isinstance(item, _HINTS) or is_packed(item):
            return True
        if not callable(item) or type(item).__module__ not in ("builtins", "torch._ops"):
            return False
        holder = getattr(item, "__self__", getattr(item, "__objclass__", None))
        if holder is None or isinstance(holder, (ModuleType, type)):
            home = getattr(item, "__module__", None) or getattr(holder, "__module__", getattr(holder, "__name__", ""))
            package = package_of(str(home).lstrip("_"))
            if package in _LIBRARIES_BY_NAME:
                self._names.add(item.__name__)
            return package in _LIBRARIES or (package == "builtins" and item.__name__ in _BUILTINS)
        return False

    def _function(self, name: str, function: FunctionType) -> None:
        if is_own(function.__globals__.get("__name__")):
            home = package_of(function.__globals__.get("__name__"))
            inner = function.__dict__.get("__wrapped__")  # set by a library's decorator
            self._unread += [(name, item) for item in held_by(function) if is_foreign(item)]
            if home not in _LIBRARIES:
                self.reason = f"it reaches {name}, a function of {home}"
            elif inner is not None:
                self._unread.append((name, inner))
            elif home in _LIBRARIES_BY_NAME:
                self._names.add(function.__name__)
            return
        self.functions.append(function)
        operations, path = operations_in(function.__code__), function.__qualname__
        free = function.__code__.co_freevars
        for operation, variable in operations.stores:
            if operation == "IMPORT_NAME":
                if package_of(variable) not in _LIBRARIES:
                    self.reason = f"{path} imports {variable}"
                    return
            elif operation != "STORE_DEREF" or variable in free:
                self.reason = f"{path} stores {variable}"
                return
        self._names |= operations.attributes
        self._strings |= operations.strings
        self._in_place = self._in_place or operations.in_place
        if "getattr" in operations.globals:
            self._names_attributes_by_strings = True
        variables: list[tuple[str, Any]] = []
        for variable, cell in zip(free, function.__closure__ or (), strict=True):
            try:
                variables.append((variable, cell.cell_contents))
            except ValueError:  # still empty
                self.reason = f"{path} reads {variable}, which has no value"
        values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        variables += [(f"a default of {path}", value) for value in values]
        variables += [*function.__dict__.items()]
        for variable in sorted(operations.globals):
            if variable in function.__globals__:
                variables.append((variable, function.__globals__[variable]))
            elif variable not in _BUILTINS and not variable.endswith(("Error", "Warning", "Exception")):
                self.reason = f"{path} uses {variable}"
        self.variables += variables
        self._unread += variables

    def _namespace(self, module: ModuleType) -> None:
        if is_own(module.__name__) and package_of(module.__name__) not in _LIBRARIES:
            self.reason = f"it uses {module.__name__}"
        self._reaches_a_logger = self._reaches_a_logger or module is logging
        self._namespaces.append(module)

    def _contents(self, module: ModuleType, names: Collection[str]) -> Iterator[tuple[str, Any]]:
        """Yield the contents of a Python module that the code names; of a library, only the modules among them."""
        contents = {name: value for name, value in vars(module).items() if name in names}
        package = package_of(module.__name__)
        if package not in _LIBRARIES_BY_NAME:
            self._resolved |= contents.keys()
        for name, value in contents.items():
            if package not in _LIBRARIES or isinstance(value, ModuleType):
                yield name, value

    def _class(self, name: str, cls: type) -> None:
        if is_own(cls.__module__):
            package, exception = package_of(cls.__module__), issubclass(cls, BaseException)
            if package not in _LIBRARIES and not exception and cls.__name__ not in _BUILTINS:
                self.reason = f"it uses {name}, a class of {package}"
            elif package in _LIBRARIES_BY_NAME:
                self._names.add(cls.__name__)
        elif issubclass(cls, (torch.nn.Module, ModelOutput)):
            for base in cls.__mro__:
                if is_own(base.__module__):
                    continue
                self._resolved |= getattr(base, "__dataclass_fields__", {}).keys()
                for attribute, value in list(vars(base).items()):
                    if isinstance(value, (FunctionType, staticmethod, classmethod, property)):
                        called = not attribute.startswith(_NOT_IN_A_PASS) or attribute in _CALLED_BY_PYTHON
                        (self._unread if called else self._methods).append((attribute, value))
                        self._resolved.add(attribute)
        elif not issubclass(cls, BaseException):
            self.reason = f"it reaches the class {cls.__qualname__}"

    def _module(self, name: str, module: torch.nn.Module) -> None:
        if id(module) in self._parts:
            return
        for part in parts_of(module):  # a module outside the model, such as a probe
            self._seen[id(part)] = part
            self._parts.add(id(part))
            self._modules.append(part)
            self._unread += [(name, hook) for hook in foreign_hooks(part)]
            if not is_own(type(part).__module__):
                self._unread.append((name, type(part)))
            self.values += [*part.named_parameters(name, recurse=False), *part.named_buffers(name, recurse=False)]


def _names_of(module: torch.nn.Module) -> Iterator[str]:
    """Yield the names of a module's own attributes, children and tensors, family methods, and config options."""
    yield from vars(module).keys() - ATTRIBUTES_OF_TORCH
    yield from (name for name, _ in module.named_children())
    yield from _tensors(module)
    for base in own_class(module).__mro__:
        if not is_own(base.__module__) or base.__module__.startswith(FAMILIES):
            yield from (name for name in vars(base) if not name.startswith("__"))
    config = getattr(module, "config", None)
    yield from vars(config) if isinstance(config, PretrainedConfig) else ()


def _tensors(module: torch.nn.Module) -> Iterator[str]:
    """Yield the names of a module's own weights and buffers."""
    for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        yield name


def _attributes(module: torch.nn.Module, names: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield attributes and buffers of a module, and attributes of its classes, that have one of the names. Methods of
    classes are followed separately.
    """
    attributes = vars(module)
    yield from ((name, attributes[name]) for name in (attributes.keys() & names) - ATTRIBUTES_OF_TORCH)
    yield from ((name, value) for name, value in module.named_buffers(recurse=False) if name in names)
    for base in own_class(module).__mro__[:-1]:
        if base is torch.nn.Module:
            break
        for name in vars(base).keys() & names:
            value = vars(base)[name]
            if not hasattr(type(value), "__get__") and not name.startswith("__"):
                yield name, value


def reachable(model: torch.nn.Module, foreign: Iterable[Foreign]) -> list[Reachable]:
    """Return the objects that each piece of foreign code reaches, except known code. Shared code is searched once."""
    pieces: dict[int, Foreign] = {}
    for piece in foreign:
        if not piece.is_known:
            pieces.setdefault(id(piece.code), piece)
    return [Reachable(model, piece) for piece in pieces.values()]


def numbers_in(searched: Iterable[Reachable], of_modules: bool = True) -> list[int]:
    """Return integers that foreign code reaches: token ids, numbers of rows or positions on which it may branch. By
    default those of modules are included, which may be sizes of weights.
    """
    numbers: dict[int, None] = {}

    def add(value: Any) -> None:
        if isinstance(value, (tuple, frozenset, range)):
            for item in [*value][:_FEW]:
                add(item)
        elif isinstance(value, torch.Tensor) and value.dtype in _INTEGERS:
            for item in value.flatten()[:_FEW].tolist():
                add(item)
        elif type(value) is int and value > 1:
            numbers[value] = None

    for reach in searched:
        for function in reach.functions:
            for code in codes_within(function.__code__):
                for constant in code.co_consts:
                    add(constant)
        for _, value in reach.values if of_modules else reach.variables:
            add(value)
    return [*numbers][:_MOST_NUMBERS]


def form_of(foreign: Iterable[Foreign], searched: Iterable[Reachable], gists: Gists) -> Hashable:
    """Return a key that is equal for code that behaves the same. Plain code contributes its functions and all values
    that they reach; adapters the attributes of their modules; trainers the functions; torch modules their attributes
    and weights. Other modules with foreign code contribute which weights are filled with one number, such as 0, and the
    magnitude of the others. `gists`: gists of weights from earlier calls.
    """
    values: list[Any] = []
    objects: list[Any] = []
    filled: dict[int, torch.Tensor] = {}
    for piece in foreign:
        values.append(piece.description)
        if piece.is_of_trainer:  # its behavior does not depend on the module's weights
            objects.append(piece.code)
            continue
        if not isinstance(piece.holder, torch.nn.Module):
            continue
        if piece.is_known or piece.is_of_torch:
            attributes = {
                name: value for name, value in [*vars(piece.holder).items()] if name not in ATTRIBUTES_OF_TORCH
            }
            describe(attributes, values, objects)
        weights = [*piece.holder.parameters(), *piece.holder.buffers(recurse=False)]
        if piece.is_of_torch:
            values += (_content(weight, gists) for weight in weights)
        else:
            filled |= {id(weight): weight for weight in weights}
    values += [(weight.shape, _gist_of(weight, gists)) for weight in filled.values()]
    for reach in searched:
        values += [function.__code__ for function in reach.functions]
        for name, value in reach.values:
            values.append(name)
            if isinstance(value, torch.Tensor):
                values.append(_content(value, gists))
            else:
                describe(value, values, objects)
    return tuple(values), tuple(map(id, objects))


def _content(tensor: torch.Tensor, gists: Gists) -> tuple[Any, ...]:
    """Return a key that is equal while a tensor has the same elements. Torch does not count some writes: in a large
    tensor they are detected only if it was filled with one number, with which it may have had no effect.
    """
    if tensor.numel() <= _SMALL and not tensor.is_meta:
        return tensor.shape, tensor.dtype, tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()
    return id(tensor), address_of(tensor), tensor.shape, times_written(tensor), _gist_of(tensor, gists)


def _gist_of(tensor: torch.Tensor, gists: Gists) -> Gist:
    """Return the gist of a weight, which shows whether the weight has any effect. It is computed again if the weight is
    small, was written to, or was filled with one number: torch does not count writes through `.data` or numpy.
    """
    place, written = (id(tensor), address_of(tensor)), times_written(tensor)
    before = gists.get(place)
    if before is None or before[0] != written or before[1][0] is not None or tensor.numel() <= _SMALL:
        gists[place] = written, (None, 0)
        with contextlib.suppress(Exception):  # tensors of other libraries and unusual dtypes can fail in any way
            gists[place] = written, _gist_within(tensor.detach())
    return gists[place][1]


def _gist_within(tensor: torch.Tensor) -> Gist:
    """Compute the gist of a tensor. Both ends are compared first: they differ in most weights."""
    if not tensor.numel() or tensor.is_meta:
        return None, 0
    if bool(tensor[(0,) * tensor.ndim] == tensor[(-1,) * tensor.ndim]):
        least, most = tensor.aminmax()
        if bool(least == most):
            return float(least), 0
    some = tensor.flatten()[:: max(1, tensor.numel() // _SMALL)]
    return None, math.frexp(float(some.abs().max()))[1] // _EXPONENTS
