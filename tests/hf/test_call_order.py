"""Processors, criteria and streamers are called as by `generate`: each once per token, in the same order, and each sees
the changes of those before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import tiny
from support.cases import thinned
from support.side_by_side import SideBySide
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

import token_recycling as tr

IDS = tiny.prompt(0, 5).repeat(1, 3)
BATCH = torch.cat([IDS, IDS.roll(2, 1)])
GREEDY: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
Code = dict[str, Any]


class Streamer(BaseStreamer):
    def __init__(self, do: Callable[[int], Any]) -> None:
        self.do, self.puts = do, 0

    def put(self, value):
        self.puts += 1
        self.do(int(value.flatten()[-1]) if self.puts == 1 else value.item())

    def end(self):
        self.do(-1)


def continuing(do: Callable[[Any], Any]) -> Callable[..., torch.Tensor]:
    return lambda ids, scores, **_: (do(ids), torch.zeros(len(ids), dtype=torch.bool))[1]


def all_three(log: list[Any]) -> Code:
    return {
        "logits_processor": [lambda ids, scores: (log.append(("processor", ids.shape[1])), scores)[1]],
        "stopping_criteria": [continuing(lambda ids: log.append(("criterion", ids.shape[1])))],
        "streamer": Streamer(lambda token: log.append(("streamer", token))),
        "eos_token_id": [5, 11, 23, 41],
    }


def a_criterion_that_reads_a_streamer(log: list[Any]) -> Code:
    streamer = Streamer(lambda token: None)
    return {
        "stopping_criteria": [lambda ids, scores: torch.full((len(ids),), streamer.puts >= 8)],
        "streamer": streamer,
    }


def a_processor_that_reads_a_streamer(log: list[Any]) -> Code:
    streamer = Streamer(lambda token: None)
    return {"logits_processor": [lambda ids, scores: scores.roll(streamer.puts, 1)], "streamer": streamer}


def a_streamer_that_changes_a_penalty(log: list[Any]) -> Code:
    penalty = RepetitionPenaltyLogitsProcessor(1.0)
    streamer = Streamer(lambda token: setattr(penalty, "penalty", 1.0 + streamer.puts % 5))
    return {"logits_processor": [penalty], "streamer": streamer}


def a_criterion_that_changes_a_temperature(log: list[Any]) -> Code:
    warper = TemperatureLogitsWarper(1.0)
    criterion = continuing(lambda ids: setattr(warper, "temperature", 0.1 + ids.shape[1] % 3))
    return {"logits_processor": [warper], "stopping_criteria": [criterion], "do_sample": True}


def a_criterion_that_changes_the_ends(log: list[Any]) -> Code:
    ends = EosTokenCriteria(1000)

    def change(ids, scores):
        ends.eos_token_id = torch.arange(64 if ids.shape[1] > 20 else 1)
        return ids[:, -1] < 0

    return {"stopping_criteria": [change, ends]}


def a_processor_that_changes_the_length(log: list[Any]) -> Code:
    length = MaxLengthCriteria(30)

    def shorten(ids, scores):
        length.max_length = 20 if ids.shape[1] > 17 else 30
        return scores

    return {"logits_processor": [shorten], "stopping_criteria": [length]}


def tokens_of_an_iterator(log: list[Any]) -> Code:
    tokens = iter([5, 6, 7, 8, 9])
    return {"logits_processor": [lambda ids, scores: scores.index_fill(1, torch.tensor([next(tokens)]), 99.0)]}


def scores(change: Callable[[torch.Tensor], Any]) -> Callable[[list[Any]], Code]:
    return lambda log: {"logits_processor": [lambda ids, scores: change(scores)]}


def ends(result: Callable[[torch.Tensor], Any], **more: Any) -> Callable[[list[Any]], Code]:
    return lambda log: {"stopping_criteria": [lambda ids, scores: result(ids)], **more}


CASES: dict[str, Callable[[list[Any]], Code]] = {
    "all three": all_three,
    "a criterion that reads a streamer": a_criterion_that_reads_a_streamer,
    "a processor that reads a streamer": a_processor_that_reads_a_streamer,
    "a streamer that changes a penalty": a_streamer_that_changes_a_penalty,
    "a criterion that changes a temperature": a_criterion_that_changes_a_temperature,
    "a criterion that changes the end tokens": a_criterion_that_changes_the_ends,
    "a processor that changes the length": a_processor_that_changes_the_length,
    "two length limits": lambda log: {"stopping_criteria": [MaxLengthCriteria(30), MaxLengthCriteria(22)]},
    "tokens of an iterator": tokens_of_an_iterator,
    "no scores": scores(lambda scores: None),
    "scores as a NumPy array": scores(lambda scores: scores.numpy()),
    "scores of one dimension": scores(lambda scores: scores[0]),
    "scores of one dimension, with padding": lambda log: {
        "logits_processor": [lambda ids, scores: scores[0]],
        "eos_token_id": 5,
    },
    "scores of more rows": scores(lambda scores: scores.repeat(2, 1)),
    "scores of three dimensions": scores(lambda scores: scores[None]),
    "scores as integers": scores(lambda scores: (scores * 10).long()),
    "no answer": ends(lambda ids: None),
    "an answer in a list": ends(lambda ids: [True]),
    "a number": ends(lambda ids: ids.shape[1] // 20),
    "an answer as floats": ends(lambda ids: torch.ones(len(ids))),
    "an even number for each row": ends(lambda ids: 2 * (ids[:, -1] % 3), inputs=BATCH),
    "an answer of two dimensions": ends(lambda ids: torch.zeros(len(ids), 1).bool(), inputs=BATCH),
}


def outcomes(model: Any, bring: Callable[[list[Any]], Code]) -> list[Any]:
    """Return the tokens or the error class of three calls, and what was logged; later calls have drafts."""
    results: list[Any] = []
    for seed in itertools.repeat(1, 3):
        log: list[Any] = []
        torch.manual_seed(seed)
        arguments = {"inputs": IDS, **GREEDY, **bring(log)}
        try:
            results += [model.generate(**arguments).tolist(), log]
        except (TypeError, IndexError, RuntimeError, StopIteration) as error:
            results.append(type(error))
    return results


EVERY_RUN = {*[*CASES][::2], "two length limits"}


@pytest.mark.parametrize("name", thinned(CASES, kept=EVERY_RUN.__contains__))
def test_code_around_the_model_is_called_as_by_generate(name):
    SideBySide(tiny.llama).assert_same(lambda model: outcomes(model, CASES[name]))


def test_error_names_a_processor_that_returns_none():
    with pytest.raises(TypeError, match=r"NoneType from .*<lambda>"):
        tr.accelerate(tiny.llama()).generate(IDS, logits_processor=[lambda ids, scores: None], **GREEDY)
