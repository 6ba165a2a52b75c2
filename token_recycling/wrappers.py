"""Objects around a model: what they hold, and what they change in it."""

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
