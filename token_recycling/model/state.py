"""State of a model on which the operations of a forward pass depend, except the values of the weights.

A captured pass is replayed without Python, and a conversation continues after cached tokens. Both are valid while all
attributes of all modules, options of the configuration and of torch, addresses and shapes of tensors, functions of the
model and of the libraries, and values that foreign code reads are unchanged. Changes inside other objects are not
detected. Comparing costs some milliseconds.
"""

from __future__ import annotations

from typing import Any

import torch

from .facts import PLAIN, Identities, code_beyond, describe
from .foreign import values_in
from .parts import ATTRIBUTES_OF_TORCH, hooks_of, own_class, parts_of
from .target import Target

_SKIPPED = (ATTRIBUTES_OF_TORCH | {"acceleration", "generation_config"}) - {"training"}
"""Attributes that are compared elsewhere, or do not affect a pass."""


def state_of(target: Target, keep: bool = False) -> list[Any]:
    """Return a value that equals later ones while forward passes run the same operations on the same tensors. `keep`:
    hold no strong references.
    """
    model, seen = target.model, set[int]()
    parts = dict.fromkeys(parts_of(model))
    things: list[Any] = [*hooks_of(None)]
    values: list[Any] = [target.info.attention, *_options_of_torch(), values_in(target)]
    describe(getattr(model, "config", None), values, things, seen)
    unread = [*parts]
    while unread:
        part = unread.pop()
        values.append(own_class(part).__qualname__)
        before, attributes = len(things), part.__dict__
        things += hooks_of(part)
        children = dict(part.named_children())
        values += children
        things += children.values()
        for tensors in (dict(part.named_parameters(recurse=False)), dict(part.named_buffers(recurse=False))):
            if tensors:
                describe(tensors, values, things)
        for name, value in list(attributes.items()):  # another thread's pass may add some
            if name not in _SKIPPED:
                values.append(name)
                if type(value) in PLAIN:  # the common case, without a call
                    values += (type(value), value)
                else:
                    describe(value, values, things, seen)
        for module in things[before:]:
            if isinstance(module, torch.nn.Module) and module not in parts:  # in an attribute, not a submodule
                parts[module] = None
                unread.append(module)
    identities = Identities([*things, *code_beyond(model, map(own_class, parts))])
    return [identities.watch() if keep else identities, values]


def _options_of_torch() -> list[Any]:
    """Options of torch that choose between operations, or their precision."""
    backends: Any = torch.backends
    cuda, matmul = backends.cuda, backends.cuda.matmul
    return [
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_deterministic_debug_mode(),
        *(torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) for device in ("cpu", "cuda")),
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
    ]
