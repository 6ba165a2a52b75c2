"""Modules, hooks and compiled calls of a model, and the code around it.

Libraries and scripts replace functions of torch and transformers, to quantize or to measure, and torch modes intercept
all operations. Such code belongs to no module of a model. So every call checks whether any function of the libraries
was replaced, which takes 50 microseconds.

Nothing here runs a model or judges it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
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

from .compat import (
    CHILDREN,
    MODES,
    attention_name,
    forward_hooks,
)
from .origin import home_of, is_code, is_foreign, is_foreign_hook, is_own, package_of

ATTRIBUTES_OF_TORCH = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has."""
CALLED_INSTEAD = frozenset(name for name, value in vars(torch.nn.Module).items() if value is None)
"""Attributes that torch sets on a module when it compiles it, and calls in place of its code."""
_OBSERVING = frozenset({"transformers.utils.output_capturing", "token_recycling.model.hidden"})
"""Modules whose hooks only record values and change nothing."""
FAMILIES = "transformers.models."
"""Package of the modules of model families."""
CACHES: list[Any] = [
    cache_utils,
    *(cls for cls in vars(cache_utils).values() if isinstance(cls, type) and cls.__module__ == cache_utils.__name__),
]
LIBRARIES: list[Any] = [
    *(torch.nn.Module, PreTrainedModel, GenerationMixin),
    *(torch, torch.nn.functional, torch.Tensor, activations, masking_utils, modeling_rope_utils, pytorch_utils, moe),
    *(sdpa_attention, *CACHES),
]
"""Modules and classes whose functions `generate` or a forward pass calls."""
_IMPORTED = frozenset(
    {
        *("numpy", "einops", "kernels", "flash_attn", "causal_conv1d", "mamba_ssm", "huggingface_hub"),
        *("safetensors", "typing_extensions"),
    }
)
"""Packages from which modules of torch and transformers import functions."""
NEVER_IN_A_PASS = frozenset(
    {
        *("backward", "register_hook", "retain_grad", "__repr__", "__str__", "__format__", "load", "save", "compile"),
        *("from_pretrained", "save_pretrained", "push_to_hub", "generate"),
    }
)
"""Functions that libraries replace to trace, show, load or save, and that run neither in a pass nor between passes."""
_OF_GRAPHS = ("__compiled_fn_", "__resume_at_")
"""Prefixes of the names under which compiled code finds its graphs, in the module of its source."""


# Modules


def parts_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the model and all modules in it, each once, the model first."""
    parts, seen = [model], {model}
    for part in parts:  # the list grows in the loop
        children = part.__dict__.get(CHILDREN)
        for child in dict(part.named_children()).values() if children is None else children.values():
            if child is not None and child not in seen:
                seen.add(child)
                parts.append(child)
    return parts


def own_class(model: torch.nn.Module) -> type:
    """Return the class that a model had before it was accelerated."""
    cls: Any = type(model)
    return cls.plain_class() if hasattr(cls, "plain_class") else cls


# Hooks and compiled calls


def hooks_of(module: torch.nn.Module | None) -> Iterator[Callable[..., Any]]:
    """Yield hooks around a module's forward pass that may change it; for None, the global hooks."""
    hooks = global_hooks() if module is None else forward_hooks(module)
    yield from (hook for hook in hooks if getattr(hook, "__module__", None) not in _OBSERVING)


def global_hooks() -> list[Callable[..., Any]]:
    """Return all global hooks, which torch runs around every module."""
    return [hook for hooks in _GLOBAL_HOOKS for hook in list(hooks.values())]


def _dictionaries_of_global_hooks() -> list[dict[int, Callable[..., Any]]]:
    """Return the dictionaries in which torch keeps global hooks; torch never replaces them."""
    handles = [
        register(lambda *_: None) for register in (register_module_forward_hook, register_module_forward_pre_hook)
    ]
    dictionaries: list[Any] = [handle.hooks_dict_ref() for handle in handles]
    for handle in handles:
        handle.remove()
    return dictionaries


_GLOBAL_HOOKS = _dictionaries_of_global_hooks()


def device_map_hooks(module: torch.nn.Module) -> Iterator[Any]:
    """Yield each device map hook that the package accelerate has set on a module."""
    for hook in list(vars(module).values()):
        if hasattr(hook, "pre_forward") and not isinstance(hook, torch.nn.Module):
            yield from getattr(hook, "hooks", (hook,))


def foreign_hooks(module: torch.nn.Module) -> Iterator[Callable[..., Any]]:
    """Yield the foreign hooks of a module, those of device maps included."""
    yield from filter(is_foreign_hook, forward_hooks(module))
    for hook in device_map_hooks(module):
        if not is_own(type(hook).__module__):
            yield hook


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether calls of a module run a graph made by torch.compile."""
    return is_graph(module.forward) or bool(compiled_calls(module))


def compiled_calls(module: torch.nn.Module) -> list[str]:
    """Return the names of a module's attributes made by torch.compile, which torch calls in place of its own code."""
    names = CALLED_INSTEAD | {"forward"}
    return [name for name, value in vars(module).items() if name in names and is_graph(value)]


def is_graph(function: Any) -> bool:
    """Return whether a function, method or module was made by torch.compile."""
    inner = getattr(function, "__func__", function)
    home = inner.__globals__.get("__name__") if type(inner) is FunctionType else type(inner).__module__
    return hasattr(inner, "get_compiler_config") and str(home).startswith("torch.")


def uncompiled(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model without torch.compile of the whole model or of its `forward`: another object with the same parts
    and weights, or the model itself if it is not compiled. Compiled parts stay compiled.
    """
    if not is_compiled(model):
        return model
    plain = copy.copy(model)
    for name in compiled_calls(plain):
        delattr(plain, name)
    if is_graph(model.forward):
        original = model.forward.__wrapped__
        plain.forward = original if hasattr(original, "__self__") else MethodType(original, plain)
    return plain


def is_uncompiled(plain: PreTrainedModel, model: PreTrainedModel) -> bool:
    """Return whether `uncompiled(model)` would still equal `plain`: attributes may have been set on the model since."""
    names = CALLED_INSTEAD | {"forward"}
    now, then = (
        {name: id(value) for name, value in vars(each).items() if name not in names} for each in (model, plain)
    )
    return plain is model or now == then


# Code around a model


Replaced = tuple[Any, str, Any]
"""A function of torch or transformers that another package has replaced: the module or class that has it, its name
there, and the function itself.
"""
_last_seen: dict[Any, tuple[list[Any], tuple[Replaced, ...]]] = {}
"""Contents of modules and classes at the last check, and the functions replaced in them."""


def replaced_in_libraries() -> tuple[Replaced, ...]:
    """Return the functions of torch and transformers that other packages have replaced, or added."""
    return tuple(replaced for holder in LIBRARIES for replaced in replaced_in(holder))


def replaced_in(holder: Any) -> tuple[Replaced, ...]:
    """Return the replaced functions of one of these modules and classes; changed contents are searched again."""
    contents = [*vars(holder).values()]
    try:
        if holder in _last_seen and _last_seen[holder][0] == contents:
            return _last_seen[holder][1]
    except Exception:  # objects set there may fail to compare
        pass
    replaced = tuple(
        (holder, name, function)
        for name, function in list(vars(holder).items())
        if name not in NEVER_IN_A_PASS
        and not name.startswith(_OF_GRAPHS)
        and is_code(function)
        and is_foreign(function)
        and package_of(home_of(function)) not in _IMPORTED
    )
    _last_seen[holder] = contents, replaced
    return replaced


def code_around(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """Return code around a model that belongs to none of its modules, each with its description, a format with a gap
    for the name: foreign global hooks, foreign torch modes in this thread, and the functions registered with
    transformers for its attention and its masks, below our own stand-ins.
    """
    code = [("the global forward hook {}", hook) for hook in global_hooks() if is_foreign_hook(hook)]
    modes = [mode for stack in MODES for mode in stack()]
    code += [("the torch mode {}", mode) for mode in modes if not is_own(type(mode).__module__)]
    return code + registered_attention(model)


def registered_attention(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """Return the functions among `code_around` that are registered for a model's attention and its masks."""
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        return []
    interfaces = {"attention": ALL_ATTENTION_FUNCTIONS, "mask": ALL_MASK_ATTENTION_FUNCTIONS}
    functions = [(what, interface.get(attention_name(config))) for what, interface in interfaces.items()]
    return [
        (f"the {what} function {{}}, registered by name", getattr(function, "before", function))
        for what, function in functions
        if function is not None
    ]
