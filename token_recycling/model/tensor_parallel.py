"""One decision for all processes that hold a part of the same model (tensor parallelism).

Each of them decodes the same text and drafts for itself. That is safe as long as all decide alike: candidates come from
logits that are the same everywhere, but measured times are not, and processes with different trees would wait for each
other for ever. So where a time decides, that of the first process counts for all.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed
from transformers import PreTrainedModel

T = TypeVar("T")


def processes(model: PreTrainedModel) -> int:
    """Number of processes that hold a part of the model each."""
    return getattr(model, "_tp_size", None) or 1


def agreed(model: PreTrainedModel, value: T) -> T:
    """The value that the first of the model's processes has; the same where the model is in one process. All of them
    must call it at the same point.
    """
    if processes(model) < 2:
        return value
    group = model._device_mesh["tp"].get_group()
    held: list[Any] = [value]
    torch.distributed.broadcast_object_list(held, group=group, group_src=0)
    return held[0]
