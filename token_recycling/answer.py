"""Answers a call of `generate`: the loop on what transformers has prepared, and what its own method would return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, StaticCache
from transformers.generation import GenerateDecoderOnlyOutput

from .call import Call
from .decode import decode
from .drafting import Drafter
from .handover import Loan, fill_up
from .stats import Stats
from .target import Target, say_once
from .text import Chooser, Text
from .together import Jury


@dataclass
class Output(GenerateDecoderOnlyOutput):
    """What `generate(return_dict_in_generate=True)` returns, with the statistics of the run."""

    stats: Stats | None = None


def answer(model: PreTrainedModel, call: Call, drafter: Drafter, stats: Stats) -> Output | torch.Tensor:
    """Decodes what `call` asks for: ids (batch, length), or an `Output` where the call wants one."""
    target, config = Target(model), call.config
    if type(call.cache) is StaticCache:
        say_once(
            model,
            "a static cache cannot keep chosen slots: accelerated calls decode in a dynamic one, without compiling "
            "the model for it; a cache that is the caller's, or returned, is filled at the end",
        )
    texts = [Text(ids, call.criteria_by_text, pad) for ids, pad in zip(call.input_ids, call.paddings, strict=True)]
    keeps = config.return_dict_in_generate
    choosers = [
        Chooser(
            text,
            call.processors_for(row),
            sample=bool(config.do_sample),
            keep_scores=bool(keeps and config.output_scores),
            keep_logits=bool(keeps and config.output_logits),
        )
        for row, text in enumerate(texts)
    ]
    loan = Loan(call.cache, call.paddings, target.config)
    padding = None if config._pad_token_tensor is None else int(config._pad_token_tensor)
    jury = Jury(texts, call.joint_criteria, padding if call.pads else None)
    judge = jury.judge if call.joint_criteria else lambda: None
    for steps in decode(target, texts, drafter, choosers, loan.cache, stats, loan.lengths, judge):
        if call.streamer is not None:
            call.streamer.put(torch.tensor(steps[0].tokens))
    if call.streamer is not None:
        call.streamer.end()
    stats.tokens -= jury.withdrawn
    said = [text.columns - call.input_ids.shape[1] for text in texts]
    for chooser, tokens in zip(choosers, said, strict=True):
        chooser.forget(tokens)
    if call.cache_is_seen:
        if len(set(said)) > 1:
            assert padding is not None, "texts of a batch end apart only where they are padded"
            fill_up(target, texts, choosers, loan.cache, padding)
        loan.give_back(max(text.columns for text in texts))
    sequences = _stacked(texts, padding)
    if not config.return_dict_in_generate:
        return sequences
    scores, logits = _by_step([text.scores for text in texts]), _by_step([chooser.logits for chooser in choosers])
    return Output(sequences=sequences, scores=scores, logits=logits, past_key_values=call.cache, stats=stats)


def _stacked(texts: Sequence[Text], padding: int | None) -> torch.Tensor:
    """(batch, columns) ids, shorter texts filled up with padding."""
    ids = [text.padded[0] for text in texts]
    if padding is None:
        return torch.stack(ids)
    return torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=padding)


def _by_step(rows: Sequence[list[torch.Tensor] | None]) -> tuple[torch.Tensor, ...] | None:
    """Of every text a (1, vocabulary) tensor a token: (batch, vocabulary) a token."""
    kept = [row for row in rows if row is not None]
    return tuple(map(torch.cat, zip(*kept, strict=True))) if kept else None
