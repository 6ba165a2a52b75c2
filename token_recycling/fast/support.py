"""Where fast steps hold, and if not, why."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicIndexedLayer
from transformers.generation import logits_process

from ..architectures import Support
from ..cache import TreeCache
from ..drafting import Draft, Drafter
from ..target import Target
from ..templates import root_only
from ..text import Chooser, Text
from ..tree import Tree
from .step import Choice, Plan
from .steps import Kind, Steps
from .syncs import HostWaitsError, without_waiting

WARPERS = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
)
"""Processors that look at the scores alone and do the same to those of any node."""

_TREE = Tree.from_paths([(0,), (1,), (1, 0)])
_TRIED = 8
_ALIKE = {8: 1e-3, 4: 1e-3, 2: 0.1, 1: 0.2}
"""Differences that come from the order of additions, by bytes of a number; what stands at a wrong place makes larger
ones.
"""

_tried: WeakKeyDictionary[PreTrainedModel, dict[Kind, Steps | str]] = WeakKeyDictionary()


def by_configuration(known: Support) -> str | None:
    """Why fast steps do not hold for a model, by what is known of it without its weights; None if nothing speaks
    against them.
    """
    if not known.supported:
        return known.reason
    if not known.tested:
        return f"expected a family that was tested, got {known.family!r}"
    if known.key_bias is not None:
        return f"expected positions that the model is given, got ALiBi in {known.model}"
    if known.border is not None:
        return f"expected a model that computes alike at every length, got {known.model}: {known.border.why}"
    return None


def found(target: Target, kind: Kind) -> Steps | str:
    """The model's fast steps, made once, or why it has none."""
    reason = by_configuration(target.support) or _by_weights(target.model)
    if reason is not None:
        return reason
    known = _tried.setdefault(target.model, {})
    if kind not in known:
        known[kind] = _tried_out(target, kind)
    return known[kind]


def without_fast_path(target: Target) -> str | None:
    """Why a model has no fast steps, tried out, or None if it has."""
    steps = found(target, "captured")
    return steps if isinstance(steps, str) else None


def _by_weights(model: PreTrainedModel) -> str | None:
    parameters = list(model.parameters())
    devices = sorted({str(parameter.device) for parameter in parameters})
    if len(devices) > 1 or (getattr(model, "hf_device_map", None) and len(set(model.hf_device_map.values())) > 1):
        return f"expected all weights on one device, got {', '.join(devices)} or offloaded ones"
    if any(hasattr(parameter, "placements") for parameter in parameters):
        return "expected a model of one process, got weights shared among several"
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        return "expected a model without hooks, got those of a device map"
    if any(hasattr(module.forward, "_torchdynamo_orig_callable") for module in model.modules()) or any(
        getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()
    ):
        return "expected a model that is not compiled, got one that torch.compile was applied to"
    if model.training:
        return "expected a model in evaluation mode, got one in training; call model.eval()"
    return None


@torch.no_grad()
def _tried_out(target: Target, kind: Kind) -> Steps | str:
    """Small steps: one watched, whether the model's own operations would make the host wait, and some compared with
    the ordinary way.
    """
    cache = target.new_cache()
    if any(isinstance(layer, DynamicIndexedLayer) for layer in cache.layers):
        return f"expected keys and values alone, got index keys (sparse attention) in {type(target.model).__name__}"
    steps = Steps(target, "captured")
    steps.begin(target, cache, 1)
    steps.reserve(1)
    plan, source = Plan(1, 1, steps.cache.capacity, 0, False, False), steps.host_source(1)
    try:
        with without_waiting():
            steps.rehearse(target, plan, source, Choice())
    except HostWaitsError as error:
        return f"expected a forward pass that does not wait for the device, got {type(target.model).__name__}: {error}"
    try:
        deviation = _deviation(target, steps)
    except RuntimeError as error:
        return f"expected a forward pass that can be captured, got {type(target.model).__name__}: {error}"
    if deviation > _ALIKE[target.dtype.itemsize]:
        return (
            f"expected the logits of the ordinary way, got others by {deviation:.2g} of the largest one; "
            "this is a fault: please report it"
        )
    return steps if kind == "captured" else Steps(target, kind)


def _deviation(target: Target, steps: Steps) -> float:
    """The largest difference between the logits of small trees on the fast and on the ordinary way, as a share of the
    largest logit. The second tree sees what was kept of the first; where steps are captured, it is a replay.
    """
    cache = target.new_cache()
    text = torch.arange(1, _TRIED, device=target.device) % target.embedded
    target.prefill([text], cache)
    steps.begin(target, cache, _TRIED + 2 * len(_TREE))
    steps.root.copy_(text[-1:])
    kept, source, worst = TreeCache(cache), steps.host_source(len(_TREE)), 0.0
    plan = Plan(source.nodes, source.depths, steps.cache.capacity, 0, False, False)
    for _ in range(2):
        held, root = cache.get_seq_length(), steps.root.clone()
        alone = target.forward(target.inputs([Draft(root_only(), root)], [held], held), cache)
        kept.keep(held, [held], [[]])
        right = int(alone[0, 0].argmax())
        tokens = torch.tensor([int(root), (right + 1) % target.embedded, right, 0], device=target.device)
        draft = Draft(_TREE, tokens)
        source.send(draft)
        report, logits = steps.run(target, plan, source, Choice())
        wanted = target.forward(target.inputs([draft], [held], held), cache)[0].float()
        worst = max(worst, float((logits.float() - wanted).abs().max() / wanted.abs().max()))
        kept.keep(held, [held], [report.path])
    return worst


def why_not(texts: Sequence[Text], choosers: Sequence[Chooser], drafter: Drafter, cache: Cache) -> str | None:
    """Why fast steps do not hold for a run, or None."""
    if len(texts) > 1:
        return f"expected one text, got {len(texts)}"
    if cache.offloading:
        return "expected a cache on the device, got an offloaded one"
    (chooser,) = choosers
    if chooser.text.scores is not None or chooser.logits is not None:
        return "expected tokens alone to be asked for, got output_scores or output_logits"
    others = sorted({type(one).__name__ for one in chooser.processors if type(one) not in WARPERS})
    if others:
        return f"expected processors that look at the scores alone, got {', '.join(others)}"
    if not chooser.sample and not chooser.greedy:
        return "expected greedy decoding without processors"
    if drafter.needs_hidden:
        return f"expected a drafter that learns from logits, got one that needs hidden states ({drafter.describe()})"
    if chooser.sample and drafter.draws:
        return f"expected a draft that is chosen, got one that is drawn ({drafter.describe()})"
    return None
