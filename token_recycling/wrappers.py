"""What others put around a model: objects that hold it, functions and hooks in it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel


def held_by(wrapper: Any) -> str:
    """What to pass instead of something that is no transformers model itself: the model inside it, in words."""
    inside = (
        wrapper.named_modules() if isinstance(wrapper, torch.nn.Module) else getattr(wrapper, "__dict__", {}).items()
    )
    for path, held in inside:
        if isinstance(held, PreTrainedModel) and held.can_generate():
            return f"pass the {type(held).__name__} in its .{path}, with which calls of the wrapper are accelerated too"
    return "load it with AutoModelForCausalLM"


def prepares_inputs_elsewhere(model: PreTrainedModel) -> bool:
    """Whether a function set on the model object prepares its inputs, as peft's prompt learning does, in place of its
    class's own.
    """
    own = vars(model).get("prepare_inputs_for_generation")
    return own is not None and getattr(own, "__func__", own) is not type(model).prepare_inputs_for_generation


def input_device(model: PreTrainedModel) -> torch.device | None:
    """Where token ids go in: the device of the embedding, or the one to which accelerate's hook brings its offloaded
    weights; None if it has no weights.
    """
    embedding = model.get_input_embeddings()
    if embedding.weight.device.type != "meta":
        return embedding.weight.device
    hook = getattr(embedding, "_hf_hook", None)  # may stand for several
    devices = (getattr(one, "execution_device", None) for one in (hook, *getattr(hook, "hooks", ())))
    return next((torch.device(device) for device in devices if device is not None), None)
