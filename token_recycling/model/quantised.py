"""Recognises quantised models, whose arithmetic is not that of their family.

A pass over a tree is exact if the logits after a token do not depend on what else is read with it. Weights that are
quantised alone change nothing in that. Activations that are quantised as the model runs do: where those of a pass share
one scale, each depends on all others, and such a model is refused. Where each token has its own scale, they are only
rounded coarsely, so that the last bit of a sum can change a text; a self-test decides. Cost: a look at every module.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

_PACKED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")


def quantisation(model: PreTrainedModel) -> tuple[bool, str | None]:
    """Whether its weights are something else than plain tensors, or were loaded so; and the path and the kind of the
    first module that gives all activations of a pass one scale, made for that pass, if there is one.
    """
    quantised = getattr(model, "is_quantized", False)
    for path, module in model.named_modules():
        packed = type(module).__module__.startswith(_PACKED)
        weights = [weight for weight in module._parameters.values() if weight is not None]
        others = [weight for weight in weights if type(weight).__module__.partition(".")[0] != "torch"]
        quantised = quantised or packed or bool(others)
        kinds = [type(weight).__name__ for weight in others if _shares(weight)]
        if kinds or (packed and _is_dynamic(module)):
            return True, f"{path}, a {type(module).__name__}" + "".join(f" of {kind}" for kind in kinds[:1])
    return quantised, None


def _is_dynamic(module: torch.nn.Module) -> bool:
    """Find modules of torch.ao in int8; those of float16 leave activations as they are."""
    if not type(module).__module__.startswith(tuple(f"{name}.dynamic" for name in _PACKED)):
        return False
    return getattr(getattr(module, "_packed_params", module), "dtype", torch.qint8) != torch.float16


def _shares(weight: torch.Tensor) -> bool:
    """Find tensors of torchao that say how activations multiplied by them are quantised."""
    kind = type(getattr(getattr(weight, "act_quant_kwargs", None), "granularity", None)).__name__
    return kind == "PerTensor" and getattr(weight, "act_quant_scale", None) is None
