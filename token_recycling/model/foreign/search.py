"""Search for foreign code: in the modules of a model, around all modules, and in place of functions of torch and
transformers. Nothing runs. A model is searched again only if it changed (`facts`): every call compares the code in and
around it with its earlier state (`facts.Fingerprint`).
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, GenerationMixin, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..compat import LOOP, forward_hooks, methods_of_the_loop, replaced_kernels
from ..origin import held_by, home_of, is_code, is_foreign, is_of, is_own, name_of, package_of
from ..parts import (
    ATTRIBUTES_OF_TORCH,
    CACHES,
    FAMILIES,
    LIBRARIES,
    NEVER_IN_A_PASS,
    code_around,
    device_map_hooks,
    foreign_hooks,
    is_graph,
    own_class,
    parts_of,
    replaced_in,
    replaced_in_libraries,
)

_PREPARES_INPUTS = "_for_generation"
"""Suffix of methods that prepare the inputs of a forward pass; trials cover them, since they compare the logits."""
_ADAPTERS = frozenset({"peft"})
_TRAINERS = frozenset({"trl"})
"""Trainer libraries: functions that they set on a model call the functions they replace, except to compute a loss."""
_QUANTIZERS = frozenset(
    {
        *("bitsandbytes", "torchao", "optimum", "auto_gptq", "gptqmodel", "awq", "hqq", "eetq", "aqlm", "fbgemm_gpu"),
        *("compressed_tensors", "quark", "auto_round", "vptq", "flute", "spqr_quant", "fp_quant"),
    }
)
"""Libraries of quantized layers, whose code keeps no state."""
_CHOOSING = frozenset({"argmax", "multinomial", "softmax"})
"""Functions that choose a token, which no trial compares."""
_DROPOUT = ("dropout", "pdrop", "drop_prob", "layerdrop", "drop_path", "jitter", "noise")
"""Substrings in the names of numeric attributes that make forward passes in training mode random; noise: NEFTune."""
_LIBRARIES_OF_MODELS = frozenset({"transformers", "accelerate", "token_recycling"})
"""Libraries that set functions on modules themselves; these functions compute each row by itself."""
_NEVER_OF_FAMILIES = ("torch.ao.quantization.", "torch.ao.nn.qat.")
"""Packages of torch modules that record statistics of a pass; no family contains them."""
_ROW_BY_ROW = (
    *(nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.Dropout),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus),
    *(nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Softsign, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh),
)
"""Torch modules that compute each row by itself."""
_ATTENTION = "ALL_ATTENTION_FUNCTIONS"
"""Name under which a family's module holds the attention functions registered with transformers."""
_REGISTERED = ("transformers.integrations.", "transformers.masking_utils")
"""Modules of the functions that transformers registers for attention and its masks."""
_SHOWN = 3


@dataclass(frozen=True)
class Foreign:
    """One piece of code that is not the family's own."""

    description: str
    """Name and location of the code."""
    code: Any
    """The function, object or class itself."""
    holder: Any = None
    """The module of the model, or the library's module or class, that has the code; None for code around all modules.
    """
    name: str = ""
    """Its attribute name in the holder."""

    @property
    def is_of_torch(self) -> bool:
        """Whether it is a torch module, whose behavior follows from its attributes."""
        return isinstance(self.code, type) and is_own(self.code.__module__)

    @cached_property
    def is_known(self) -> bool:
        """Whether it belongs to an adapter library, whose code reads only its own modules, or to a trainer library."""
        return self.is_of_trainer or is_of(self.code, _ADAPTERS)

    @cached_property
    def is_of_trainer(self) -> bool:
        """Whether it is a function of a trainer library that replaces no other foreign code."""
        return _is_of_trainer(self.code)


def _is_of_trainer(code: Any) -> bool:
    function = getattr(code, "__func__", code)
    if not isinstance(function, FunctionType) or not is_of(function, _TRAINERS):
        return False
    replaced = (getattr(held, "__func__", held) for held in held_by(function))  # modules are searched separately
    return all(map(_is_of_trainer, filter(is_foreign, replaced)))


def listed(foreign: Sequence[Foreign]) -> str:
    """Return the descriptions of foreign code, the first `_SHOWN` in full."""
    names = ", ".join(piece.description for piece in foreign[:_SHOWN])
    return names if len(foreign) <= _SHOWN else f"{names} and {len(foreign) - _SHOWN} more"


# The whole search


def foreign_code(model: PreTrainedModel, quantized: bool = False) -> tuple[Foreign, ...]:
    """Return the foreign code around and in a model, in the order of its modules. Code of the layers of a `quantized`
    model is left out: the self-test has compared every row of a pass.
    """
    around = [(what, code) for what, code in code_around(model) if not _is_shipped(code)]
    pieces = [Foreign(what.format(None if code is None else name_of(code)), code) for what, code in around]
    pieces += itertools.starmap(_replaced, replaced_in_libraries())
    classes: set[type] = set()
    for path, module in model.named_modules():
        where, cls = path or type(model).__name__, own_class(module)
        if not is_own(cls.__module__) or _is_inserted(model, path, cls):
            pieces.append(Foreign(f"{where}, a {cls.__module__}.{cls.__qualname__}", cls, module))
        if is_own(cls.__module__) and cls not in classes:
            classes.add(cls)
            pieces += _replaced_methods(cls)
        # Some libraries set weights as attributes; parameters of other classes are self-tested as quantized ones.
        for name, value in (*module.named_buffers(recurse=False), *vars(module).items()):
            if isinstance(value, torch.Tensor) and not is_own((kind := type(value)).__module__):
                pieces.append(Foreign(f"{name} of {where}, a {kind.__module__}.{kind.__qualname__}", kind, module))
        for hook in foreign_hooks(module):
            pieces.append(Foreign(f"the forward hook {name_of(hook)} on {where}", hook, module))
        for name, function in _foreign_attributes(module):
            if not _may_be_called(model, module, name):
                continue
            set_as = f"the function {name_of(function)}, set as {name} of {where}"
            pieces.append(Foreign(set_as, function, module))
    for name in sorted({cls.__module__ for cls in classes if cls.__module__.startswith(FAMILIES)}):
        if name in sys.modules:
            pieces += itertools.starmap(_replaced, replaced_in(sys.modules[name]))
            attention = vars(sys.modules[name]).get(_ATTENTION, ALL_ATTENTION_FUNCTIONS)
            if attention is not ALL_ATTENTION_FUNCTIONS and not _is_of_family(attention, name):
                pieces.append(Foreign(f"the {_ATTENTION} of {name}, another {type(attention).__name__},", attention))
    return tuple(piece for piece in pieces if not (quantized and is_of(piece.code, _QUANTIZERS)))


def _is_shipped(function: Any, *families: str) -> bool:
    """Return whether a function registered for attention or its masks is one that transformers registers itself, or is
    from the modules `families`. Only such functions are known to behave as their names say.
    """
    return type(function) is FunctionType and str(home_of(function)).startswith((*_REGISTERED, *families))


def _is_of_family(table: Any, family: str) -> bool:
    """Return whether a table of attention functions is one that a family's module created for itself."""
    return type(table) is AttentionInterface and all(
        _is_shipped(function, family)
        for name, function in table.items()
        if function is not ALL_ATTENTION_FUNCTIONS.get(name)
    )


def _is_inserted(model: nn.Module, path: str, cls: type) -> bool:
    """Return whether a torch module that may read several rows, or a module of another family, was inserted into a
    module of transformers whose own code creates none of its class. Contents of other modules belong to those modules.
    """
    if cls.__module__.startswith(_NEVER_OF_FAMILIES):
        return True
    family = _family_of(cls)
    if issubclass(cls, PreTrainedModel) or not (family or cls.__module__.startswith("torch.nn.modules.")):
        return False
    if cls in _ROW_BY_ROW or _only_holds(cls):
        return False
    holder = _holder_of(model, path)
    families = {_family_of(base) for base in holder.__mro__ if base.__module__.startswith("transformers.")}
    if not families or (family is not None and family in families):
        return False
    return not any(_names(maker.__code__, cls.__name__) for maker in _makers(holder))


def _family_of(cls: type) -> str | None:
    """Return the package of the transformers family that a class belongs to, or None."""
    return cls.__module__.removeprefix(FAMILIES).partition(".")[0] if cls.__module__.startswith(FAMILIES) else None


def _makers(cls: type) -> list[FunctionType]:
    """Return the constructors by which transformers creates the submodules of a class."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith("transformers.")]
    return [inspect.unwrap(vars(base)["__init__"]) for base in bases if "__init__" in vars(base)]


def _holder_of(model: nn.Module, path: str) -> type:
    """Return the class of the module that contains the one at a path, skipping lists and dictionaries in between."""
    holder: type = nn.Module
    while path:
        path = path.rpartition(".")[0]
        holder = own_class(model.get_submodule(path))
        if not _only_holds(holder):
            break
    return holder


def _names(code: CodeType, name: str) -> bool:
    """Return whether code, or a function within it, uses a name."""
    return any(name in each.co_names for each in codes_within(code))


def codes_within(code: CodeType) -> Iterator[CodeType]:
    """Yield code, and that of all functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_within(constant)


def _only_holds(cls: type) -> bool:
    """Return whether a torch class only contains modules or tensors, as lists and dictionaries do."""
    return cls is nn.Sequential or (
        cls.__module__.startswith("torch.") and getattr(cls, "forward", None) is nn.Module.forward
    )


# Replacements in libraries


def _replaced(holder: Any, name: str, function: Any) -> Foreign:
    """Describe a function that another package has put into a module or class of a library."""
    return Foreign(f"the function {name} of {holder.__name__}, replaced by {name_of(function)}", function, holder, name)


def _replaced_methods(cls: type) -> Iterator[Foreign]:
    """Yield methods of a class of transformers or torch, and of its bases, that come from another package."""
    for base in cls.__mro__:
        if is_own(base.__module__) and base not in LIBRARIES:
            for name, function in list(vars(base).items()):
                if name not in NEVER_IN_A_PASS and is_code(function) and is_foreign(function):
                    what = f"the method {name} of {cls.__qualname__}, replaced by {name_of(function)}"
                    yield Foreign(what, function, cls, name)


# Functions set on a module


def _foreign_attributes(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield functions set on a module itself, also in lists and dictionaries. They shadow methods and modules of its
    class, or are called by them.
    """
    hooks, children = [*device_map_hooks(module)], dict(module.named_children())
    for name, value in list(vars(module).items()):
        if name in ATTRIBUTES_OF_TORCH:
            continue
        held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        # A module that is an attribute is called in place of a method or module of the same name, or not at all.
        if isinstance(value, torch.nn.Module) and name not in children and not hasattr(type(module), name):
            continue
        for item in [*held]:
            foreign = is_code(item) and (is_foreign(item) or (item is value and _is_substituted(module, name, item)))
            if foreign and item not in hooks:
                yield name, item


def _may_be_called(model: nn.Module, module: nn.Module, name: str) -> bool:
    """Return whether a forward pass or `generate` may call a function set on a module of a model: whether it shadows
    something, or the code of any class of the model names it. Foreign code is searched for what it names itself.
    """
    if name in NEVER_IN_A_PASS:
        return False
    if name.startswith("_") or hasattr(type(module), name) or name in dict(module.named_children()):
        return True
    homes = {base.__module__ for part in parts_of(model) for base in own_class(part).__mro__} - {"builtins"}
    homes |= {getattr(library, "__module__", None) or library.__name__ for library in LIBRARIES}
    return any((names := _names_of_source(home)) is None or name in names for home in homes)


@functools.cache
def _names_of_source(module: str) -> frozenset[str] | None:
    """Return all names and strings in the code of a Python module; None if its code cannot be read."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    try:
        code: CodeType = spec.loader.get_code(module)  # type: ignore[union-attr]
        constants = [constant for each in codes_within(code) for constant in (*each.co_names, *each.co_consts)]
    except Exception:  # loaders of users can fail in any way
        return None
    inner = [item for constant in constants if isinstance(constant, tuple) for item in constant]
    return frozenset(item for item in (*constants, *inner) if isinstance(item, str))


def _is_substituted(module: torch.nn.Module, name: str, function: Any) -> bool:
    """Return whether a function set on a module is one of torch or Python, which may read several rows, or has
    arguments from a user. Functions set by the module's family or by accelerate do not count.
    """
    inner, given = function, list[Any]()
    while isinstance(inner, (partial, MethodType)):
        if isinstance(inner, partial):
            given += [*inner.args, *inner.keywords.values()]
        inner = inner.func if isinstance(inner, partial) else inner.__func__
    cls = own_class(module)
    if inner is getattr(cls, name, None):
        return any(value is not module for value in given)
    if name.startswith("_") or is_graph(function) or package_of(home_of(inner)) in _LIBRARIES_OF_MODELS:
        return False
    if cls.__module__.startswith("torch.") and not hasattr(cls, name):
        return False  # torch's own constructor set it
    return not any(_names(maker.__code__, getattr(inner, "__name__", "")) for maker in _makers(cls))


# Refusals without a trial


def why_not_plain_loop(model: PreTrainedModel, foreign: Sequence[Foreign]) -> str | None:
    """Return why only transformers' own loop can decode with a model, whatever its forward passes give, or None.
    `foreign`: the foreign code in it.
    """
    cls = own_class(model)
    for name in methods_of_the_loop():
        function = getattr(cls, name, None)
        decodes = not name.endswith(_PREPARES_INPUTS)
        if decodes and function is not None and function is not getattr(GenerationMixin, name):
            return f"{cls.__name__} has a method {name} of its own, which decodes differently"
        if name == LOOP and is_foreign(function):
            return f"the method {name} of GenerationMixin was replaced by {name_of(function)}"
    for replaced in replaced_in_libraries():
        piece = _replaced(*replaced)
        if piece.holder in CACHES:
            return f"accelerated calls would not run {piece.description}"
        if piece.name in _CHOOSING:
            return f"{piece.description}: it chooses tokens"
    if kernels := replaced_kernels():
        return f"the kernel {kernels[0]} was registered through torch.library, and may read several rows"
    for path, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None:  # of an embedding of torch
            return f"{path} has a max_norm: embedding a token, even one of a draft, changes its weights"
    random = next(_random_in_training(model, {piece.holder for piece in foreign if piece.is_of_torch}), None)
    if random is not None:
        return f"{cls.__name__} is in training mode, where {random} makes forward passes differ; call model.eval()"
    return None


def _varies(module: nn.Module) -> bool:
    """Return whether a module in training mode uses random numbers or keeps statistics of its input."""
    return isinstance(module, nn.RReLU) or bool(getattr(module, "track_running_stats", False))


def _random_in_training(model: PreTrainedModel, put_there: Collection[nn.Module]) -> Iterator[str]:
    """Yield what makes passes of a model in training mode differ. `put_there`: torch modules that a user inserted."""
    for path, module in model.named_modules():
        if not module.training:
            continue
        numbers = {name: value for name, value in vars(module).items() if isinstance(value, (int, float)) and value > 0}
        for part in (module, *module.children()):  # attention may use the `p` of its dropout, even in eval mode
            if "Dropout" in type(part).__name__ and (getattr(part, "p", None) or 0) > 0:
                yield f"a {type(part).__name__} of {part.p} in {path or type(module).__name__}"
        if module in put_there and _varies(module):
            yield f"{path}, a {type(module).__name__},"
        if any(getattr(norm, "n_power_iterations", 0) for norm in (module, *forward_hooks(module))):
            yield f"the spectral norm of {path}"
        for name in numbers:
            if any(part in name for part in _DROPOUT):
                yield f"{name}={numbers[name]} of {path or type(module).__name__}"
        if getattr(module, "gradient_checkpointing", False):
            yield f"gradient checkpointing of {path or type(module).__name__}"


def why_not_patched(cache: Any) -> str | None:
    """Return which function is set on a cache or its layers, or None: decoding uses only the slots of a cache."""
    for holder in (cache, *cache.layers):
        for name, value in list(vars(holder).items()):
            if is_code(value) and is_foreign(value):
                set_as = f"set as {name} of a {type(holder).__name__}"
                return f"accelerated calls would not run the function {name_of(value)}, {set_as}"
    return None
