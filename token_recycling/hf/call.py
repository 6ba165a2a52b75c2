"""One call of `generate`, from the inputs that transformers prepared to the output that it returns.

`GenerateCall.why_not` returns the first reason against accelerating the call: only calls that are known to give the
same tokens are accelerated. `run_call` then decodes it in our loop. `handover` converts caches that are not new or that
the caller will see, `batch_ends` applies criteria that must see a whole batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
)
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from .._util.device import seeded_generators
from ..drafters._base import Drafter
from ..loop.batch import decode
from ..loop.processors import for_sequence
from ..loop.request import NO_HINTS, Hints, Request, TokenSelector, TokenSequence, pads_ended
from ..loop.stats import Stats
from ..model.backend import EAGER, Backend
from ..model.compat import CACHE, CALLERS, cache_argument, prepares_positions
from ..model.foreign import code_beside, mixes_sequences, why_not_plain
from ..model.foreign import why_not as why_not_code
from ..model.kv_cache import TreeCache, layout_of
from ..model.origin import is_own, name_of
from ..model.parts import replaced_in
from ..model.prefill import Reading
from ..model.target import Target
from .batch_ends import BatchStopping, fill_up, show_padding
from .handover import give_back, take_over
from .handover import why_not as why_not_cache

_KNOWN_INPUTS = {
    "attention_mask",
    "position_ids",
    "cache",
    "past_key_values",
    "cache_params",
    "use_cache",
    "logits_to_keep",
    "tokenizer",
}
_MARKS = {"mm_token_type_ids", "token_type_ids"}
"""Inputs that processors of multimodal models add to every prompt: 0 for a token of text."""
_SEPARATE_CRITERIA = {EosTokenCriteria, MaxLengthCriteria, StopStringCriteria}
"""Criteria that judge each sequence separately; a time limit ends all together."""


class GenerateCall:
    """The inputs that `generate` or `stream` prepared: (batch, length) ids, padded on the left, and everything that
    affects the choice of tokens.
    """

    def __init__(
        self,
        target: Target,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
        streamer: BaseStreamer | None = None,
    ) -> None:
        self.target = target
        """The model, as examined for this call."""
        self.input_ids, self.processors, self.criteria, self.config = input_ids, processors, criteria, config
        self.model_kwargs, self.streamer = model_kwargs, streamer
        self.cache: Cache = model_kwargs.get(target.cache_argument)
        """The KV cache, empty or with a prefix of the sequence."""
        if self.cache is None and (older_name := cache_argument(model_kwargs)) is not None:
            self.cache = model_kwargs[older_name]
        self._cache_is_callers = getattr(self.cache, CALLERS, False)
        self.cache_is_seen = bool(config.return_dict_in_generate or self._cache_is_callers)
        """Whether the caller has the cache, or will receive it."""
        reading = getattr(streamer, "reading_prompt", None)
        self.reading: Reading | None = reading if callable(reading) else None
        """The streamer's method `reading_prompt`, if it has one: it is called before each piece of a prompt, and may
        raise to end the call.
        """
        self.beside = code_beside(code for code in (*processors, *criteria, streamer) if code is not None)
        """Code of users and other libraries that runs between forward passes."""
        self.streams_tokens = not type(streamer).__module__.startswith("token_recycling.")
        """Whether the streamer receives each token before the next one is chosen, as from `generate`: the pieces of
        text depend on it, and a user's streamer may share what it saw with a criterion or processor. Streamers of this
        package receive all tokens of a step together.
        """
        self._columns_put = input_ids.shape[-1]
        """Columns of the sequence that the streamer has received."""
        self.pads = pads_ended(criteria)
        others = [criterion for criterion in criteria if type(criterion) not in (EosTokenCriteria, MaxLengthCriteria)]
        separate = self.pads and all(type(criterion) in _SEPARATE_CRITERIA for criterion in others)
        self.joint_criteria = StoppingCriteriaList([] if len(input_ids) == 1 or separate else others)
        """Criteria that must see all sequences together: the caller's own; all of them if ended sequences are not
        padded but continue with the others.
        """
        self.separate_criteria = StoppingCriteriaList(
            criterion for criterion in criteria if all(criterion is not other for other in self.joint_criteria)
        )
        """Criteria that are applied to each sequence separately."""

    @cached_property
    def paddings(self) -> list[int]:
        """Number of padding tokens before each sequence; -1 if some are elsewhere, if there are only padding tokens, or
        if the mask does not have a number for each token.
        """
        mask = self.model_kwargs.get("attention_mask")
        if mask is not None and mask.shape != self.input_ids.shape:
            return [-1] * len(self.input_ids)
        if mask is None or bool(mask.all()):
            return [0] * len(self.input_ids)
        text = mask.bool()
        lengths = text.sum(dim=1)
        from_the_right = torch.arange(text.shape[1], 0, -1, device=text.device) <= lengths[:, None]
        fits = (text == from_the_right).all(dim=1) & (lengths > 0)
        return torch.where(fits, text.shape[1] - lengths, -1).tolist()

    def why_not(self, model: PreTrainedModel) -> str | None:
        """Return why this call of `model`, the target's model or a view of it, cannot be accelerated, or None."""
        kwargs, config = self.model_kwargs, self.config
        ids = self.input_ids
        if ids.ndim != 2 or not len(ids) or ids.dtype not in (torch.int32, torch.int64):
            shape = f"{tuple(ids.shape)} {ids.dtype}"
            return f"input_ids must be int64 or int32 (batch, length) with at least one row, got {shape}"
        if ids.shape[1] == 0 or kwargs.get("inputs_embeds") is not None:
            return "the prompt is empty or consists of embeddings; pass token ids"
        if not kwargs.get("use_cache", True) or self.cache is None:
            return "the call uses no cache; pass use_cache=True"
        if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
            return "output_attentions and output_hidden_states are unsupported"
        others = self._other_inputs(model)
        if others:
            return f"inputs other than token ids are unsupported: {', '.join(others)}"
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in model.parameters()):
            return "gradients are unsupported; call generate() under torch.no_grad()"
        by_kernels = self.target.device.type == "cuda" and self.target.info.attention == "sdpa"
        if by_kernels and not _a_kernel_takes_masks():
            return "attention is limited to kernels without masks (sdpa_kernel); enable EFFICIENT_ATTENTION or MATH too"
        if self.pads and self.padding_token is None:
            return "a criterion ends sequences, but there is no padding token; pass pad_token_id"
        if config.is_assistant:
            return "the call drafts for another model (assisted generation)"
        own = type(model).prepare_inputs_for_generation
        prepare = vars(model).get("prepare_inputs_for_generation", own)
        if getattr(prepare, "__func__", prepare) is not own:  # as for peft's prompt learning
            return f"another object's prepare_inputs_for_generation is set on {type(model).__name__} (prompt learning?)"
        most = (config.max_length or 0) - 1
        if not self.cache_is_new and (reason := why_not_cache(self.cache, self.target, len(ids), ids.shape[1], most)):
            return reason
        if min(self.paddings) < 0:
            return "padding must be on the left, and the attention mask must have a number for each of input_ids"
        if reason := self._why_not_padding():
            return reason
        if not self._counts_from_zero():
            return "position_ids must count from 0 after the padding"
        info, alone, padded = self.target.info, len(ids) == 1, any(self.paddings)
        cache = self.cache if self._cache_is_callers else None
        return (
            (None if alone and not padded else info.why_not_batch)
            or (
                f"{info.name} attends to padding, which accelerated calls leave out"
                if padded and info.sees_padding
                else None
            )
            or (None if alone else self._why_not_batch())
            or self._why_not_lists()
            or why_not_code(self.target, len(ids), padded, self.beside, cache)
        )

    def _why_not_padding(self) -> str | None:
        """Return why `generate` may fail for padding, which accelerated calls do not read, or None."""
        tokens = [int(self.input_ids.min()), int(self.input_ids.max())] if any(self.paddings) else []
        if self.padding_token is not None and self.pads and len(self.input_ids) > 1:
            tokens.append(self.padding_token)
        without = [token for token in tokens if not 0 <= token < self.target.embedded]
        return f"token {without[0]} of the padding has no embedding, so that generate fails" if without else None

    @cached_property
    def cache_is_new(self) -> bool:
        """Whether the cache is the default one of `generate`, with the layers that the model was examined with, and
        empty.
        """
        by_default = type(self.cache) is DynamicCache and not self.cache.offloading and not self._cache_is_callers
        return by_default and layout_of(self.cache.layers) == self.target.info.cache_layout

    def _why_not_lists(self) -> str | None:
        """Return why processors or criteria would be applied differently from transformers, or None."""
        if all(type(criterion) is not MaxLengthCriteria for criterion in self.criteria):
            return "the criteria must limit the length, but none is a MaxLengthCriteria"
        lists: list[Any] = [self.processors, self.criteria]
        for cls in {*map(type, lists)}:
            if cls.__call__ not in (LogitsProcessorList.__call__, StoppingCriteriaList.__call__):
                return f"accelerated calls would not run the method __call__ of {cls.__name__}"
        classes = {cls for cls in map(type, (*lists, *self.criteria)) if is_own(cls.__module__)}
        for base in {base for cls in classes for base in cls.__mro__}:
            for _, name, function in replaced_in(base):
                if name == "__call__":
                    what = f"the method __call__ of {base.__name__}, replaced by {name_of(function)}"
                    return f"accelerated calls would not run {what}"
        return None

    def _other_inputs(self, model: PreTrainedModel) -> list[str]:
        """Return inputs other than token ids. With text only, multimodal models receive empty ones."""
        others = {name for name, value in self.model_kwargs.items() if name not in _KNOWN_INPUTS and value is not None}
        if nothing := {name for name, value in self.model_kwargs.items() if value is None} - {"attention_mask"}:
            parameters = inspect.signature(model.forward).parameters
            # Our forward passes omit the input, so its default applies, which is not None.
            others |= {name for name in nothing & parameters.keys() if parameters[name].default is not None}
        kept = self.model_kwargs.get("logits_to_keep", 0)
        if not (isinstance(kept, int) and kept >= 0):
            others.add("logits_to_keep by positions")
        if model.config.get_text_config(decoder=True) is not model.config:
            others -= {name for name in others & _MARKS if not self.model_kwargs[name].any()}
            if "mm_encoder_outputs" in others:
                others.remove("mm_encoder_outputs")
                encoded = self.model_kwargs["mm_encoder_outputs"]
                others |= {f"an encoded {medium}" for medium, value in encoded.items() if value is not None}
        return sorted(others)

    def _counts_from_zero(self) -> bool:
        """Return whether positions are those of the sequence's tokens: (batch, length), or for multimodal models that
        prepare them, several such tensors.
        """
        positions = self.model_kwargs.get("position_ids")
        if positions is None:
            return True
        several = self.target.model.config is not self.target.config
        several &= prepares_positions(type(self.target.model))
        if positions.ndim not in (2, 2 + several) or positions.shape[-1] != self.input_ids.shape[1]:
            return False
        axes = positions.reshape(-1, *positions.shape[-2:]).expand(-1, len(self.paddings), -1)
        counted = torch.arange(axes.shape[-1], device=axes.device)
        return all(
            bool((axes[:, row, padding:] == counted[: len(counted) - padding]).all())
            for row, padding in enumerate(self.paddings)
        )

    def put(self, sequence: TokenSequence) -> None:
        """Pass the streamer the tokens that it has not received, unless it receives each one immediately."""
        if self.streamer is None or self.streams_tokens or self._columns_put == sequence.columns:
            return
        tokens, self._columns_put = sequence.on_host[self._columns_put - sequence.padding :], sequence.columns
        self.streamer.put(tokens.clone())

    def _why_not_batch(self) -> str | None:
        """Return why several sequences cannot be accelerated where one could, or None."""
        if self.streamer is not None:
            return f"a streamer takes one sequence, got {len(self.input_ids)}"
        unknown = sorted({_name(processor) for processor in self.processors if for_sequence(processor, 0) is None})
        if unknown:
            return f"logits processors that may look across sequences need a batch of 1: {', '.join(unknown)}"
        # Sequences advance independently, so functions of processors are called in another order.
        for code in code_beside(self.processors):
            if reason := why_not_plain(self.target.model, code):
                return f"code that is called for each of several sequences must keep no state; {reason}"
        if self.config.return_dict_in_generate and self.config.output_scores:
            blind = {*_SEPARATE_CRITERIA, MaxTimeCriteria}
            names = sorted({_name(criterion) for criterion in self.joint_criteria if type(criterion) not in blind})
            if names:
                what = "output_scores is unsupported for several sequences with criteria that could read the scores"
                return f"{what}: {', '.join(names)}"
        return None

    @property
    def padding_token(self) -> int | None:
        """The token that pads ended sequences; None if there is none."""
        token = self.config.pad_token_id
        ids = self.config.eos_token_id if token is None else token
        return None if ids is None else int(torch.as_tensor(ids, device="cpu").flatten()[0])


def _a_kernel_takes_masks() -> bool:
    """Return whether sdpa may use one of its kernels on CUDA that support masks, which flash attention's does not."""
    cuda = torch.backends.cuda
    return cuda.mem_efficient_sdp_enabled() or cuda.math_sdp_enabled() or cuda.cudnn_sdp_enabled()


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def run_call(
    call: GenerateCall,
    drafter: Drafter,
    stats: Stats,
    backend: Backend = EAGER,
    hints: Hints = NO_HINTS,
    generator: torch.Generator | None = None,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Decode a call: return what `generate` returns for it. Random numbers are those of `generator`, or torch's own;
    see `requests_of`.
    """
    _warn_of_bypassed_graphs(call)
    if call.cache_is_new:
        cache, cached = TreeCache(call.cache), [0] * len(call.input_ids)
    else:
        cache, cached = take_over(call.cache, call.paddings, call.target.config)
    if len(cached) > 1 or call.cache_is_seen or not call.cache_is_new or drafter.traits.isolates_requests:
        hints = replace(hints, prefixes=None)  # sequences from prefixes start in another cache
    if len(cached) > 1 and drafter.traits.prefixes:  # a draft model reads a prefix of several sequences once
        from ..model.prefixes import own_prefixes

        hints = replace(hints, prefixes=own_prefixes(call.target))
    requests = requests_of(call, drafter, stats, cached, hints, generator)
    sequences = [request.sequence for request in requests]
    stopping = None
    if call.joint_criteria:
        stopping = BatchStopping(sequences, call.joint_criteria, call.padding_token if call.pads else None)
    passes = decode(
        requests,
        cache,
        backend,
        after_pass=None if stopping is None else stopping.apply,
        keeps_all=call.cache_is_seen or (len(sequences) > 1 and mixes_sequences(call.target)),
        returns_cache=call.cache_is_seen,
    )
    try:
        with closing(passes):  # whatever ends the call, before the next one begins
            for _ in passes:
                call.put(sequences[0])
    except BaseException as error:
        _leave(cache, call, requests, stopping)
        if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
            raise error.__cause__ from None  # of a processor or criterion, within our generator
        raise
    finally:
        call.put(sequences[0])  # tokens chosen before an error ended the step
    if call.streamer is not None:
        call.streamer.end()
    if stopping is not None:
        stats.tokens -= stopping.withdrawn
        for request in requests:
            request.selector.forget(request.sequence.columns - call.input_ids.shape[1])
    if call.cache_is_seen:
        _give_back(cache, call, requests)
    elif call.beside and call.pads and len(requests) > 1:
        show_padding(requests, call.padding_token or 0)
    return _output(call, requests)


def _leave(cache: TreeCache, call: GenerateCall, requests: list[Request], stopping: BatchStopping | None) -> None:
    """Leave the caller's cache as plain decoding would when an error ends the call."""
    if not call.cache_is_seen or cache.cache is not call.cache:
        return
    columns = [request.sequence.columns for request in requests] if len(requests) > 1 else []
    with suppress(Exception):  # as the call itself
        if len({*columns}) > 1 and call.padding_token is not None:
            fill_up(requests, cache, call.padding_token)
    columns = [min(call.paddings) + cache.length + 1, *(columns if stopping is None else [stopping.columns])]
    with suppress(Exception):  # an interrupt may leave slots in any state
        give_back(cache, call.cache, call.paddings, min(columns))


def _output(call: GenerateCall, requests: list[Request]) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Return what `generate` returns for a decoded call. An output object has the statistics of the run as an attribute
    `stats`, not as a field, so that `keys()` and `to_tuple()` are as usual.
    """
    ids, padding = [request.sequence.padded[0] for request in requests], call.padding_token if len(requests) > 1 else 0
    stacked = torch.stack(ids) if padding is None else pad_sequence(ids, batch_first=True, padding_value=padding)
    if not call.config.return_dict_in_generate:
        return stacked
    scores = _by_step([request.sequence.scores for request in requests])
    logits = _by_step([request.selector.logits for request in requests])
    output = GenerateDecoderOnlyOutput(sequences=stacked, scores=scores, logits=logits, **{CACHE: call.cache})
    vars(output)["stats"] = requests[0].stats
    return output


def _warn_of_bypassed_graphs(call: GenerateCall) -> None:
    """Warn, once per model, if compilation by transformers or torch is not used."""
    target = call.target
    if type(call.cache) is StaticCache:
        target.facts.warn_once(
            "a static cache cannot keep chosen slots: accelerated calls decode in a dynamic one, without compiling "
            "the model for it; a cache that is the caller's, or returned, is filled at the end",
        )
    if target.compiled:
        target.facts.warn_once(
            f"{type(target.model).__name__} is compiled: torch.compile graphs are bypassed, since draft trees change "
            "shape; calls that fall back to transformers use them",
        )


def _give_back(cache: TreeCache, call: GenerateCall, requests: list[Request]) -> None:
    """Leave the call's cache as plain decoding would, including the padding of shorter sequences."""
    columns = {request.sequence.columns for request in requests}
    if len(columns) > 1:
        assert call.padding_token is not None, "sequences of a batch end apart only where they are padded"
        fill_up(requests, cache, call.padding_token)
    give_back(cache, call.cache, call.paddings, max(columns))


def requests_of(
    call: GenerateCall,
    drafter: Drafter,
    stats: Stats,
    cached: Sequence[int],
    hints: Hints = NO_HINTS,
    generator: torch.Generator | None = None,
) -> list[Request]:
    """Return a request for each sequence of a call, with `cached[row]` tokens in its cache.

    A single sequence is sampled with `generator`, or torch's own, as in `generate`. Several sequences have their own
    random numbers, seeded from that generator: how far the others have advanced, which depends on drafts, shifts none
    of them.
    """
    config, batch, streamer = call.config, len(call.input_ids), call.streamer
    generators = [generator] * batch
    if batch > 1 and config.do_sample:
        generators = [*seeded_generators(batch, call.input_ids.device, generator)]
    requests = []
    for row, ids in enumerate(call.input_ids):
        # As with the first token that `generate` appends: int32 becomes int64.
        sequence = TokenSequence(ids.long(), call.separate_criteria, call.paddings[row], watched=bool(call.beside))
        if streamer is not None and call.streams_tokens:
            sequence.on_token = lambda token: streamer.put(torch.tensor([token]))
        applied = call.processors
        if batch > 1:
            applied = LogitsProcessorList([for_sequence(processor, row) for processor in applied])
        selector = TokenSelector(
            sequence,
            applied,
            sample=bool(config.do_sample),
            keep_scores=bool(config.return_dict_in_generate and config.output_scores),
            keep_logits=bool(config.return_dict_in_generate and config.output_logits),
            generator=generators[row],
        )
        requests.append(
            Request(
                call.target,
                sequence,
                selector,
                drafter,
                stats,
                cached[row],
                hints,
                streamed=streamer is not None,
                reading=call.reading,
            )
        )
    return requests


def _by_step(rows: list[list[torch.Tensor] | None]) -> tuple[torch.Tensor, ...] | None:
    """Batch the scores of all sequences: (1, vocabulary) per token of each becomes (batch, vocabulary) per token."""
    kept = [row for row in rows if row is not None]
    return tuple(map(torch.cat, zip(*kept, strict=True))) if kept else None
