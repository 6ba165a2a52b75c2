"""Models whose forward passes can be captured, and the reason why others cannot."""

from __future__ import annotations

from threading import Lock
from typing import Any

import torch
from transformers import PreTrainedModel

from ...trees.draft import Draft
from ...trees.templates import parse_paths
from ..compat import MODES
from ..info import ModelInfo
from ..kv_cache import TreeCache
from ..parts import device_map_hooks, hooks_of, is_compiled, is_graph
from ..prefill import prefill
from ..state import state_of
from ..target import Target
from .passes import CapturedPasses

_TREE = parse_paths("0 1 10").parents
_TRIED = 8
_ALIKE = {8: 1e-3, 4: 1e-3, 2: 0.1, 1: 0.2}
"""Differences explained by the order of additions, by bytes of a number; misplaced values cause larger ones."""

_HOST_BOUND = {
    "falcon": "indexes heads by a Python list, which is copied to the device in each pass",
    "jetmoe": "reads the sizes of its experts' batches on the host",
    "xglm": "rebuilds its table of positions in each forward pass",
}
"""Tested families whose forward pass cannot be captured, and the reason."""


def why_not_captured(info: ModelInfo) -> str | None:
    """Return why forward passes of a model cannot be captured, according to its configuration, or None."""
    if not info.supported:
        return info.reason
    if not info.tested:
        return f"family {info.family!r} was not tested"
    if info.family in _HOST_BOUND:
        return f"{info.name} {_HOST_BOUND[info.family]}"
    if info.recurrent:
        return f"{info.name} has recurrent layers"
    if not info.branches:
        return f"{info.name} takes no positions: it counts cache slots"
    if info.key_bias is not None:
        return f"{info.name} takes no positions: it has ALiBi"
    if info.length_threshold is not None:
        return f"{info.name} computes differently by length: {info.length_threshold.why}"
    return None


class _Captures:
    """The captured passes of a model, or why it has none, while its state does not change."""

    def __init__(self) -> None:
        self._making = Lock()
        """Lets two threads share one result."""
        self._result: CapturedPasses | str | None = None
        self._state: list[Any] | None = None
        """None if every pass changes it."""

    def of(self, target: Target) -> CapturedPasses | str:
        with self._making:
            state = None if self._state is None else state_of(target)
            if self._result is None or self._state != state:
                self._result = None  # frees its memory before the next one allocates
                self._result = self._made(target)
            return self._result

    def _made(self, target: Target) -> CapturedPasses | str:
        for _ in range(2):  # a model's first pass may create attributes
            self._state = state_of(target, keep=True)
            result = _by_parts(target.eager) or _tried_out(target)
            if self._state == state_of(target):
                if isinstance(result, CapturedPasses):
                    result.state = self._state
                return result
        self._state = None
        name = type(target.model).__name__
        return f"every forward pass of {name} sets attributes of the model"


def passes_or_reason(target: Target) -> CapturedPasses | str:
    """Return the model's captured passes, made once per state of the model, or why it has none."""
    reason = why_not_captured(target.info) or _by_surroundings(target.device)
    return reason or target.facts.get("captured passes", _Captures).of(target)


def _by_surroundings(device: torch.device) -> str | None:
    """Return why torch modes of this thread prevent captures, or None."""
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        return f"autocast to {dtype} is on; load the model in that dtype"
    default = torch.get_default_device()  # also a mode, which affects no operation of a pass
    others = [type(mode).__name__ for stack in MODES for mode in stack() if getattr(mode, "device", None) != default]
    return f"torch modes are active: {', '.join(others)}" if others else None


def _by_parts(model: PreTrainedModel) -> str | None:
    parameters = list(model.parameters())
    devices = sorted(map(str, {parameter.device for parameter in parameters}))
    if len(devices) > 1 or (getattr(model, "hf_device_map", None) and len(set(model.hf_device_map.values())) > 1):
        return f"weights are on several devices or offloaded: {', '.join(devices)}"
    if any(hasattr(parameter, "placements") for parameter in parameters):
        return "weights are sharded over several processes"
    reasons = (_by_part(module) for module in model.modules())
    return next(filter(None, reasons), _by_hooks("all modules", None))


def _by_part(module: torch.nn.Module) -> str | None:
    name = type(module).__name__
    if any(device_map_hooks(module)):
        return "the model has hooks of a device map"
    if is_compiled(module) or any(map(is_graph, vars(module).values())):
        return f"{name} is compiled with torch.compile"
    if module.training:
        return f"{name} is in training mode; call model.eval()"
    return _by_hooks(name, module)


def _by_hooks(where: str, module: torch.nn.Module | None) -> str | None:
    hook = next(hooks_of(module), None)
    if hook is None:
        return None
    name = getattr(hook, "__qualname__", type(hook).__name__)
    return f"a captured pass does not call the hook {name} on {where}"


@torch.no_grad()
def _tried_out(target: Target) -> CapturedPasses | str:
    """Make small passes and compare them with eager ones; with CUDA the second one is a replay."""
    cache = target.new_cache()
    sequence = torch.arange(1, _TRIED, device=target.device) % target.embedded
    prefill(target, [sequence], cache)
    name, cached = type(target.model).__name__, len(sequence) - 1
    if not cache.takes_frames:
        return f"the cache of {name} holds more than keys and values (for sparse attention)"
    passes = CapturedPasses(target)
    passes.begin(target, cache, [cached], cached + 2 * len(_TREE))
    try:
        deviation = _deviation(target, passes, cache, cached, int(sequence[-1]))
    except RuntimeError as error:
        return f"the forward pass of {name} cannot be captured: {error}"
    if deviation > _ALIKE[target.dtype.itemsize]:
        return (
            f"logits of captured and eager passes differ by {deviation:.2g} of the largest one; this is a bug, please "
            "report it"
        )
    return passes


def _deviation(target: Target, passes: CapturedPasses, cache: TreeCache, cached: int, root: int) -> float:
    """Return the largest difference between the logits of small trees in captured and eager passes, relative to the
    largest logit. The second tree sees the slots kept from the first.
    """
    worst, path = 0.0, [0, 2, 3]
    for _ in range(2):
        draft = Draft(torch.arange(root, root + len(_TREE)) % target.embedded, _TREE)
        expected = target.forward(target.inputs.of([draft], [cached], cached), cache)[0].float()
        logits = passes.forward(target, [draft], [cached]).logits[0, : len(_TREE)].float()
        worst = max(worst, float((logits - expected).abs().max() / expected.abs().max()))
        cache.keep(cached, [cached], [path])
        passes.slots.keep([cached], [cached], [path])
        cached, root = cached + len(path), root + len(_TREE)
    return worst


def why_not(cache: TreeCache | None, reproducible: bool) -> str | None:
    """Return why the passes of a run cannot be captured, or None."""
    if cache is not None and cache.cache.offloading:
        return "the cache is offloaded"
    if reproducible:
        return "reproducible=True needs eager passes"
    return None
