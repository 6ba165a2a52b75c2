"""The library inside transformers: `accelerate(model)` and the model's own `generate()` is faster.

`generate` prepares everything (processors, criteria, cache, streamer) and hands it to the method `_sample` of the
model's class. An accelerated model is of a subclass made on the spot that overrides this one method, so that pipelines,
streamers and servers work unchanged, and the model is saved and copied under its own name. What cannot be accelerated
without risk goes to transformers' own method, with a warning that says why.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from .decode import Chooser, Text, decode
from .drafting import Drafter, make_drafter
from .stats import Stats
from .target import Target, UnsupportedModelError, unsupported, unsupported_cache

logger = logging.getLogger("token_recycling")

_KNOWN_INPUTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "tokenizer"}

_NOT_REACHED = "expected greedy or sampled decoding, got beams, an assistant, prompt lookup or a custom loop"


@dataclass
class Output(GenerateDecoderOnlyOutput):
    """What `generate(return_dict_in_generate=True)` returns, with the statistics of the run."""

    stats: Stats | None = None


@dataclass
class Acceleration:
    """What `accelerate` adds to a model, as `model.acceleration`."""

    drafter: Drafter
    """Drafts, and remembers from call to call."""
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
        reason = _why_not(self, input_ids, generation_config, model_kwargs, synced_gpus)
        if reason is not None:
            self.acceleration.fall_back(reason)
            return super()._sample(
                input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, **model_kwargs
            )
        self.acceleration.fallback = None
        try:
            return _run(
                self,
                self.acceleration.drafter,
                self.acceleration.stats,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                streamer,
                model_kwargs,
            )
        finally:
            self.acceleration.total += self.acceleration.stats


def accelerate(model: PreTrainedModel, drafter: str | Drafter = "recycling", **options: Any) -> PreTrainedModel:
    """Makes the model's own `generate()` faster, in place, and returns the model.

    `options` go to the drafter. What the drafter learns stays in `model.acceleration.drafter`; the last call's
    statistics are in `model.acceleration.stats`. Accelerating again replaces the drafter. Raises UnsupportedModelError
    with the reason.
    """
    reason = unsupported(model)
    if reason is not None:
        raise UnsupportedModelError(reason)
    made = make_drafter(drafter, **options)
    if not isinstance(model, _Accelerated):
        model.__class__ = _accelerated_class(type(model))
    model.acceleration = Acceleration(made)
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
def accelerated(model: PreTrainedModel, drafter: str | Drafter = "recycling", **options: Any) -> Iterator[Acceleration]:
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
    *inputs: Any,
    drafter: str | Drafter = "recycling",
    stats: Stats | None = None,
    **arguments: Any,
) -> Any:
    """One call of `model.generate(*inputs, **arguments)`, accelerated; the same arguments and the same return.

    Pass one made drafter again to keep what it learned. `stats` is filled in; with `return_dict_in_generate=True` the
    statistics are in the output too. Raises UnsupportedModelError where `accelerate` does; a call that cannot be
    accelerated is left to transformers with a warning.
    """
    with accelerated(model, drafter) as acceleration:
        acceleration.stats.synchronize = bool(stats and stats.synchronize)
        result = model.generate(*inputs, **arguments)
        if stats is not None:
            vars(stats).update(vars(stats + acceleration.stats))
        return result


def custom_generate(drafter: str | Drafter = "recycling", **options: Any) -> Callable[..., Any]:
    """A function for `model.generate(..., custom_generate=...)`, for code that must not touch the model.

    Keep the function to keep what its drafter learns. transformers gives such functions no streamer; use `accelerate`
    for one. Raises UnsupportedModelError for a call that cannot be accelerated.
    """
    made = make_drafter(drafter, **options)

    def recycle(
        model: PreTrainedModel,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | torch.LongTensor:
        reason = unsupported(model) or _why_not(model, input_ids, generation_config, model_kwargs, False)
        if reason is not None:
            raise UnsupportedModelError(reason)
        return _run(
            model, made, Stats(), input_ids, logits_processor, stopping_criteria, generation_config, None, model_kwargs
        )

    return recycle


def _why_not(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    synced_gpus: bool,
) -> str | None:
    """Why this call of `generate` cannot be accelerated, or None."""
    if input_ids.shape[0] != 1:
        return f"expected one text, got a batch of {input_ids.shape[0]}"
    if input_ids.shape[1] == 0 or model_kwargs.get("inputs_embeds") is not None:
        return "expected a prompt of token ids, got embeddings or nothing"
    if not model_kwargs.get("use_cache", True) or model_kwargs.get("past_key_values") is None:
        return "expected use_cache=True, got a call without a cache"
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        return "expected output_attentions and output_hidden_states to be off"
    if synced_gpus:
        return "expected one process per text, got synced_gpus=True"
    mask = model_kwargs.get("attention_mask")
    if mask is not None and (mask.ndim != 2 or not bool(mask.bool().all())):
        return "expected a prompt without padding, got an attention mask with zeros"
    positions = model_kwargs.get("position_ids")
    if positions is not None and not torch.equal(
        positions[0], torch.arange(positions.shape[-1], device=positions.device)
    ):
        return "expected positions that count from 0, got others in position_ids"
    cache = model_kwargs["past_key_values"]
    if cache.get_seq_length() >= input_ids.shape[1]:
        return f"expected the whole text, got {input_ids.shape[1]} tokens with a cache of {cache.get_seq_length()}"
    others = sorted(name for name, value in model_kwargs.items() if name not in _KNOWN_INPUTS and value is not None)
    if others:
        return f"expected token ids only, got {', '.join(others)}"
    return unsupported_cache(cache) or unsupported(model)


def _run(
    model: PreTrainedModel,
    drafter: Drafter,
    stats: Stats,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    config: GenerationConfig,
    streamer: BaseStreamer | None,
    model_kwargs: dict[str, Any],
) -> GenerateDecoderOnlyOutput | torch.LongTensor:
    """The loop on what `generate` has prepared, returning what `_sample` returns."""
    target, cache = Target(model), model_kwargs["past_key_values"]
    text = Text(input_ids[0], stopping_criteria)
    chooser = Chooser(
        text,
        logits_processor,
        sample=bool(config.do_sample),
        keep_scores=bool(config.return_dict_in_generate and config.output_scores),
        keep_logits=bool(config.return_dict_in_generate and config.output_logits),
    )
    for step in decode(target, text, drafter, chooser, cache, stats):
        if streamer is not None:
            streamer.put(torch.tensor(step.tokens))
    if streamer is not None:
        streamer.end()
    sequences = text.tokens[None].to(input_ids.device)
    if not config.return_dict_in_generate:
        return sequences
    scores = None if text.scores is None else tuple(text.scores)
    logits = None if chooser.logits is None else tuple(chooser.logits)
    return Output(sequences=sequences, scores=scores, logits=logits, past_key_values=cache, stats=stats)
