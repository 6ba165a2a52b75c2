"""The search for foreign code: in the modules of a model, around all modules, and in the place of functions of torch
and transformers. Nothing runs.

Libraries and scripts replace `torch.nn.functional.scaled_dot_product_attention` or `DynamicLayer.update`, to quantise
or to measure, and modes of torch stand before all operations: code of this kind belongs to no model, so that no module
shows it. Whether any function of the libraries was replaced is compared in every call, in 50 microseconds; a model is
searched once for each of its forms (`facts`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from transformers import (
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
    activations,
    cache_utils,
    masking_utils,
    modeling_rope_utils,
    pytorch_utils,
)
from transformers.integrations import moe, sdpa_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..compat import LOOP, attention_name, methods_of_the_loop, modes, with_hooks
from ..parts import ATTRIBUTES_OF_TORCH, device_map_hooks, global_hooks, hooks_of, own_class
from .origin import home_of, is_foreign, is_of, is_own, name_of, package_of

FAMILIES = "transformers.models."
"""Where the modules of families are."""
_PREPARES_INPUTS = "_for_generation"
"""How the names of those methods end that prepare what a forward pass is given: a trial compares the logits."""
_IMPORTED = frozenset(
    {
        *("numpy", "einops", "kernels", "flash_attn", "causal_conv1d", "mamba_ssm", "huggingface_hub"),
        *("safetensors", "typing_extensions"),
    }
)
"""Packages that modules of torch and transformers import functions of."""
_CACHES: list[Any] = [
    cache_utils,
    *(cls for cls in vars(cache_utils).values() if isinstance(cls, type) and cls.__module__ == cache_utils.__name__),
]
_LIBRARIES: list[Any] = [
    *(torch.nn.Module, PreTrainedModel, GenerationMixin),
    *(torch, torch.nn.functional, torch.Tensor, activations, masking_utils, modeling_rope_utils, pytorch_utils, moe),
    *(sdpa_attention, *_CACHES),
]
"""Modules and classes whose functions `generate` or a forward pass calls."""
_ADAPTERS = frozenset({"peft"})
_CHOOSING = frozenset({"argmax", "multinomial", "softmax"})
"""Functions by which a token is chosen, which no trial compares."""
_DROPOUT = ("dropout", "drop_prob", "layerdrop", "drop_path", "jitter")
"""Parts of the names of numbers that make a forward pass in training mode random."""
_SHOWN = 3


@dataclass(frozen=True)
class Foreign:
    """One piece of code that is not the family's own."""

    description: str
    """Names it and where it is."""
    code: Any
    """The function, object or class itself."""
    holder: Any = None
    """The module of the model, or the module or class of a library, that has it; None for code around all of them."""
    name: str = ""
    """Its name there."""

    @cached_property
    def is_adapter(self) -> bool:
        """Whether it is of a library of adapters, whose code reads nothing but the modules that it belongs to."""
        return is_of(self.code, _ADAPTERS)


def listed(foreign: Sequence[Foreign]) -> str:
    """Describe foreign code."""
    names = ", ".join(piece.description for piece in foreign[:_SHOWN])
    return names if len(foreign) <= _SHOWN else f"{names} and {len(foreign) - _SHOWN} more"


# All of it


def foreign_code(model: PreTrainedModel) -> tuple[Foreign, ...]:
    """Return the foreign code around and in a model, in the order of its modules."""
    pieces = [Foreign(f"the global forward hook {name_of(hook)}", hook) for hook in global_hooks() if is_foreign(hook)]
    pieces += replaced_in_libraries()
    pieces += [Foreign(f"the mode of torch {name_of(mode)}", mode) for mode in foreign_modes()]
    pieces += [
        Foreign(f"the attention function {name_of(function)}, registered by name", function)
        for function in attention_functions(model)
        if is_foreign(function)
    ]
    classes: set[type] = set()
    for path, module in model.named_modules():
        where, cls = path or type(model).__name__, own_class(module)
        if not is_own(cls.__module__):
            pieces.append(Foreign(f"{where}, a {cls.__module__}.{cls.__qualname__}", cls, module))
        elif cls not in classes:
            classes.add(cls)
            pieces += _replaced_methods(cls)
        for hook in foreign_hooks(module):
            pieces.append(Foreign(f"the forward hook {name_of(hook)} on {where}", hook, module))
        for name, function in _foreign_attributes(module):
            set_as = f"the function {name_of(function)}, set as {name} of {where}"
            pieces.append(Foreign(set_as, function, module))
    for name in sorted({cls.__module__ for cls in classes if cls.__module__.startswith(FAMILIES)}):
        pieces += _replaced_in(sys.modules.get(name))
    return tuple(pieces)


def replaceable_code(model: PreTrainedModel, parts: Sequence[torch.nn.Module], classes: Sequence[Any]) -> list[Any]:
    """Return code that runs in a model and may be replaced between calls: when any of it is another one, the model is
    searched again. `classes`: the classes of its `parts`.
    """
    code: list[Any] = [*filter(is_foreign, global_hooks())]
    code += [piece.code for piece in replaced_in_libraries()]
    code += foreign_modes()
    code += attention_functions(model)
    # With all that they derive from: a method may call that of its base.
    bases = dict.fromkeys(base for cls in dict.fromkeys(classes) for base in cls.__mro__)
    code += [vars(cls).get("forward") for cls in bases]
    of_families = [cls for cls in bases if cls.__module__.startswith(FAMILIES)]
    for holder in (*of_families, *{sys.modules[cls.__module__] for cls in of_families}):
        code += [function for function in vars(holder).values() if type(function) is FunctionType]
    for part in with_hooks(parts):
        code += foreign_hooks(part)
    return code


# In the place of a library's own


_replaced: tuple[list[list[Any]], tuple[Foreign, ...]] = [], ()
"""The functions as they were when they were last looked at, and those that were replaced."""


def replaced_in_libraries() -> tuple[Foreign, ...]:
    """Return the functions of torch and transformers that other packages have replaced, or added."""
    global _replaced
    functions = [[*vars(holder).values()] for holder in _LIBRARIES]
    try:
        is_as_before = functions == _replaced[0]
    except Exception:  # what is set there may fail to compare
        is_as_before = False
    if not is_as_before:
        _replaced = functions, tuple(piece for holder in _LIBRARIES for piece in _replaced_in(holder))
    return _replaced[1]


def _replaced_in(holder: Any) -> Iterator[Foreign]:
    """Functions of a module or class of torch or transformers that another package has put there."""
    for name, function in list(vars(holder).items()) if holder is not None else ():
        if not callable(function) or isinstance(function, (type, ModuleType)):
            continue
        if is_foreign(function) and package_of(home_of(function)) not in _IMPORTED:
            what = f"the function {name} of {holder.__name__}, replaced by {name_of(function)}"
            yield Foreign(what, function, holder, name)


def _replaced_methods(cls: type) -> Iterator[Foreign]:
    """Methods of a class of transformers or torch, and of those that it derives from, of another package."""
    for base in cls.__mro__:
        if is_own(base.__module__) and base not in _LIBRARIES:
            for name, function in list(vars(base).items()):
                if isinstance(function, FunctionType) and is_foreign(function):
                    what = f"the method {name} of {cls.__qualname__}, replaced by {name_of(function)}"
                    yield Foreign(what, function, cls, name)


def foreign_modes() -> list[Any]:
    """Modes of torch that are on in this thread and are another package's."""
    return [mode for mode in modes() if not is_own(type(mode).__module__)]


def attention_functions(model: torch.nn.Module) -> list[Any]:
    """What is registered with transformers for a model's attention and its masks, below our own stand-ins."""
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        return []
    name = attention_name(config)
    registered = [interface.get(name) for interface in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)]
    return [getattr(function, "before", function) for function in registered if function is not None]


# In a module


def foreign_hooks(module: torch.nn.Module) -> Iterator[Callable[..., Any]]:
    """Foreign code among the hooks of a module, those of device maps included."""
    yield from filter(is_foreign, hooks_of(module))
    for hook in device_map_hooks(module):
        if not is_own(type(hook).__module__):
            yield hook


def _foreign_attributes(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Functions that are set on a module itself: they shadow methods of its class, or are called by them."""
    hooks = [*device_map_hooks(module)]
    for name, value in list(vars(module).items()):
        if name in ATTRIBUTES_OF_TORCH or isinstance(value, (torch.nn.Module, type)) or not callable(value):
            continue
        if is_foreign(value) and value not in hooks:
            yield name, value


# What no trial can show


def why_not_plain_loop(model: PreTrainedModel) -> str | None:
    """Return why transformers' own loop must decode with a model, whatever its forward passes give, or None."""
    cls = own_class(model)
    for name in methods_of_the_loop():
        function = getattr(cls, name, None)
        decodes = not name.endswith(_PREPARES_INPUTS)
        if decodes and function is not None and function is not getattr(GenerationMixin, name):
            return f"{cls.__name__} has a method {name} of its own, which decodes in another way"
        if name == LOOP and is_foreign(function):
            return f"the method {name} of GenerationMixin was replaced by {name_of(function)}"
    for piece in replaced_in_libraries():
        if piece.holder in _CACHES:
            return f"accelerated calls do without {piece.description}"
        if piece.name in _CHOOSING:
            return f"{piece.description}: it decides on tokens"
    random = next(_random_in_training(model), None)
    if random is not None:
        return f"{cls.__name__} is in training mode, where {random} makes forward passes random; call model.eval()"
    return None


def _random_in_training(model: PreTrainedModel) -> Iterator[str]:
    for path, module in model.named_modules():
        if not module.training:
            continue
        numbers = {name: value for name, value in vars(module).items() if isinstance(value, (int, float)) and value > 0}
        if "Dropout" in type(module).__name__ and "p" in numbers:
            yield f"{path}, a {type(module).__name__} of {numbers['p']}"
        for name in numbers:
            if any(part in name for part in _DROPOUT):
                yield f"{name}={numbers[name]} of {path or type(module).__name__}"
        if getattr(module, "gradient_checkpointing", False):
            yield f"gradient checkpointing of {path or type(module).__name__}"


def why_not_patched(cache: Any) -> str | None:
    """Return which function is set on the object of a cache, of which decoding keeps the slots alone, or None."""
    for holder in (cache, *cache.layers):
        for name, value in list(vars(holder).items()):
            if isinstance(value, (FunctionType, MethodType)) and is_foreign(value):
                set_as = f"set as {name} of a {type(holder).__name__}"
                return f"accelerated calls do without the function {name_of(value)}, {set_as}"
    return None
