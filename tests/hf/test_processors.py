"""Every logits processor of transformers for text: the accelerated output equals the plain one, and a processor
receives the sequence of its own node.

The classes are looked up in transformers, not listed here: a later release with a new one fails the first test until
its `Way` is added below, or the reason why it does not apply.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import architectures, tiny
from support.batches import padded
from support.cases import thinned
from support.oracle import Oracle
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import logits_process

import token_recycling as tr
from token_recycling.model import origin

VOCABULARY = architectures.VOCABULARY
ENDS = list(range(0, VOCABULARY, 16))
NEW = 20


@dataclass(frozen=True)
class Way:
    """Arguments of `generate` that activate a processor."""

    arguments: dict[str, Any]
    sampled: bool = False
    """Whether greedy decoding leaves it out."""
    batch: bool = True
    """Whether it treats the rows of a batch independently, so that batches are accelerated."""
    lengths: tuple[int, ...] = (9, 4, 1)
    """Lengths of the prompts of a batch."""


def balanced(_, ids):
    """Return the tokens that a grammar allows. Tokens below 10 open a bracket, those from 10 to 19 close one, and at
    most three are open; all others are allowed only within brackets.
    """
    opened = int((ids < 10).sum()) - int(((ids >= 10) & (ids < 20)).sum())
    return [
        *(range(1, 10) if opened < 3 else ()),
        *(range(10, 20) if opened > 0 else ()),
        *(range(20, 40) if opened > 0 else ()),
    ]


NEGATIVE = torch.tensor([[3, 1, 4, 1, 5]])
KEYS = [654, 400, 836, 123, 340, 443, 597, 160, 57]
WAYS: dict[str, list[Way]] = {
    "MinLengthLogitsProcessor": [Way({"min_length": 20})],
    "MinNewTokensLengthLogitsProcessor": [
        Way({"logits_processor": LogitsProcessorList([MinNewTokensLengthLogitsProcessor(9, 12, ENDS)])})
    ],
    "TemperatureLogitsWarper": [Way({"temperature": 0.4}, sampled=True)],
    "RepetitionPenaltyLogitsProcessor": [Way({"repetition_penalty": 1.4})],
    "EncoderRepetitionPenaltyLogitsProcessor": [Way({"encoder_repetition_penalty": 1.5}, batch=False)],
    "TopPLogitsWarper": [Way({"top_p": 0.7}, sampled=True)],
    "TopKLogitsWarper": [Way({"top_k": 7}, sampled=True)],
    "TopHLogitsWarper": [Way({"top_h": 0.4}, sampled=True)],
    "MinPLogitsWarper": [Way({"min_p": 0.1}, sampled=True)],
    "TypicalLogitsWarper": [Way({"typical_p": 0.6}, sampled=True)],
    "EpsilonLogitsWarper": [Way({"epsilon_cutoff": 0.02}, sampled=True)],
    "EtaLogitsWarper": [Way({"eta_cutoff": 0.05}, sampled=True)],
    "NoRepeatNGramLogitsProcessor": [Way({"no_repeat_ngram_size": 2})],
    "EncoderNoRepeatNGramLogitsProcessor": [Way({"encoder_no_repeat_ngram_size": 1}, batch=False)],
    "SequenceBiasLogitsProcessor": [Way({"sequence_bias": {(token, token + 1): 4.0 for token in range(95)}})],
    "NoBadWordsLogitsProcessor": [Way({"bad_words_ids": [[3], [5, 9], *([token, token + 2] for token in range(90))]})],
    "PrefixConstrainedLogitsProcessor": [
        Way({"prefix_allowed_tokens_fn": balanced}),
        Way({"prefix_allowed_tokens_fn": lambda row, ids: range(row * 12, row * 12 + 40)}),
    ],
    "ForcedBOSTokenLogitsProcessor": [Way({"forced_bos_token_id": 17}, lengths=(1, 1, 1))],
    "ForcedEOSTokenLogitsProcessor": [Way({"forced_eos_token_id": 11, "eos_token_id": 11})],
    "InfNanRemoveLogitsProcessor": [Way({"sequence_bias": {(5,): float("nan")}, "remove_invalid_values": True})],
    "ExponentialDecayLengthPenalty": [Way({"exponential_decay_length_penalty": (3, 1.05)})],
    "LogitNormalization": [Way({"renormalize_logits": True})],
    "SuppressTokensAtBeginLogitsProcessor": [Way({"begin_suppress_tokens": list(range(0, VOCABULARY, 2))})],
    "SuppressTokensLogitsProcessor": [Way({"suppress_tokens": list(range(0, VOCABULARY, 4))})],
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": [
        Way({"guidance_scale": 1.5}, batch=False),
        Way({"guidance_scale": 2.0, "negative_prompt_ids": NEGATIVE}, batch=False),
    ],
    "WatermarkLogitsProcessor": [
        Way({"watermarking_config": WatermarkingConfig(bias=2.5)}),
        Way({"watermarking_config": WatermarkingConfig(bias=2.5, context_width=2, seeding_scheme="selfhash")}),
    ],
    "SynthIDTextWatermarkLogitsProcessor": [
        Way({"watermarking_config": SynthIDTextWatermarkingConfig(keys=KEYS, ngram_len=3)}, batch=False)
    ],
}
OTHERS = {
    *("WhisperTimeStampLogitsProcessor", "WhisperNoSpeechDetection", "ClassifierFreeGuidanceLogitsProcessor"),
    *("AlternatingCodebooksLogitsProcessor", "BarkEosPrioritizerLogitsProcessor"),
    *("DiaClassifierFreeGuidanceLogitsProcessor", "DiaEOSChannelFilterLogitsProcessor"),
    "DiaEOSDelayPatternLogitsProcessor",
}
"""Processors of Whisper, MusicGen, Bark and Dia, which are no decoder-only language models."""
RUNS = [(name, way) for name, ways in WAYS.items() for way in ways]


def test_every_processor_of_transformers_is_listed():
    found = {
        name
        for name, value in vars(logits_process).items()
        if isinstance(value, type) and issubclass(value, LogitsProcessor) and value is not LogitsProcessor
    }
    assert found == {*WAYS, *OTHERS}
    assert not set(WAYS) & OTHERS


@pytest.fixture
def watch(monkeypatch):
    """Return a function that watches a class of processors. It returns a function that returns the calls since the last
    time: the sequences, the allowed tokens, and whether scores were changed.
    """

    def watching(name):
        kind, calls = getattr(logits_process, name), []
        original = kind.__call__

        @functools.wraps(original)
        def call(self, input_ids, scores):
            before = scores.clone()
            processed = original(self, input_ids, scores)
            calls.append((input_ids.tolist(), processed > -torch.inf, not torch.equal(processed, before)))
            return processed

        def since():
            found = calls[:]
            calls.clear()
            return found

        monkeypatch.setattr(kind, "__call__", call)
        return since

    for module in ("hf.call", "model.foreign.bystanders"):  # import the function by name: load them before the change
        importlib.import_module(f"token_recycling.{module}")
    monkeypatch.setattr(origin, "is_own", lambda package: True)  # the watching method changes nothing
    return watching


@pytest.fixture(scope="module")
def model():
    made = tiny.llama(2, context=0.6, vocab_size=VOCABULARY)
    made.generation_config.pad_token_id = 0
    return made


@pytest.mark.parametrize(("name", "way"), thinned(RUNS, 2, ids=lambda run: run[0]))
def test_single_sequence(name, way, model, watch):
    """Output and processor calls equal the plain ones, greedy and with a seed, after prompts of one and of several
    tokens.
    """
    since, changed, stats = watch(name), False, tr.Stats()
    for length in (1, 9):
        for sample in (False, True)[way.sampled :]:
            arguments = {"max_new_tokens": NEW, "eos_token_id": ENDS, "do_sample": sample, **way.arguments}
            ids = tiny.prompt(length, length, VOCABULARY)
            wanted, wanted_state = tiny.seeded(model.generate, ids, **arguments)
            plain = since()
            ours, state = tiny.seeded(tr.generate, model, ids, drafter=Oracle(wanted), stats=stats, **arguments)
            assert torch.equal(ours, wanted)
            assert torch.equal(state, wanted_state)
            asked = since()
            assert [texts for texts, _, _ in asked] == [texts for texts, _, _ in plain]
            assert len(asked) == ours.shape[1] - length
            changed |= any(changes for _, _, changes in asked)
    assert changed
    assert stats.mat > 1.5


@pytest.mark.parametrize(("name", "way"), thinned(RUNS, ids=lambda run: run[0]))
@pytest.mark.falls_back
def test_batch(name, way, model, watch):
    """Greedy rows equal plain rows; sampled ones equal those of the same seed without drafts. The processor receives
    the prefixes of every row in order, and no token that it forbids is emitted. A processor that treats rows jointly
    causes a fallback.
    """
    since = watch(name)
    width = max(way.lengths)
    arguments = {"max_new_tokens": NEW, "eos_token_id": ENDS, "do_sample": way.sampled, **way.arguments}
    if "negative_prompt_ids" in arguments:
        arguments["negative_prompt_ids"] = NEGATIVE.expand(3, -1)
    inputs = padded([tiny.prompt(seed, length, VOCABULARY)[0] for seed, length in enumerate(way.lengths)])
    wanted, _ = tiny.seeded(model.generate, **inputs, **arguments)
    if way.sampled and way.batch:  # each row has its own random numbers; rows of `generate` share them
        wanted, _ = tiny.seeded(tr.generate, model, drafter="plain", **inputs, **arguments)
    since()
    drafter = Oracle([row[width - n :] for row, n in zip(wanted, way.lengths, strict=True)])
    with tr.accelerated(model, drafter) as acceleration:
        ours, _ = tiny.seeded(model.generate, **inputs, **arguments)
    if not way.batch:
        assert name in str(acceleration.fallback)
        assert torch.equal(ours, wanted)
        return
    assert acceleration.fallback is None
    assert torch.equal(ours, wanted)
    assert acceleration.stats.mat > 1.5
    asked = since()
    assert any(changes for _, _, changes in asked)
    for row in ours.tolist():
        own = [(text, allowed[0]) for (text,), allowed, _ in asked if text[:width] == row[:width]]
        assert [text for text, _ in own] == [row[:end] for end in range(width, width + len(own))]
        assert all(allowed[row[len(text)]] for text, allowed in own)
        assert len(own) == NEW or row[width + len(own) - 1] in {*ENDS, 11}


def test_ids_that_a_processor_keeps_are_separate(model):
    """Writing to those of one token changes neither those of others nor the output."""

    def kept_by(generate):
        kept = []

        def keeping(ids, scores):
            kept.append(ids)
            return scores

        output = generate(tiny.prompt(0, 6), max_new_tokens=6, do_sample=False, logits_processor=[keeping])
        kept[-1].zero_()
        return [ids.tolist() for ids in (*kept, output)]

    assert kept_by(functools.partial(tr.generate, model)) == kept_by(model.generate)
