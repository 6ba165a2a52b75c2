"""An accelerated model: an instance of a subclass of its own class, created at run time.

`model.generate` prepares everything (processors, criteria, cache, streamer) and passes it to the method `_sample` of
the model's class. The subclass overrides only this method, so the signature and docstring of `generate` are the model's
own. A call that cannot be accelerated without risk runs through transformers' own method, with a warning that gives the
reason. Calls that transformers decodes in another way (beam search, assisted generation, continuous batching,
`custom_generate`) never come here.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
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
from ..loop.request import NO_HINTS, Hints
from ..loop.stats import Stats
from ..model.backend import EAGER, Backend
from ..model.compat import MARKS_NO_CACHES, mark_callers
from ..model.facts import Identities
from ..model.hidden import layer_states
from ..model.info import UnsupportedModelError
from ..model.parts import own_class
from ..model.support import ready
from ..model.target import Target
from .call import GenerateCall, run_call

logger = logging.getLogger("token_recycling")

_DEFAULT_RECONSTRUCTORS: Any = (copyreg.__newobj__, copyreg.__newobj_ex__)  # type: ignore[attr-defined]
"""Functions that copy or unpickle an object whose class does not define `__reduce__` itself."""


@dataclass
class Acceleration:
    """State that `accelerate` adds to a model, as `model.acceleration`."""

    drafter: Drafter
    """Drafts tokens, and learns from call to call."""
    backend: Backend = EAGER
    """Captured or eager steps."""
    target: Target | None = None
    """The model that decodes, in its state at the last call."""
    original: PreTrainedModel | None = None
    """The model that decodes if the accelerated object is a view of it; None if it is the model itself."""
    stats: Stats = field(default_factory=Stats)
    """Statistics of the call of `_sample` that ended last, in any thread; empty if transformers decoded it."""
    total: Stats = field(default_factory=Stats)
    """Statistics of all calls."""
    fallback: str | None = None
    """Why transformers decoded the call that ended last, or None if it was accelerated."""
    reached: bool = False
    """Whether a call reached decoding; False if it was refused during preparation."""
    decode: Callable[..., GenerateDecoderOnlyOutput | torch.Tensor] = run_call
    """Decodes a call."""
    hints: Hints = NO_HINTS
    """Hints for the sequences of all calls."""
    owns_prepacked: bool = False
    """Whether `accelerate` prepacked the weights, which `decelerate` then drops."""

    _warned: set[str] = field(default_factory=set, repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.target is not None:
            self.target.hold_weakly()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the models: copies and unpickled models examine theirs again."""
        return {**vars(self), "target": None, "original": None}

    def examine(self, model: PreTrainedModel) -> Target:
        """Return the target of a model's calls, examined again if the model has changed since the last one; raises
        UnsupportedModelError.
        """
        target, original = self.target, model if self.original is None else self.original
        if target is None or target.model is not original or not target.is_current():
            target = ready(original)
            self._check_drafter(target)
            target.hold_weakly()
            self.target = target
        return target

    def _check_drafter(self, target: Target) -> None:
        """Raise UnsupportedModelError unless the drafter can draft for a changed target and read the hidden states it
        needs.
        """
        try:
            with layer_states(target.eager, self.drafter.traits.states_read(target)):
                pass
            self.drafter.fit_again(target)
        except ValueError as error:
            raise UnsupportedModelError(f"{self.drafter.describe()} cannot draft: {error}") from None

    def say(self, reason: str, error: BaseException | None = None) -> None:
        """Warn that transformers decodes a call, once per reason; with the traceback of an `error`, if any."""
        with self._lock:
            if reason not in self._warned:
                logger.warning("not accelerated: %s; transformers' own decoding is used", reason, exc_info=error)
                self._warned.add(reason)

    def ended(self, stats: Stats, fallback: str | None) -> None:
        """Record the statistics of a call, or why transformers decoded it."""
        with self._lock:
            self.stats, self.fallback = stats, fallback
            self.total += stats


class _Accelerated(PreTrainedModel):
    """Mixed in before the model's class by `accelerate`."""

    acceleration: Acceleration

    @classmethod
    def plain_class(cls) -> type:
        """Return this class without acceleration. The class may have changed since it was made, such as by
        `type(model).forward = ...`, or another library may have derived a class from it, such as FSDP2 or a
        parametrization. Then that class is made again without acceleration, once for the same contents.
        """
        original = cls.__bases__[1] if cls in _contents_as_made else None
        contents = [*vars(cls)], Identities(vars(cls).values())
        if original is not None and contents == _contents_as_made[cls]:
            return original
        bases = (original,) if original is not None else tuple(map(_without_acceleration, cls.__bases__))
        made_of = bases, contents
        if cls not in _plain_classes or _plain_classes[cls][0] != made_of:
            from .._util.classes import recreated_class

            _plain_classes[cls] = made_of, recreated_class(cls, bases)
        return _plain_classes[cls][1]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a model of the plain class, not accelerated: for `from_pretrained` of this class, and calls of it.
        Return an empty object for `cls.__new__(cls)`, from which other code copies a model.
        """
        plain = cls.plain_class()
        if not (args or kwargs) and not _needs_no_arguments(plain):
            return super().__new__(plain if cls in _view_classes.values() else cls)
        return plain(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy under the name of the model's plain class, or as that class itself does; of a view, copy the
        model.
        """
        if self.acceleration.original is not None:
            return copy.copy, (self.acceleration.original,)
        reduced = super().__reduce_ex__(max(2, int(protocol)))
        if reduced[0] not in _DEFAULT_RECONSTRUCTORS:
            return reduced
        _, _, *state = reduced
        cls = type(self)
        return _unfilled, (cls.__bases__[1] if cls in _contents_as_made else cls.plain_class(),), *state

    @torch.compiler.disable  # a compiled function may call `generate`; drafts change shape with every pass
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
            if synced_gpus:
                reason = "synced_gpus=True is unsupported: several processes would decode one sequence"
            if reason is not None:
                acceleration.say(reason)
        except UnsupportedModelError as error:
            reason = str(error)
            acceleration.say(reason, error.__cause__)
        except Exception as error:  # users' objects can fail in any way where `generate` does not use them
            reason = f"the call cannot be examined: {type(error).__name__}: {error}"
            acceleration.say(reason, error)
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
_view_classes: dict[type, type[_Accelerated]] = {}
_contents_as_made: dict[type, tuple[list[str], Identities]] = {}
"""By accelerated class, its names and values when it was made."""
_plain_classes: dict[type, tuple[Any, type]] = {}
"""By changed accelerated class, or class derived from one, the class that was made again; see `plain_class`."""


def _without_acceleration(base: type) -> type:
    return base.plain_class() if issubclass(base, _Accelerated) else base


def _accelerated_class(original: Any) -> type[_Accelerated]:
    """Return the accelerated subclass of a model class, made once; raises UnsupportedModelError."""
    if original not in _classes:
        names = {"generate": _marking(original.generate)} if MARKS_NO_CACHES else {}
        _classes[original] = _derived(original, (_Accelerated, original), names)
    return _classes[original]


def _class_of_views(original: Any) -> type[_Accelerated]:
    """Return the subclass of an accelerated class whose objects have the attributes of another object, except
    `acceleration`.
    """
    if original not in _view_classes:
        bases = (_accelerated_class(original), original)
        _view_classes[original] = _derived(original, bases, {"__slots__": ("acceleration",)})
    return _view_classes[original]


def _derived(original: type, bases: tuple[type, ...], names: dict[str, Any]) -> type[_Accelerated]:
    """Make a class under the name of the original."""
    own = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    try:
        made: type[_Accelerated] = type(original.__name__, bases, {**own, **names})
    except Exception as error:  # a metaclass or __init_subclass__ can fail in any way
        reason = f"no class can be derived from {original.__name__}: {type(error).__name__}: {error}"
        raise UnsupportedModelError(reason) from error
    _contents_as_made[made] = [*vars(made)], Identities(vars(made).values())
    return made


def _needs_no_arguments(cls: Any) -> bool:
    """Return whether the constructor of a model class needs no arguments."""
    try:
        inspect.signature(cls.__init__).bind(None)
    except TypeError:
        return False
    return True


def _unfilled(original: type) -> _Accelerated:
    """Allocate an object for unpickling; its state follows."""
    return object.__new__(_accelerated_class(original))


def make_accelerated(model: PreTrainedModel, acceleration: Acceleration) -> None:
    """Change the model's class to the accelerated subclass, in place; raises UnsupportedModelError."""
    _check(model, acceleration)
    if not is_accelerated(model):
        object.__setattr__(model, "__class__", _accelerated_class(type(model)))  # whatever its own __setattr__ does
    vars(model)["acceleration"] = acceleration


def _check(model: PreTrainedModel, acceleration: Acceleration) -> None:
    """Warn if the model object has a `generate` of its own. Raises UnsupportedModelError if `acceleration` is something
    else.
    """
    if not isinstance(getattr(model, "acceleration", None), Acceleration | None):
        name = type(model).__name__
        raise UnsupportedModelError(f"{name} has an attribute `acceleration` of its own, which must be renamed")
    if "generate" in vars(model):  # which is called in place of ours
        acceleration.fallback = (
            "the model object has a generate() of its own, which is called in place of the accelerated one"
        )
        acceleration.say(acceleration.fallback)


def make_plain(model: PreTrainedModel) -> None:
    """Change the model's class back to the plain one, in place."""
    object.__setattr__(model, "__class__", own_class(model))
    del vars(model)["acceleration"]


def is_accelerated(model: PreTrainedModel) -> bool:
    """Return whether the object is of an accelerated class."""
    return isinstance(model, _Accelerated)


def view(model: PreTrainedModel, acceleration: Acceleration) -> PreTrainedModel:
    """Return an accelerated object that shares all attributes of the model, also those that its methods set during a
    call; the model itself is unchanged. Raises UnsupportedModelError.
    """
    _check(model, acceleration)
    view, acceleration.original = object.__new__(_class_of_views(own_class(model))), model
    object.__setattr__(view, "__dict__", vars(model))
    object.__setattr__(view, "acceleration", acceleration)
    return view
