"""Whatever a drafter proposes, the text is that of `model.generate`: every registered drafter in every way of calling.

A way is a small program that calls a `generate` function: it runs once with the model's own, and with each drafter
through one of our surfaces, and must return the same. Its first prompt comes again at the end, so that what a drafter
has remembered is tested too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.batches import batch
from support.drafters import example
from support.elsewhere import THERE, another_device, put_there
from transformers import DynamicCache, LlamaForCausalLM, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import logits_process

import token_recycling as tr

NEW = 20
ENDS = {"eos_token_id": [5, 11, 23, 41], "pad_token_id": 0}
Generate = Callable[..., Any]


def prompts(size: int = 64) -> list[torch.Tensor]:
    """Texts that repeat themselves, so that something can be found in them; the last one is the first again."""
    return [tiny.prompt(seed, 4 + seed, size).repeat(1, 2) for seed in (0, 3, 0)]


def greedy(model: PreTrainedModel, generate: Generate) -> list[torch.Tensor]:
    return [generate(ids, max_new_tokens=NEW) for ids in prompts(model.config.vocab_size)]


def one_token(model: PreTrainedModel, generate: Generate) -> list[torch.Tensor]:
    return [generate(ids, max_new_tokens=new) for ids in (tiny.prompt(0, 1), *prompts()) for new in (1, 2)]


def end_of_sequence(model: PreTrainedModel, generate: Generate) -> list[torch.Tensor]:
    return [generate(ids, max_new_tokens=NEW, **ENDS) for ids in prompts()]


def sampled(model: PreTrainedModel, generate: Generate) -> list[torch.Tensor]:
    """With a seed; what is drawn next is the same too."""
    sampling = {"do_sample": True, "temperature": 0.7, "top_k": 20, "max_new_tokens": NEW}
    return [one for seed, ids in enumerate(prompts()) for one in tiny.seeded(generate, ids, seed=seed, **sampling)]


def several_samples(model: PreTrainedModel, generate: Generate) -> list[torch.Tensor]:
    """Of one prompt. Draws of several texts come in another order than in `generate`: here there is one choice."""
    sampling = {"do_sample": True, "top_k": 1, "num_return_sequences": 3, "max_new_tokens": NEW}
    return [generate(ids, **sampling, **ENDS) for ids in prompts()[1:]]


def padded_batch(model: PreTrainedModel, generate: Generate) -> list[torch.Tensor]:
    """Texts of different lengths, some of which end early."""
    inputs = [batch([4, 9, 5], 1, spare=1), batch([3, 1], 2), batch([4, 9, 5], 1)]
    return [generate(**one, max_new_tokens=NEW, **ENDS) for one in inputs]


def processors(model: PreTrainedModel, generate: Generate) -> list[torch.Tensor]:
    processing = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 8}
    return [generate(ids, max_new_tokens=NEW, **processing, **ENDS) for ids in prompts()]


def stop_strings(model: PreTrainedModel, generate: Generate) -> list[torch.Tensor]:
    stopping = {"stop_strings": ["a", "re"], "tokenizer": tiny.tokenizer(), "max_new_tokens": 40}
    return [generate(ids, **stopping) for ids in prompts(300)]


def criteria(model: PreTrainedModel, generate: Generate) -> list[torch.Tensor]:
    """One of the caller's own, and what it was shown."""
    shown = []

    def stops(input_ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        shown.append(input_ids.clone())
        return input_ids[:, -1] % 9 == 2

    stopping = {"stopping_criteria": StoppingCriteriaList([stops]), "max_new_tokens": NEW}
    return [generate(ids, **stopping) for ids in prompts()] + shown


def scores(model: PreTrainedModel, generate: Generate) -> list[torch.Tensor]:
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.1}
    outputs = [generate(ids, max_new_tokens=NEW, **asked) for ids in prompts()]
    return [
        one
        for output in outputs
        for one in (output.sequences, *output.scores, *output.logits, output.past_key_values.layers[0].keys)
    ]


def conversation(model: PreTrainedModel, generate: Generate) -> list[torch.Tensor]:
    """Three turns on one cache that is passed in, twice."""
    found = []
    for _ in range(2):
        held, text = DynamicCache(config=model.config), tiny.prompt(0, 8)
        for turn in range(3):
            text = generate(text, past_key_values=held, max_new_tokens=8)
            found += [text, held.layers[-1].values]
            text = torch.cat([text, tiny.prompt(turn, 1 + turn)], dim=1)
    return found


def streamer(model: PreTrainedModel, generate: Generate) -> list[torch.Tensor]:
    """What a streamer is given, the end included."""
    given: list[int] = []

    class Collecting:
        def put(self, value: torch.Tensor) -> None:
            given.extend(value.flatten().tolist())

        def end(self) -> None:
            given.append(-1)

    return [*(generate(ids, streamer=Collecting(), max_new_tokens=NEW) for ids in prompts()), torch.tensor(given)]


def last_position(model: PreTrainedModel, generate: Generate) -> list[torch.Tensor]:
    """Up to the last of 32 learned positions."""
    return [generate(tiny.prompt(seed, 14, 80), max_new_tokens=19) for seed in (0, 3, 0)]


def beyond_16_bits(model: PreTrainedModel, generate: Generate) -> list[torch.Tensor]:
    """Ids of more than 16 bits."""
    return [generate(65_600 - ids, max_new_tokens=NEW) for ids in prompts()]


def logits_processor(model: PreTrainedModel, generate: Generate) -> list[torch.Tensor]:
    """As objects, for surfaces without `generate`'s arguments."""
    processing = LogitsProcessorList([logits_process.RepetitionPenaltyLogitsProcessor(1.3)])
    return [generate(ids, max_new_tokens=NEW, logits_processor=processing) for ids in prompts()]


@cache
def model_for(way: Generate) -> PreTrainedModel:
    """The model of a way of calling."""
    if way is last_position:
        torch.manual_seed(0)
        return tiny.gpt2(n_positions=32).eval()
    if way is stop_strings:
        return tiny.llama(4, vocab_size=300)
    if way is beyond_16_bits:
        return tiny.llama(vocab_size=65_600, hidden_size=16)
    return tiny.llama()


@cache
def wanted(way: Generate) -> list[torch.Tensor]:
    """What transformers' own `generate` returns."""
    model = model_for(way)
    return way(model, model.generate)


def generated(model: PreTrainedModel, drafter: tr.Drafter) -> Generate:
    return partial(tr.generate, model, drafter=drafter)


def accelerated(model: PreTrainedModel, drafter: tr.Drafter) -> Generate:
    def generate(*inputs: Any, **arguments: Any) -> Any:
        result = model.generate(*inputs, **arguments)
        assert model.acceleration.fallback is None
        return result

    tr.accelerate(model, drafter)
    return generate


def custom(model: PreTrainedModel, drafter: tr.Drafter) -> Generate:
    return partial(model.generate, custom_generate=tr.custom_generate(drafter))


def streamed(model: PreTrainedModel, drafter: tr.Drafter) -> Generate:
    def generate(ids: torch.Tensor, temperature: float = 1.0, top_k: int = 0, **arguments: Any) -> torch.Tensor:
        if top_k:
            warpers = [logits_process.TemperatureLogitsWarper(temperature), logits_process.TopKLogitsWarper(top_k)]
            arguments["logits_processor"] = LogitsProcessorList(warpers)
        arguments.pop("pad_token_id", None)
        steps = tr.stream(model, ids, drafter, **arguments)
        return torch.cat([ids, torch.tensor([[token for step in steps for token in step.tokens]])], dim=1)

    return generate


def fast(model: PreTrainedModel, drafter: tr.Drafter) -> Generate:
    """Steps of constant shapes, which are not captured on a CPU."""
    return partial(tr.generate, model, drafter=drafter, fast=True)


EVERY_WAY = [
    greedy,
    one_token,
    end_of_sequence,
    sampled,
    several_samples,
    padded_batch,
    processors,
    stop_strings,
    criteria,
    scores,
    conversation,
    streamer,
    last_position,
    beyond_16_bits,
]
TABLE = {
    generated: EVERY_WAY,
    accelerated: [greedy, sampled, padded_batch, stop_strings, conversation, streamer],
    custom: [greedy, sampled, padded_batch, criteria, scores, conversation],
    streamed: [greedy, one_token, end_of_sequence, sampled, logits_processor, criteria],
    fast: [greedy, one_token, end_of_sequence, criteria, conversation, streamer, last_position],
}


@pytest.mark.parametrize("name", tr.drafter_names())
@pytest.mark.parametrize(
    ("surface", "way"),
    [(surface, way) for surface, ways in TABLE.items() for way in ways],
    ids=lambda function: function.__name__,
)
def test_the_text_is_that_of_generate(surface: Any, way: Generate, name: str, tmp_path: Path) -> None:
    model = model_for(way)
    drafter = example(name, model, tmp_path)
    if surface is fast and drafter.traits.hidden_states:
        with pytest.raises(tr.NoFastPathError, match="one that needs hidden states"):
            way(model, surface(model, drafter))
        return
    try:
        found = way(model, surface(model, drafter))
    finally:
        tr.decelerate(model)
    for ours, theirs in zip(found, wanted(way), strict=True):
        if ours.is_floating_point():
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        else:
            assert torch.equal(ours, theirs)


def test_the_ways_are_worth_a_test() -> None:
    """Texts end early where they may, and not all of them at once."""
    for way in (end_of_sequence, stop_strings, criteria):
        lengths = {text.shape[1] - ids.shape[1] for text, ids in zip(wanted(way), prompts(), strict=False)}
        assert min(lengths) < NEW, way.__name__
    assert (wanted(padded_batch)[0][:, -1] == 0).any()
    assert (wanted(padded_batch)[0][:, -1] != 0).any()
    assert wanted(last_position)[0].shape[1] == 33
    assert int(torch.stack(wanted(beyond_16_bits)[:1]).max()) > 2**16


@pytest.mark.parametrize("name", tr.drafter_names())
def test_a_drafter_says_in_one_line_what_it_does(model: LlamaForCausalLM, name: str, tmp_path: Path) -> None:
    drafter, stats = example(name, model, tmp_path), tr.Stats()
    tr.generate(model, tiny.prompt(0, 5), drafter=drafter, stats=stats, max_new_tokens=4)
    assert stats.drafter.startswith(name)
    assert "\n" not in stats.drafter


@pytest.mark.parametrize("name", tr.drafter_names())
def test_the_model_may_be_on_another_device(model: LlamaForCausalLM, name: str, tmp_path: Path) -> None:
    """Than the prompt; drafts are where the model is, on a stand-in for such a device."""
    drafter = example(name, model, tmp_path)
    prompt = tiny.prompt(0, 6).repeat(1, 3)
    wanted = model.generate(prompt, max_new_tokens=12)
    with another_device():
        put_there(model)
        for device in (torch.device("cpu"), THERE):
            ours = tr.generate(model, prompt.to(device), drafter=drafter, max_new_tokens=12)
            assert ours.device == device
            assert torch.equal(ours.cpu(), wanted)


@pytest.mark.parametrize("name", tr.drafter_names())
def test_a_fork_knows_what_was_learned_before_and_nothing_later(
    model: LlamaForCausalLM, name: str, tmp_path: Path
) -> None:
    def drafts(drafter: tr.Drafter) -> list[tuple[tuple[int, ...], list[int]]]:
        steps = tr.stream(model, tiny.prompt(0, 6).repeat(1, 3), drafter, max_new_tokens=24)
        return [(step.draft.tree.parents, step.draft.tokens.tolist()) for step in steps]

    drafter = example(name, model, tmp_path)
    drafts(drafter)
    wanted = drafts(drafter.fork())
    for learning in (drafter.fork(), drafter.fork()):
        for seed in range(4):
            prompt = tiny.prompt(0, 6).repeat(1, 3) if seed == 3 else tiny.prompt(seed, 9)
            tr.generate(model, prompt, drafter=learning, max_new_tokens=24)
    assert drafts(drafter.fork()) == wanted
    assert drafts(drafter) == wanted
