"""Inspection of a model: arguments, devices, sizes, and names for its configuration and weights. Nothing runs."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from .origin import is_foreign
from .parts import device_map_hooks, own_class

_SAMPLED = 64
"""Elements of a tensor that a fingerprint reads."""
_CHANGING = ("transformers_version", "dtype", "torch_dtype")
"""Entries of a configuration that do not describe the weights, or depend on how they were loaded."""


@functools.cache
def _arguments(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """Return the arguments that a function names, and whether it accepts others."""
    parameters = inspect.signature(function).parameters
    return frozenset(parameters), any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())


def arguments_of(model: PreTrainedModel) -> frozenset[str]:
    """Return the arguments that a model's forward names. A foreign forward that accepts any arguments is expected to
    pass them to the one that it replaces.
    """
    kind = own_class(model)
    methods = [base.__dict__["forward"] for base in kind.__mro__ if "forward" in base.__dict__]
    own = [not is_foreign(method) for method in methods]
    arguments: frozenset[str] = frozenset()
    if "forward" in vars(model):  # only on this object: not cached
        arguments, hands_on = _arguments.__wrapped__(model.forward)
        if not (hands_on and is_foreign(model.forward)):
            return arguments
    for method, is_last in zip(methods, own, strict=True):
        names, hands_on = _arguments(method)
        arguments |= names
        if is_last or not hands_on:
            break
    return arguments


def input_device(model: PreTrainedModel) -> torch.device | None:
    """Return the device of the embedding, or the one to which accelerate's hook moves it; None if it has no weights."""
    embedding = model.get_input_embeddings()
    # A user's module around the embedding has no weight of its own.
    weight = embedding.weight if hasattr(embedding, "weight") else next(embedding.parameters())
    if weight.device.type != "meta":
        return weight.device
    devices = (getattr(hook, "execution_device", None) for hook in device_map_hooks(embedding))
    return next((torch.device(device) for device in devices if device is not None), None)


def context_length(model: PreTrainedModel) -> int | None:
    """Return a model's context length in tokens, the shorter one if its configuration has two; None if it has none."""
    config = model.config.get_text_config(decoder=True)
    lengths = [getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len")]
    return min(filter(None, lengths), default=None)


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of tokens that a model has logits for."""
    head = model.get_output_embeddings()
    if features := getattr(head, "out_features", None):  # packed weights have another shape, or none
        return features
    weight = getattr(head, "weight", None)  # a user's module around the layer has none
    return model.config.get_text_config(decoder=True).vocab_size if weight is None else weight.shape[0]


def bytes_read(model: PreTrainedModel) -> int:
    """Return the bytes of weights that a forward pass reads: all but an embedding that is not also the output layer."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    embeddings, head = (getattr(layer, "weight", None) for layer in ends)
    unread = 0 if head is None or embeddings is None or head is embeddings else embeddings.nbytes
    return max(1, sum(weight.nbytes for weight in model.parameters()) - unread)


def shape_of(config: PretrainedConfig) -> str:
    """Return a short name for a configuration, wherever the model was loaded from."""
    return hashlib.sha256(_written(config)).hexdigest()[:16]


def _written(config: PretrainedConfig, leave_out: Collection[str] = ()) -> bytes:
    """Return a configuration as JSON; values that JSON cannot hold, which `generate` does not read, become text."""

    def entries(of: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in of.items() if not key.startswith("_") and key not in leave_out}

    try:
        return json.dumps(entries(config.to_dict()), sort_keys=True, default=str).encode()
    except Exception:  # users' values can fail in any way
        return json.dumps({key: str(value) for key, value in entries(vars(config)).items()}, sort_keys=True).encode()


@torch.no_grad()
def weights_fingerprint(model: PreTrainedModel, typed: bool = True) -> str:
    """Return a short digest of the configuration and of some elements of every parameter, as loaded; reading all of a
    large model would take minutes. With `typed=False` it ignores dtypes, for records that state the dtype themselves.
    """
    digest = hashlib.sha256(_written(model.config, _CHANGING))
    for name, parameter in model.named_parameters():
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype if typed else ''}".encode())
        digest.update(_sample_of(parameter))
    return digest.hexdigest()[:16]


def _sample_of(tensor: torch.Tensor) -> bytes:
    """Return a sample of elements from the whole tensor."""
    numbers = tensor.detach().flatten()
    return numbers[:: max(1, len(numbers) // _SAMPLED)][:_SAMPLED].to("cpu", torch.float32).numpy().tobytes()
