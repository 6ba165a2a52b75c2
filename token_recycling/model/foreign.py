"""Code in a model that is not its family's own: hooks, adapters, overridden methods, remote code, training mode.

Verifying a tree is exact if every row of a forward pass is computed alike, whatever other rows the pass has, and if
`generate` passes to the model what the loop passes. The families of transformers keep that (`architectures`). Code that
a user or another library brings may not: a steering hook may change the last row alone, an overridden
`prepare_inputs_for_generation` may change the tokens. `foreign_code` lists it, without running anything; `trial` tries
it. A model without such code costs nothing but the search, once for each of its forms.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .compat import LOOP, attention_name, forward_hooks, methods_of_the_loop
from .homes import home_of, is_foreign, is_own, name_of
from .replaced import foreign_modes, replaced_for_choosing, replaced_in_libraries

OF_FAMILIES = "transformers.models."
"""Where the modules of families are."""
_OBSERVING = frozenset({"transformers.utils.output_capturing", "token_recycling.model.inspection"})
"""Modules whose hooks note down what they see and change nothing."""
_USED_BY_FAMILIES = frozenset(
    {"numpy", "einops", "kernels", "flash_attn", "causal_conv1d", "mamba_ssm", "huggingface_hub"}
)
"""Packages that modules of families import functions of."""
_PREPARES_INPUTS = "_for_generation"
"""How the names of those methods end that prepare what a forward pass is given: a trial compares the logits."""
_SHOWN = 3
ATTRIBUTES_OF_TORCH = frozenset(vars(torch.nn.Module()))
CALLED_INSTEAD = frozenset(name for name, value in vars(torch.nn.Module).items() if value is None)
"""Attributes that torch sets on a module when it compiles it, and calls in place of its code."""
_DROPOUT = ("dropout", "drop_prob", "layerdrop", "drop_path", "jitter")
"""Parts of the names of numbers that make a forward pass in training mode random."""


@dataclass(frozen=True)
class Foreign:
    """One piece of code that is not the family's own."""

    what: str
    """A description that names it and where it is."""
    code: Any
    """The function, object or class itself."""
    module: torch.nn.Module | None = None
    """The module that it belongs to; None for one around all modules."""


def own_class(model: torch.nn.Module) -> type:
    """Return the class of a model as it was before it was accelerated."""
    kind: type = getattr(type(model), "plain_class", type(model))
    return kind


def foreign_code(model: PreTrainedModel) -> tuple[Foreign, ...]:
    """Return the foreign code around and in a model, in the order of its modules."""
    found = [Foreign(f"the global forward hook {name_of(hook)}", hook) for hook in foreign_hooks(None)]
    found += [Foreign(str(one), one.function) for one in replaced_in_libraries()]
    found += [Foreign(f"the mode of torch {name_of(mode)}", mode) for mode in foreign_modes()]
    found += [
        Foreign(f"the attention function {name_of(function)}, registered by name", function)
        for function in attention_functions(model)
        if is_foreign(function)
    ]
    classes: set[type] = set()
    for path, module in model.named_modules():
        where = path or type(model).__name__
        kind = own_class(module)
        if not is_own_class(kind):
            found.append(Foreign(f"{where}, a {kind.__module__}.{kind.__qualname__}", kind, module))
        elif kind not in classes:
            classes.add(kind)
            found += [
                Foreign(f"the method {name} of {kind.__qualname__}, replaced by {name_of(function)}", function, module)
                for name, function in replaced_methods(kind)
            ]
        for hook in foreign_hooks(module):
            found.append(Foreign(f"the forward hook {name_of(hook)} on {where}", hook, module))
        for name, function in foreign_attributes(module):
            found.append(Foreign(f"the function {name_of(function)}, set as {name} of {where}", function, module))
    for name in sorted({kind.__module__ for kind in classes if kind.__module__.startswith(OF_FAMILIES)}):
        for function_name, function in replaced_functions(sys.modules.get(name)):
            found.append(Foreign(f"the function {function_name} of {name}, replaced by {name_of(function)}", function))
    return tuple(found)


def listed(foreign: Sequence[Foreign]) -> str:
    """Describe foreign code."""
    names = ", ".join(piece.what for piece in foreign[:_SHOWN])
    return names if len(foreign) <= _SHOWN else f"{names} and {len(foreign) - _SHOWN} more"


def why_not_plain_loop(model: PreTrainedModel) -> str | None:
    """Return why transformers' own loop must decode with a model, whatever its forward passes give, or None."""
    kind = own_class(model)
    for name in methods_of_the_loop():
        function = getattr(kind, name, None)
        decodes = not name.endswith(_PREPARES_INPUTS)
        if decodes and function is not None and function is not getattr(GenerationMixin, name):
            return f"{kind.__name__} has a method {name} of its own, which decodes in another way"
        if name == LOOP and is_foreign(function):
            return f"the method {name} of GenerationMixin was replaced by {name_of(function)}"
    choosing = replaced_for_choosing()
    if choosing is not None:
        return f"{choosing}: it decides on tokens"
    random = next(_random_in_training(model), None)
    if random is not None:
        return f"{kind.__name__} is in training mode, where {random} makes forward passes random; call model.eval()"
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


# What is foreign


def is_own_class(kind: type) -> bool:
    """Whether a class of modules is of transformers or torch."""
    return is_own(kind.__module__)


def hooks_of(module: torch.nn.Module | None) -> Iterator[Callable[..., Any]]:
    """Hooks around a module's forward pass that may change it; for None those around every module that there is."""
    hooks = global_hooks() if module is None else forward_hooks(module)
    yield from (hook for hook in hooks if getattr(hook, "__module__", None) not in _OBSERVING)


def global_hooks() -> list[Callable[..., Any]]:
    """Return all hooks around every module that there is."""
    return [hook for hooks in _GLOBAL_HOOKS for hook in list(hooks.values())]


def _dictionaries_of_global_hooks() -> list[dict[int, Callable[..., Any]]]:
    """Return the dictionaries in which torch keeps hooks around all modules, which are always the same ones."""
    handles = [
        register(lambda *_: None) for register in (register_module_forward_hook, register_module_forward_pre_hook)
    ]
    dictionaries: list[Any] = [handle.hooks_dict_ref() for handle in handles]
    for handle in handles:
        handle.remove()
    return dictionaries


_GLOBAL_HOOKS = _dictionaries_of_global_hooks()


def device_map_hooks(module: torch.nn.Module) -> Iterator[Any]:
    """Hooks of a device map on a module, of the package accelerate, each by itself."""
    for hook in list(vars(module).values()):
        if hasattr(hook, "pre_forward") and not isinstance(hook, torch.nn.Module):
            yield from getattr(hook, "hooks", (hook,))


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calls of a module go to a graph that torch.compile made."""
    return is_graph(module.forward) or bool(compiled_calls(module))


def compiled_calls(module: torch.nn.Module) -> list[str]:
    """Names of a module's attributes that torch calls in place of the module's own code, and torch.compile has made."""
    names = CALLED_INSTEAD | {"forward"}
    return [name for name, value in vars(module).items() if name in names and is_graph(value)]


def is_graph(function: Any) -> bool:
    """Whether a function, method or module was made by torch.compile."""
    inner = getattr(function, "__func__", function)
    home = inner.__globals__.get("__name__") if type(inner) is FunctionType else type(inner).__module__
    return hasattr(inner, "get_compiler_config") and str(home).startswith("torch.")


def foreign_hooks(module: torch.nn.Module | None) -> Iterator[Callable[..., Any]]:
    """Foreign code among the hooks of a module, those of device maps included."""
    yield from filter(is_foreign, hooks_of(module))
    for hook in () if module is None else device_map_hooks(module):
        if not is_own(type(hook).__module__):
            yield hook


def attention_functions(model: torch.nn.Module) -> Iterator[Any]:
    """What is registered with transformers for a model's attention and its masks, below our own stand-ins."""
    config = getattr(model, "config", None)
    name = attention_name(config) if isinstance(config, PretrainedConfig) else None
    for interface in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        function = interface.get(name) if name is not None else None
        if function is not None:
            yield getattr(function, "before", function)


def foreign_attributes(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Functions that are set on a module itself: they shadow methods of its class, or are called by them."""
    hooks = [*device_map_hooks(module)]
    for name, value in list(vars(module).items()):
        if name in ATTRIBUTES_OF_TORCH or isinstance(value, (torch.nn.Module, type)) or not callable(value):
            continue
        if is_foreign(value) and value not in hooks:
            yield name, value


def replaced_methods(kind: type) -> Iterator[tuple[str, Any]]:
    """Methods of a class of transformers or torch that another package has put there."""
    for base in kind.__mro__:
        if is_own(base.__module__):
            for name, function in list(vars(base).items()):
                if isinstance(function, FunctionType) and is_foreign(function):
                    yield name, function


def replaced_functions(module: ModuleType | None) -> Iterator[tuple[str, Any]]:
    """Functions in a family's module that another package has put there."""
    for name, function in list(vars(module).items()) if module is not None else ():
        if not isinstance(function, FunctionType) or not is_foreign(function):
            continue
        if str(home_of(function)).partition(".")[0] not in _USED_BY_FAMILIES:
            yield name, function


def own_attributes(holder: Any) -> dict[str, Any]:
    """Attributes of an object but for those that every module has."""
    attributes = getattr(holder, "__dict__", {})
    return {name: value for name, value in list(attributes.items()) if name not in ATTRIBUTES_OF_TORCH}
