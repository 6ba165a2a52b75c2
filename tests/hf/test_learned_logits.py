"""Scores, logits and hidden states that are returned and learned from are the model's, whatever code handles them
first.

References: the outputs of plain `generate`, and a forward pass of the model over every path of every draft.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from support import tiny
from support.architectures import VOCABULARY, model_of
from support.batches import padded
from support.cases import paired
from support.oracle import Oracle
from support.recurrent_architectures import recurrent
from support.releases import skip_before
from transformers import LogitsProcessor, LogitsProcessorList

import token_recycling as tr
from token_recycling.drafters._base import SequenceDrafter
from token_recycling.drafters.draft_model import DraftModel

NEW = 16
LENGTHS = (9, 4, 1)
SHOWN = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
ARGUMENTS = {
    "plain": {},
    "warped": {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "penalty": {"repetition_penalty": 1.4, "temperature": 0.7},
    "bias": {"sequence_bias": {(token, token + 1): 4.0 for token in range(60)}},
    "in place": {"logits_processor": "in place"},
    "first in place": {"logits_processor": "in place", "repetition_penalty": 1.4, "temperature": 0.7},
}
BATCHED = [name for name in ARGUMENTS if "place" not in name]


class InPlace(LogitsProcessor):
    """Changes its scores in place and returns them, as processors of other libraries do."""

    def __call__(self, input_ids, scores):
        scores.mul_(0.5)
        scores[:, input_ids[0, -1] % scores.shape[1]] = float("-inf")
        return scores


def arguments_of(name, sample):
    """Return arguments with new processors for each call."""
    found = {"max_new_tokens": NEW, "do_sample": sample, "pad_token_id": 0, **ARGUMENTS[name]}
    if "logits_processor" in found:
        found["logits_processor"] = LogitsProcessorList([InPlace()])
    if not sample:
        found = {key: value for key, value in found.items() if key not in ("temperature", "top_k", "top_p")}
    return found


@dataclass
class Watched(tr.Drafter):
    """Records the sequences and steps that another drafter learns from, and reads hidden states."""

    inner: tr.Drafter
    seen: list = field(default_factory=list)

    @property
    def traits(self):
        return replace(self.inner.traits, states=lambda layers: (0, layers))

    def start(self, prompt, target):
        return WatchedSequence(self, self.inner.start(prompt, target), prompt)


class WatchedSequence(SequenceDrafter):
    def __init__(self, drafter, inner, prompt):
        super().__init__(drafter)
        self.inner, self.pass_cost = inner, inner.pass_cost
        self.before, self.sources = prompt, {}  # for a first step without a draft

    def draft(self, context):
        draft = self.inner.draft(context)
        self.sources = {node: source.clone() for node, source in (draft.sampled_from or {}).items()}
        self.before = context.tokens.clone()
        return draft

    def observe(self, step):
        self.inner.observe(step)
        self.drafter.seen.append((self.before, step, self.sources))

    def read_prompt(self, states):
        self.drafter.seen.append((states,))


@pytest.fixture(scope="module")
def model():
    return tiny.llama(2, context=0.6, vocab_size=VOCABULARY)


def assert_steps_match(model, seen):
    """Assert that logits and states of every node equal those of its path, and that sampled distributions are
    unchanged.
    """
    steps = [entry for entry in seen if len(entry) > 1]
    assert steps
    for before, step, sources in steps:
        paths, drafted = step.draft.lineages, torch.as_tensor(step.draft.tokens)
        for length in sorted(set(map(len, paths))):
            nodes = [node for node, path in enumerate(paths) if len(path) == length]
            tokens = torch.stack([torch.cat([before[:-1], drafted[list(paths[node])]]) for node in nodes])
            with torch.no_grad():
                output = model(tokens, output_hidden_states=True)
            torch.testing.assert_close(step.logits[nodes].float(), output.logits[:, -1], atol=1e-4, rtol=1e-4)
            states = torch.cat([output.hidden_states[layer][:, -1] for layer in (0, -1)], dim=1)
            torch.testing.assert_close(step.states[nodes], states, atol=1e-4, rtol=1e-4)
        for node, source in sources.items():
            assert torch.equal(step.draft.sampled_from[node], source)


@pytest.mark.parametrize(("name", "sample"), paired(ARGUMENTS, [True, False]))
def test_scores_and_logits_of_one_sequence(model, name, sample):
    ids = tiny.prompt(1, 9)
    wanted, _ = tiny.seeded(model.generate, ids, **arguments_of(name, sample), **SHOWN)
    watched = Watched(Oracle(wanted.sequences))
    ours, _ = tiny.seeded(tr.generate, model, ids, drafter=watched, **arguments_of(name, sample), **SHOWN)
    assert torch.equal(ours.sequences, wanted.sequences)
    assert ours.stats.mat > 1.5
    for kept in ("scores", "logits"):
        assert len(ours[kept]) == NEW
        for one, other in zip(ours[kept], wanted[kept], strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
        assert len({one.data_ptr() for one in ours[kept]}) == NEW
    assert_steps_match(model, watched.seen)


@pytest.mark.parametrize(("name", "sample"), paired(BATCHED, [False, True]))
def test_scores_and_logits_of_a_batch(model, name, sample):
    """Rows of different lengths: each has its own scores, logits and states."""
    prompts = [tiny.prompt(seed, length)[0] for seed, length in enumerate(LENGTHS)]
    inputs, arguments = padded(prompts), arguments_of(name, sample)
    plain = model.generate if not sample else lambda **how: tr.generate(model, drafter="plain", **how)
    wanted, _ = tiny.seeded(plain, **inputs, **arguments, **SHOWN)
    width = max(LENGTHS)
    watched = Watched(Oracle([row[width - n :] for row, n in zip(wanted.sequences, LENGTHS, strict=True)]))
    ours, _ = tiny.seeded(tr.generate, model, drafter=watched, **inputs, **arguments, **SHOWN)
    assert torch.equal(ours.sequences, wanted.sequences)
    for kept in ("scores", "logits"):
        for one, other in zip(ours[kept], wanted[kept], strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert_steps_match(model, watched.seen)
    assert_prompt_states_match(model, prompts, watched.seen)


def assert_prompt_states_match(model, prompts, seen):
    """Assert that the hidden states of prompts equal those of each prompt alone."""
    hidden = []
    for prompt in prompts:
        with torch.no_grad():
            states = model(prompt[None], output_hidden_states=True).hidden_states
        hidden.append(torch.cat([states[0][0, :-1], states[-1][0, :-1]], dim=1))
    read = [entry[0] for entry in seen if len(entry) == 1]
    for states, expected in zip(read, [rows for rows in hidden if len(rows) or len(read) == len(hidden)], strict=True):
        torch.testing.assert_close(states, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1"])
def test_prompt_states_that_are_read_with_the_first_draft(family):
    """Models with recurrent layers read the prompts of a batch this way."""
    skip_before(5, 14)
    hybrid = model_of(recurrent(family))
    prompts = [tiny.prompt(seed, length)[0] % VOCABULARY for seed, length in enumerate(LENGTHS)]
    watched = Watched(tr.make_drafter("plain"))
    tr.generate(hybrid, drafter=watched, **padded(prompts), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert_prompt_states_match(hybrid, prompts, watched.seen)


@pytest.mark.parametrize(("name", "mode"), paired(["plain", "warped", "in place"], ["sequence", "tree"]))
def test_distributions_that_a_drafter_samples_from_stay_unchanged(model, name, mode):
    watched = Watched(DraftModel(tiny.related(model, 0.05), mode=mode, depth=3, sampled=True))
    torch.manual_seed(0)
    tr.generate(model, tiny.prompt(1, 9), drafter=watched, **arguments_of(name, True))
    assert any(entry[2] for entry in watched.seen if len(entry) > 1)
    assert_steps_match(model, watched.seen)
