"""An accelerated model: an instance of a subclass of its own class, made at run time, that decodes in our loop.

`generate` prepares everything (processors, criteria, cache, streamer) and hands it to the method `_sample` of the
model's class. The subclass overrides this method alone, so that the signature and docstring of `generate` are the
model's own. It has the name of the model's class, under which the model is saved. A call that cannot be accelerated
without risk goes to transformers' own method, with a warning that says why; calls that transformers decodes in another
way (beam search, assisted generation, continuous batching, `custom_generate`) never come here.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from .._util.locks import Lock
from ..drafters._base import Drafter
from ..loop.hints import NO_HINTS, Hints
from ..loop.stats import Stats
from ..model.compat import MARKS_NO_CACHES, mark_callers, mark_made
from ..model.info import UnsupportedModelError
from ..model.runner import Backend, eager
from ..model.tree_model import TreeModel
from .generate_call import GenerateCall, run_call

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
    backend: Backend = eager
    """Captured or eager steps."""
    target: TreeModel | None = None
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
    lays_out: bool = False
    """Whether `accelerate` prepacked the weights, which `decelerate` then drops."""

    _said: set[str] = field(default_factory=set, repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._is_of_view = self.target is not None

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickled models examine theirs again."""
        return {**vars(self), "target": None, "_is_of_view": False}

    def target_of(self, model: PreTrainedModel) -> TreeModel | None:
        """Return what is known of the target of a model's calls, as it was when it was last called."""
        known = self.target
        return known if known is None or self._is_of_view or known.model is model else None

    def say(self, reason: str) -> None:
        """Warn that a call is left to transformers, once for every reason."""
        with self._lock:
            if reason not in self._said:
                logger.warning("not accelerated: %s; transformers' own decoding is used", reason)
                self._said.add(reason)

    def ended(self, stats: Stats, fallback: str | None) -> None:
        """Record the statistics of a call, or why it was left to transformers."""
        with self._lock:
            self.stats, self.fallback = stats, fallback
            self.total += stats


class _Accelerated(PreTrainedModel):
    """Mixed in before the model's class by `accelerate`."""

    acceleration: Acceleration

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
        call = GenerateCall(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, streamer)
        mark_made(call.cache)
        acceleration = self.acceleration
        acceleration.reached = True
        stats = Stats(synchronize=acceleration.stats.synchronize)
        reason = None
        try:
            if synced_gpus:
                raise UnsupportedModelError(
                    "synced_gpus=True is unsupported: several processes would decode one sequence"
                )
            acceleration.target = target = call.ready(self, acceleration.target_of(self))
        except UnsupportedModelError as error:
            reason = str(error)
            acceleration.say(reason)
        try:
            if reason is None:
                return acceleration.decode(
                    target, call, acceleration.drafter, stats, acceleration.backend, acceleration.hints
                )
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


def _original_class(kind: type) -> type:
    """Return a class without the accelerated one among its bases. Where another library has derived a class of its own
    from it since, such as FSDP2 or a parametrization, that class is made again without, once.
    """
    if not issubclass(kind, _Accelerated):
        return kind
    if _Accelerated in kind.__bases__:
        return kind.__bases__[1]
    if kind not in _originals:
        bases = tuple(map(_original_class, kind.__bases__))
        contents = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
        metaclass: Any = type(kind)
        _originals[kind] = metaclass(kind.__name__, bases, contents)
    return _originals[kind]


def _unfilled(original: type) -> _Accelerated:
    """Allocate for unpickling; state follows."""
    made = _accelerated_class(original)
    return made.__new__(made)


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
