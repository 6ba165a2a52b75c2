"""The library inside transformers: `accelerate(model)` and the model's own `generate()` is faster.

Pipelines, streamers and servers work unchanged, and the model is saved and copied under its own name. `generate` of
this module leaves the model as it is.

An accelerated model is an instance of a subclass of its own class, made at run time. `model.generate` prepares
everything (processors, criteria, cache, streamer) and hands it to the method `_sample` of the model's class. The
subclass overrides this method alone, so that the signature and docstring of `generate` are the model's own. A call that
cannot be accelerated without risk goes to transformers' own method, with a warning that says why; calls that
transformers decodes in another way (beam search, assisted generation, continuous batching, `custom_generate`) never
come here.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from .._util.locks import Lock
from ..drafters._base import Drafter
from ..drafters._registry import make_drafter
from ..loop.hints import NO_HINTS, Hints
from ..loop.stats import Stats
from ..model.backend import EAGER, Backend, Fast
from ..model.compat import MARKS_NO_CACHES, mark_callers
from ..model.info import UnsupportedModelError
from ..model.prepacking import drop, prepacked_of
from ..model.prepacking import prepack as prepack_weights
from ..model.support import ready
from ..model.target import Target
from .call import GenerateCall, run_call

logger = logging.getLogger("token_recycling")

ANOTHER_LOOP = (
    "transformers decodes the call in another way: beam search, assisted generation (a draft model or prompt lookup), "
    "or custom_generate"
)


@dataclass
class Acceleration:
    """State that `accelerate` adds to a model, as `model.acceleration`."""

    drafter: Drafter
    """Drafts, and learns from call to call."""
    backend: Backend = EAGER
    """Captured or eager steps."""
    target: Target | None = None
    """The model that decodes, as it was when it was last called; of a view, the model that it is a view of."""
    stats: Stats = field(default_factory=Stats)
    """Statistics of the call of `_sample` that ended last, in any thread; empty if it was left to transformers."""
    total: Stats = field(default_factory=Stats)
    """Statistics of all calls."""
    fallback: str | None = None
    """Why the call that ended last was left to transformers, or None if it was accelerated."""
    reached: bool = False
    """Whether a call came to be decoded, rather than refused as it was prepared."""
    decode: Callable[..., GenerateDecoderOnlyOutput | torch.Tensor] = run_call
    """Decodes a call."""
    hints: Hints = NO_HINTS
    """Hints for the sequences of all calls."""
    owns_prepacked: bool = False
    """Whether `accelerate` prepacked the weights, which `decelerate` then drops."""

    _warned: set[str] = field(default_factory=set, repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._is_of_view = self.target is not None

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickled models examine theirs again."""
        return {**vars(self), "target": None, "_is_of_view": False}

    def examine(self, model: PreTrainedModel) -> Target:
        """Return the target of a model's calls, examined again if it has changed since the last one; raises
        UnsupportedModelError.
        """
        target = self.target
        if target is not None and not self._is_of_view and target.model is not model:
            target = None
        self.target = target = ready(model if target is None else target.model, target)
        return target

    def say(self, reason: str) -> None:
        """Warn that a call is left to transformers, once for every reason."""
        with self._lock:
            if reason not in self._warned:
                logger.warning("not accelerated: %s; transformers' own decoding is used", reason)
                self._warned.add(reason)

    def ended(self, stats: Stats, fallback: str | None) -> None:
        """Record the statistics of a call, or why it was left to transformers."""
        with self._lock:
            self.stats, self.fallback = stats, fallback
            self.total += stats


class _Accelerated(PreTrainedModel):
    """Mixed in before the model's class by `accelerate`."""

    acceleration: Acceleration

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a model that is not accelerated, of the original class: `from_pretrained` of this one, and calls."""
        return _original_class(cls)(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy under the name of the model's original class."""
        _, _, *state = super().__reduce_ex__(max(2, int(protocol)))
        return _unfilled, (_original_class(type(self)),), *state

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
        acceleration = self.acceleration
        acceleration.reached = True
        stats = Stats(synchronize=acceleration.stats.synchronize)
        try:
            target = acceleration.examine(self)
            call = GenerateCall(
                target, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, streamer
            )
            reason = call.why_not(self)
        except UnsupportedModelError as error:
            reason = str(error)
        if synced_gpus:
            reason = "synced_gpus=True is unsupported: several processes would decode one sequence"
        if reason is not None:
            acceleration.say(reason)
        try:
            if reason is None:
                return acceleration.decode(call, acceleration.drafter, stats, acceleration.backend, acceleration.hints)
            return super()._sample(
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                **model_kwargs,
            )
        finally:
            acceleration.ended(stats, reason)


def _marking(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `generate` that marks its caller's cache, for a release of transformers that does not."""

    @functools.wraps(generate)
    def marking(self: Any, *args: Any, **kwargs: Any) -> Any:
        mark_callers(kwargs.get("past_key_values"))
        return generate(self, *args, **kwargs)

    return marking


_classes: dict[type, type[_Accelerated]] = {}


def _accelerated_class(original: Any) -> type[_Accelerated]:
    """Return the accelerated subclass of a model class, made once, under the name of the original."""
    if original not in _classes:
        names = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
        names["plain_class"] = original
        if MARKS_NO_CACHES:
            names["generate"] = _marking(original.generate)
        _classes[original] = type(original.__name__, (_Accelerated, original), names)
    return _classes[original]


_originals: dict[type, type] = {}
"""Classes that other libraries derived from accelerated ones, without these; see `_original_class`."""


def _original_class(cls: type) -> type:
    """Return a class without the accelerated one among its bases. Where another library has derived a class of its own
    from it since, such as FSDP2 or a parametrization, that class is made again without, once.
    """
    if not issubclass(cls, _Accelerated):
        return cls
    if _Accelerated in cls.__bases__:
        return cls.__bases__[1]
    if cls not in _originals:
        bases = tuple(map(_original_class, cls.__bases__))
        contents = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
        metaclass: Any = type(cls)
        _originals[cls] = metaclass(cls.__name__, bases, contents)
    return _originals[cls]


def _unfilled(original: type) -> _Accelerated:
    """Allocate for unpickling; state follows."""
    return object.__new__(_accelerated_class(original))


def make_accelerated(model: PreTrainedModel, acceleration: Acceleration) -> None:
    """Change the model's class to the accelerated subclass, in place."""
    if not is_accelerated(model):
        model.__class__ = _accelerated_class(type(model))
    model.acceleration = acceleration
    if "generate" in vars(model):  # which is called in place of ours
        acceleration.fallback = (
            "the model object has a generate() of its own, which is called in place of the accelerated one"
        )
        acceleration.say(acceleration.fallback)


def make_plain(model: PreTrainedModel) -> None:
    """Change the model's class back to the original, in place."""
    model.__class__ = _original_class(type(model))
    del model.acceleration


def is_accelerated(model: PreTrainedModel) -> bool:
    """Whether the object is of an accelerated class."""
    return isinstance(model, _Accelerated)


def view(model: PreTrainedModel, acceleration: Acceleration) -> PreTrainedModel:
    """Return an accelerated object with the same modules and weights; the model itself is unchanged."""
    view = copy.copy(model)
    make_accelerated(view, acceleration)
    return view


def accelerate(
    model: PreTrainedModel,
    /,
    drafter: str | Drafter = "recycling",
    *,
    fast: Fast = "auto",
    reproducible: bool = False,
    prepack: bool | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Make the model's own `generate()` faster, in place, and return the model.

    `fast`: "auto" captures forward passes as CUDA graphs on CUDA where possible, True always or raises, False never
    (docs/how-it-works.md). `reproducible=True` makes drafts independent of earlier calls, so that equal calls give
    equal outputs in 16 bits too (docs/exactness.md).

    On a CPU weights are prepacked for forward passes over a few rows (docs/usage.md). The copy doubles weight memory,
    and only accelerated calls use it. `prepack=None` does so where the copy takes at most a quarter of the machine's
    memory, True wherever possible, False never. Weights that change later are used unpacked; accelerate again to
    prepack them.

    `options` go to the drafter. What the drafter learns stays in `model.acceleration.drafter`; the last call's
    statistics are in `model.acceleration.stats`. Accelerating again replaces the drafter. A model that is pickled
    (`pickle`, `torch.save`, another process) or copied by `copy.deepcopy` comes back accelerated, with a drafter of its
    own that has learned the same; `save_pretrained` writes the model alone.

    Raises UnsupportedModelError with the reason; NoFastPathError, here or in a call, where `fast=True` and steps cannot
    be captured; ValueError where `prepack=True` and weights cannot be prepacked.
    """
    acceleration = _acceleration(model, drafter, fast, reproducible=reproducible, **options)
    acceleration.owns_prepacked = (
        model.acceleration.owns_prepacked if is_accelerated(model) else prepacked_of(model) is None
    )
    prepack_weights(model, prepack, fixed=reproducible)
    make_accelerated(model, acceleration)
    return model


def _acceleration(model: PreTrainedModel, drafter: str | Drafter, fast: Fast, /, **options: Any) -> Acceleration:
    """Make and compile what accelerates a model; raises as `accelerate` does."""
    backend, target = Backend(fast), ready(model)
    drafter = make_drafter(drafter, **options)
    drafter.warm_up(target.device)
    drafter.fit(target)
    backend.capture_common(target, drafter.traits.states, reproducible=drafter.traits.begins_anew)
    return Acceleration(drafter, backend)


def decelerate(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `accelerate`: restore the model's class and drop the weights that `accelerate` prepacked; those prepacked by
    `load` stay. A model that is not accelerated is returned unchanged.
    """
    acceleration = vars(model).get("acceleration")
    if isinstance(acceleration, Acceleration):
        if acceleration.owns_prepacked:
            drop(model)
        make_plain(model)
    return model


@contextlib.contextmanager
def accelerated(
    model: PreTrainedModel, /, drafter: str | Drafter = "recycling", *, fast: Fast = "auto", **options: Any
) -> Iterator[Acceleration]:
    """Accelerate a model for the length of a `with` block, and restore it afterwards. Weights are neither prepacked nor
    unpacked.
    """
    before = model.acceleration if is_accelerated(model) else None
    acceleration = _acceleration(model, drafter, fast, **options)
    acceleration.owns_prepacked = before is not None and before.owns_prepacked
    make_accelerated(model, acceleration)
    try:
        yield model.acceleration
    finally:
        if before is not None:
            make_accelerated(model, before)
        elif is_accelerated(model):
            make_plain(model)


def generate(
    model: PreTrainedModel,
    /,
    *inputs: Any,
    drafter: str | Drafter = "recycling",
    fast: Fast = "auto",
    reproducible: bool = False,
    stats: Stats | None = None,
    prediction: str | Sequence[int] | torch.Tensor | None = None,
    **arguments: Any,
) -> Any:
    """Run one accelerated call of `model.generate(*inputs, **arguments)`: same arguments, same return value.

    `prediction` is the predicted output, as ids (n,) or as text with the `tokenizer` among the arguments. Drafts are
    taken from it first; the model never reads it. Raises ValueError where the drafter cannot use it.

    Pass the same drafter object again to keep what it learned; `fast` and `reproducible` are as in `accelerate`.
    `stats` is filled in; with `return_dict_in_generate=True` the statistics are in the output too. Raises
    UnsupportedModelError where `accelerate` does; a call that cannot be accelerated is left to transformers with a
    warning.
    """
    backend = Backend(fast)
    drafter, target = make_drafter(drafter, reproducible=reproducible), ready(model)
    hints = NO_HINTS if prediction is None else Hints(prediction=_predicted(prediction, drafter, target, arguments))
    acceleration = Acceleration(drafter, backend, target, hints=hints)
    acceleration.stats.synchronize = bool(stats and stats.synchronize)
    result = view(model, acceleration).generate(*inputs, **arguments)
    if stats is not None:
        vars(stats).update(vars(stats + acceleration.stats))
    return result


def _predicted(
    prediction: str | Sequence[int] | torch.Tensor, drafter: Drafter, target: Target, arguments: dict[str, Any]
) -> torch.Tensor:
    """Return a prediction as ids (n,) int64; raises ValueError."""
    if not drafter.traits.predictions:
        raise ValueError(
            f"{drafter.describe()} does not draft from predictions; use recycling, or leave prediction out"
        )
    if isinstance(prediction, str):
        if arguments.get("tokenizer") is None:
            raise ValueError("a prediction that is text needs tokenizer=...; give the tokenizer, or token ids")
        prediction = arguments["tokenizer"](prediction, add_special_tokens=False)["input_ids"]
    ids = torch.as_tensor(prediction, dtype=torch.long).flatten()
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < target.vocab_size:
        raise ValueError(
            f"token ids of a prediction must be from 0 to {target.vocab_size - 1}, got {int(ids.min())} to "
            f"{int(ids.max())}"
        )
    return ids
