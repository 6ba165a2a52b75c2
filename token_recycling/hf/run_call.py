"""Runs a call of `generate`: the loop on what transformers has prepared, and what its own method would return."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

import torch
from transformers import DynamicCache, StaticCache
from transformers.generation import GenerateDecoderOnlyOutput

from ..cuda_graphs import Way, ordinary
from ..drafters._base import Drafter
from ..loop.hints import NO_HINTS, Hints
from ..loop.state import Sequence, TokenSelector
from ..loop.stats import Stats
from ..loop.step import decode
from ..model.kv_cache import slots
from ..model.tree_model import TreeModel
from .batch_stopping import BatchStopping
from .cache_handover import CacheHandover, fill_up
from .generate_call import GenerateCall


@dataclass
class Output(GenerateDecoderOnlyOutput):
    """The output of `generate(return_dict_in_generate=True)`, with the statistics of the run."""

    stats: Stats | None = None


def run_call(
    target: TreeModel,
    call: GenerateCall,
    drafter: Drafter,
    stats: Stats,
    way: Way = ordinary,
    hints: Hints = NO_HINTS,
    generator: torch.Generator | None = None,
) -> Output | torch.Tensor:
    """Decode what `call` asks for: return ids (batch, length), or an `Output` where the call wants one. Sampled tokens
    are drawn from `generator`, or torch's own.
    """
    if type(call.cache) is StaticCache:
        target.kept.say_once(
            "a static cache cannot keep chosen slots: accelerated calls decode in a dynamic one, without compiling "
            "the model for it; a cache that is the caller's, or returned, is filled at the end",
        )
    if target.info.compiled:
        target.kept.say_once(
            f"{type(target.model).__name__} is compiled: accelerated calls pass its graphs by, since torch would "
            "compile trees, whose shapes change, for minutes; calls that are left to transformers use them",
        )
    sequences, selectors = beginnings(call, generator)
    handover = CacheHandover(call.cache, call.paddings, target.config)
    stopping = BatchStopping(sequences, call.joint_criteria, call.padding_token if call.pads else None)
    cache, held, whole = handover.cache, handover.lengths, False
    prefixes = hints.prefixes if _begins_anew(call) and not drafter.traits.begins_anew else None
    if prefixes is not None:
        cache, held[0] = prefixes.take(sequences[0].on_host)
        stats.cached_tokens += held[0]

    def reading() -> None:
        nonlocal whole
        whole = True  # what was read of a prompt that nobody waits for any more can be kept
        if call.reading is not None:
            call.reading()
        whole = False

    with target.alone(), way(target, sequences, selectors, drafter, cache) as stepping:
        passes = decode(
            target,
            sequences,
            drafter,
            selectors,
            cache,
            stats,
            cached=held,
            after_pass=stopping.apply if call.joint_criteria else None,
            stepper=stepping.stepper,
            kind=stepping.kind,
            streamed=call.streamer is not None,
            reading=call.reading and reading,
            keeps_all=call.cache_is_seen,
            returns_cache=call.cache_is_seen or prefixes is not None,
            hints=hints,
        )
        try:
            with closing(passes):  # whatever ends the call, before the next one begins
                for steps in passes:
                    whole = True  # where the streamer ends the text, too
                    if call.streamer is not None:
                        call.streamer.put(torch.tensor(steps[0].tokens))
                    whole = False
            whole = True
        finally:
            if prefixes is not None and whole:
                prefixes.keep(sequences[0].on_host[: slots(cache) + 1], cache)
    if call.streamer is not None:
        call.streamer.end()
    stats.tokens -= stopping.withdrawn
    for sequence, selector in zip(sequences, selectors, strict=True):
        selector.forget(sequence.columns - call.input_ids.shape[1])
    if call.cache_is_seen and prefixes is None:
        if len({sequence.columns for sequence in sequences}) > 1:
            assert call.padding_token is not None, "texts of a batch end apart only where they are padded"
            fill_up(target, sequences, selectors, handover.cache, call.padding_token)
        handover.give_back(max(sequence.columns for sequence in sequences))
    ids = _stacked(sequences, call.padding_token)
    if not call.config.return_dict_in_generate:
        return ids
    scores = _by_step([sequence.scores for sequence in sequences])
    logits = _by_step([selector.logits for selector in selectors])
    return Output(sequences=ids, scores=scores, logits=logits, past_key_values=call.cache, stats=stats)


def _begins_anew(call: GenerateCall) -> bool:
    """Whether nobody sees the cache of a call's only text, so that it may begin with what is kept of others."""
    alone = len(call.input_ids) == 1 and not call.config.return_dict_in_generate
    return alone and type(call.cache) is DynamicCache and not call.cache.offloading and not slots(call.cache)


def beginnings(
    call: GenerateCall, generator: torch.Generator | None = None
) -> tuple[list[Sequence], list[TokenSelector]]:
    """Create the sequences of a call, and the selectors of their tokens."""
    config = call.config
    sequences = [
        Sequence(ids, call.criteria_by_text, pad) for ids, pad in zip(call.input_ids, call.paddings, strict=True)
    ]
    selectors = [
        TokenSelector(
            sequence,
            call.processors_for(row),
            sample=bool(config.do_sample),
            keep_scores=bool(config.return_dict_in_generate and config.output_scores),
            keep_logits=bool(config.return_dict_in_generate and config.output_logits),
            generator=generator,
        )
        for row, sequence in enumerate(sequences)
    ]
    return sequences, selectors


def _stacked(sequences: list[Sequence], padding: int | None) -> torch.Tensor:
    """(batch, columns) ids, shorter texts filled up with padding."""
    ids = [sequence.padded[0] for sequence in sequences]
    if padding is None:
        return torch.stack(ids)
    return torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=padding)


def _by_step(rows: list[list[torch.Tensor] | None]) -> tuple[torch.Tensor, ...] | None:
    """Batch the scores of all texts, (1, vocabulary) a token each: (batch, vocabulary) a token."""
    kept = [row for row in rows if row is not None]
    return tuple(map(torch.cat, zip(*kept, strict=True))) if kept else None
