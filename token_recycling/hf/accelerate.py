"""The library inside transformers: `accelerate(model)` and the model's own `generate()` is faster.

`generate` prepares everything (processors, criteria, cache, streamer) and hands it to the method `_sample` of the
model's class. An accelerated model is of a subclass made on the spot that overrides this method, and `generate` only to
note what does not come through it, so that pipelines, streamers and servers work unchanged, and the model is saved and
copied under its own name. What cannot be accelerated without risk goes to transformers' own method, with a warning that
says why.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from ..cuda_graphs import Fast, checked, runner_of
from ..drafter import Drafter
from ..model.self_test import ready
from ..model.support import UnsupportedModelError
from ..registry import make_drafter
from ..stats import Stats
from .generate_call import GenerateCall
from .run_call import run_call

logger = logging.getLogger("token_recycling")


_WANTED = "expected greedy or sampled decoding"
_NOT_REACHED = (
    f"{_WANTED}, got another loop: a custom_generate, of which contrastive search, DoLa and group beams are some, or "
    "continuous batching"
)


@dataclass
class Acceleration:
    """What `accelerate` adds to a model, as `model.acceleration`."""

    drafter: Drafter
    """Drafts, and remembers from call to call."""
    fast: Fast = "auto"
    """Which way steps are made; see `accelerate`."""
    model: PreTrainedModel | None = None
    """What decodes, if it is not the model that `generate` was called on: see `generate`."""
    stats: Stats = field(default_factory=Stats)
    """Of the last call of `generate`; empty if it was left to transformers."""
    total: Stats = field(default_factory=Stats)
    """Of all calls."""
    fallback: str | None = None
    """Why the last call was left to transformers, or None if it was accelerated."""

    _said: set[str] = field(default_factory=set, repr=False)

    def fall_back(self, reason: str) -> None:
        """Notes that a call is left to transformers, and says so once for every reason."""
        if reason not in self._said:
            logger.warning("not accelerated: %s; transformers' own decoding is used", reason)
            self._said.add(reason)
        self.fallback = reason


class _Accelerated(PreTrainedModel):
    """Mixed in before the model's class by `accelerate`."""

    acceleration: Acceleration

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' own `generate`; what it does not decode through `_sample` is noted as not accelerated."""
        acceleration = self.acceleration
        acceleration.stats, acceleration.fallback = Stats(synchronize=acceleration.stats.synchronize), _NOT_REACHED
        result = super().generate(*args, **kwargs)
        if acceleration.fallback == _NOT_REACHED:
            acceleration.fall_back(_NOT_REACHED)
        return result

    def _beam_search(self, *args: Any, **kwargs: Any) -> Any:
        self.acceleration.fall_back(f"{_WANTED}, got beam search")
        return super()._beam_search(*args, **kwargs)

    @functools.wraps(GenerationMixin._assisted_decoding)  # `generate` looks at its parameters
    def _assisted_decoding(self, *args: Any, **kwargs: Any) -> Any:
        reason = f"{_WANTED}, got assisted generation (a draft model, prompt lookup or early exit)"
        self.acceleration.fall_back(reason)
        try:
            return super()._assisted_decoding(*args, **kwargs)
        finally:
            self.acceleration.fall_back(reason)  # early exit has called this model's own generate() for its drafts

    def _sample(
        self,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | torch.LongTensor:
        call = GenerateCall(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, streamer)
        acceleration = self.acceleration
        model = acceleration.model if acceleration.model is not None else self
        reason = call.why_not(model) if not synced_gpus else "expected one process per text, got synced_gpus=True"
        if reason is not None:
            acceleration.fall_back(reason)
            return super()._sample(
                input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, **model_kwargs
            )
        acceleration.fallback = None
        try:
            return run_call(model, call, acceleration.drafter, acceleration.stats, acceleration.fast)
        finally:
            acceleration.total += acceleration.stats


def accelerate(
    model: PreTrainedModel, /, drafter: str | Drafter = "recycling", *, fast: Fast = "auto", **options: Any
) -> PreTrainedModel:
    """Makes the model's own `generate()` faster, in place, and returns the model.

    `fast`: "auto" makes steps of constant shapes, captured as CUDA graphs, where that holds, else goes the ordinary
    way, and `acceleration.stats.path` says which and why; True insists on such steps, captured where there is CUDA;
    False goes the ordinary way.

    `options` go to the drafter. What the drafter learns stays in `model.acceleration.drafter`; the last call's
    statistics are in `model.acceleration.stats`. Accelerating again replaces the drafter. Raises UnsupportedModelError
    with the reason, or NoFastPathError, now or with a call, where fast steps were insisted on and do not hold.
    """
    checked(fast)
    target = ready(model)
    made = make_drafter(drafter, **options)
    if fast is True:
        runner_of(target, fast)
    if not isinstance(model, _Accelerated):
        model.__class__ = _accelerated_class(type(model))
    model.acceleration = Acceleration(made, fast)
    return model


def decelerate(model: PreTrainedModel) -> PreTrainedModel:
    """Undoes `accelerate`: the model is of its own class again. A model that is not accelerated stays as it is."""
    if isinstance(model, _Accelerated):
        model.__class__ = type(model).__bases__[1]
        del model.acceleration
    return model


_classes: dict[type, type] = {}


def _accelerated_class(original: type) -> type:
    """The accelerated subclass of a model class, made once, under the name of the original."""
    if original not in _classes:
        names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
        _classes[original] = type(original.__name__, (_Accelerated, original), names)
    return _classes[original]


@contextlib.contextmanager
def accelerated(
    model: PreTrainedModel, /, drafter: str | Drafter = "recycling", **options: Any
) -> Iterator[Acceleration]:
    """Accelerates a model for the length of a `with` block; afterwards it is as it was before."""
    before = getattr(model, "acceleration", None)
    accelerate(model, drafter, **options)
    try:
        yield model.acceleration
    finally:
        if before is None:
            decelerate(model)
        else:
            model.acceleration = before


def generate(
    model: PreTrainedModel,
    /,
    *inputs: Any,
    drafter: str | Drafter = "recycling",
    fast: Fast = "auto",
    stats: Stats | None = None,
    **arguments: Any,
) -> Any:
    """One call of `model.generate(*inputs, **arguments)`, accelerated; the same arguments and the same return.

    Pass one made drafter again to keep what it learned; `fast` is as in `accelerate`. `stats` is filled in; with
    `return_dict_in_generate=True` the statistics are in the output too. Raises UnsupportedModelError where `accelerate`
    does; a call that cannot be accelerated is left to transformers with a warning.
    """
    checked(fast)
    ready(model)
    acceleration = Acceleration(make_drafter(drafter), fast, model)
    acceleration.stats.synchronize = bool(stats and stats.synchronize)
    result = _view(model, acceleration).generate(*inputs, **arguments)
    if stats is not None:
        vars(stats).update(vars(stats + acceleration.stats))
    return result


def _view(model: PreTrainedModel, acceleration: Acceleration) -> PreTrainedModel:
    """The same modules and weights in another object, of the accelerated class: the model itself stays as it is."""
    view = copy.copy(model)
    if not isinstance(view, _Accelerated):
        view.__class__ = _accelerated_class(type(model))
    view.acceleration = acceleration
    return view


def custom_generate(drafter: str | Drafter = "recycling", *, fast: Fast = "auto", **options: Any) -> Callable[..., Any]:
    """A function for `model.generate(..., custom_generate=...)`, for code that must not touch the model.

    Keep the function to keep what its drafter learns. transformers gives such functions no streamer; use `accelerate`
    for one. Raises UnsupportedModelError for a call that cannot be accelerated.
    """
    made = make_drafter(drafter, **options)
    checked(fast)

    def recycle(
        model: PreTrainedModel,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | torch.LongTensor:
        call = GenerateCall(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
        reason = call.why_not(model)
        if reason is not None:
            raise UnsupportedModelError(reason)
        return run_call(model, call, made, Stats(), fast)

    return recycle
