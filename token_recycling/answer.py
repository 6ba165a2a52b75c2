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
from .fast import Fast
from .handover import Loan, fill_up
from .stats import Stats
from .target import Target, say_once
from .text import Chooser, Text
from .together import Jury


@dataclass
class Output(GenerateDecoderOnlyOutput):
    """What `generate(return_dict_in_generate=True)` returns, with the statistics of the run."""

    stats: Stats | None = None


def answer(
    model: PreTrainedModel, call: Call, drafter: Drafter, stats: Stats, fast: Fast = False
) -> Output | torch.Tensor:
    """Decodes what `call` asks for: ids (batch, length), or an `Output` where the call wants one."""
    target = Target(model)
    if type(call.cache) is StaticCache:
        say_once(
            model,
            "a static cache cannot keep chosen slots: accelerated calls decode in a dynamic one, without compiling "
            "the model for it; a cache that is the caller's, or returned, is filled at the end",
        )
    texts, choosers = _beginnings(call)
    loan = Loan(call.cache, call.paddings, target.config)
    jury = Jury(texts, call.joint_criteria, call.padding_token if call.pads else None)
    judge = jury.judge if call.joint_criteria else None
    for steps in decode(target, texts, drafter, choosers, loan.cache, stats, loan.lengths, judge, fast):
        if call.streamer is not None:
            call.streamer.put(torch.tensor(steps[0].tokens))
    if call.streamer is not None:
        call.streamer.end()
    stats.tokens -= jury.withdrawn
    for text, chooser in zip(texts, choosers, strict=True):
        chooser.forget(text.columns - call.input_ids.shape[1])
    if call.cache_is_seen:
        if len({text.columns for text in texts}) > 1:
            assert call.padding_token is not None, "texts of a batch end apart only where they are padded"
            fill_up(target, texts, choosers, loan.cache, call.padding_token)
        loan.give_back(max(text.columns for text in texts))
    sequences = _stacked(texts, call.padding_token)
    if not call.config.return_dict_in_generate:
        return sequences
    scores, logits = _by_step([text.scores for text in texts]), _by_step([chooser.logits for chooser in choosers])
    return Output(sequences=sequences, scores=scores, logits=logits, past_key_values=call.cache, stats=stats)


def _beginnings(call: Call) -> tuple[list[Text], list[Chooser]]:
    """The texts as they are given, and who chooses their tokens."""
    config = call.config
    texts = [Text(ids, call.criteria_by_text, pad) for ids, pad in zip(call.input_ids, call.paddings, strict=True)]
    choosers = [
        Chooser(
            text,
            call.processors_for(row),
            sample=bool(config.do_sample),
            keep_scores=bool(config.return_dict_in_generate and config.output_scores),
            keep_logits=bool(config.return_dict_in_generate and config.output_logits),
        )
        for row, text in enumerate(texts)
    ]
    return texts, choosers


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
