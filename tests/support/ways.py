"""Ways of calling: small programs that call a `generate` function, and their results with transformers' own.

Each repeats its first prompt at the end, which tests drafters that have learned.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from support import tiny
from support.batches import batch
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import logits_process

NEW = 14
ENDS = {"eos_token_id": [5, 11, 23, 41], "pad_token_id": 0}
Generate = Callable[..., Any]


def prompts(size: int = 64) -> list[torch.Tensor]:
    """Return prompts with repetitions, which drafters can exploit; the last prompt equals the first."""
    return [tiny.prompt(seed, 4 + seed, size).repeat(1, 2) for seed in (0, 3, 0)]


def greedy(model: PreTrainedModel, generate: Generate) -> list[torch.Tensor]:
    return [generate(ids, max_new_tokens=NEW) for ids in prompts(model.config.vocab_size)]


def one_token(model: PreTrainedModel, generate: Generate) -> list[torch.Tensor]:
    return [generate(ids, max_new_tokens=new) for ids in (tiny.prompt(0, 1), *prompts()) for new in (1, 2)]


def end_of_sequence(model: PreTrainedModel, generate: Generate) -> list[torch.Tensor]:
    return [generate(ids, max_new_tokens=NEW, **ENDS) for ids in prompts()]


def sampled(model: PreTrainedModel, generate: Generate) -> list[torch.Tensor]:
    """Sample with a seed; the final random states are compared too."""
    sampling = {"do_sample": True, "temperature": 0.7, "top_k": 20, "max_new_tokens": NEW}
    return [one for seed, ids in enumerate(prompts()) for one in tiny.seeded(generate, ids, seed=seed, **sampling)]


def several_samples(model: PreTrainedModel, generate: Generate) -> list[torch.Tensor]:
    """Return several samples per prompt. With `top_k=1`, since sequences draw random numbers in another order than in
    `generate`.
    """
    sampling = {"do_sample": True, "top_k": 1, "num_return_sequences": 3, "max_new_tokens": NEW}
    return [generate(ids, **sampling, **ENDS) for ids in prompts()[1:]]


def padded_batch(model: PreTrainedModel, generate: Generate) -> list[torch.Tensor]:
    """Decode prompts of different lengths, some of which end early."""
    inputs = [batch([4, 9, 5], 1, spare=1), batch([3, 1], 2), batch([4, 9, 5], 1)]
    return [generate(**one, max_new_tokens=NEW, **ENDS) for one in inputs]


def processors(model: PreTrainedModel, generate: Generate) -> list[torch.Tensor]:
    processing = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 8}
    return [generate(ids, max_new_tokens=NEW, **processing, **ENDS) for ids in prompts()]


def stop_strings(model: PreTrainedModel, generate: Generate) -> list[torch.Tensor]:
    stopping = {"stop_strings": ["a", "re"], "tokenizer": tiny.tokenizer(), "max_new_tokens": 40}
    return [generate(ids, **stopping) for ids in prompts(300)]


def criteria(model: PreTrainedModel, generate: Generate) -> list[torch.Tensor]:
    """Stop by a custom criterion, and also return the ids it received."""
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
    """Decode three turns on one cache, twice."""
    found = []
    for _ in range(2):
        shared, text = DynamicCache(config=model.config), tiny.prompt(0, 8)
        for turn in range(3):
            text = generate(text, past_key_values=shared, max_new_tokens=8)
            found += [text, shared.layers[-1].values]
            text = torch.cat([text, tiny.prompt(turn, 1 + turn)], dim=1)
    return found


def streamer(model: PreTrainedModel, generate: Generate) -> list[torch.Tensor]:
    """Record the calls of a streamer, including the end."""
    given: list[int] = []

    class Collecting:
        def put(self, value: torch.Tensor) -> None:
            given.extend(value.flatten().tolist())

        def end(self) -> None:
            given.append(-1)

    return [*(generate(ids, streamer=Collecting(), max_new_tokens=NEW) for ids in prompts()), torch.tensor(given)]


def last_position(model: PreTrainedModel, generate: Generate) -> list[torch.Tensor]:
    """Decode up to the last of 32 learned positions."""
    return [generate(tiny.prompt(seed, 14, 80), max_new_tokens=19) for seed in (0, 3, 0)]


def beyond_16_bits(model: PreTrainedModel, generate: Generate) -> list[torch.Tensor]:
    """Decode ids of more than 16 bits."""
    return [generate(65_600 - ids, max_new_tokens=NEW) for ids in prompts()]


def logits_processor(model: PreTrainedModel, generate: Generate) -> list[torch.Tensor]:
    """Pass a processor as an object, for APIs without `generate`'s arguments."""
    processing = LogitsProcessorList([logits_process.RepetitionPenaltyLogitsProcessor(1.3)])
    return [generate(ids, max_new_tokens=NEW, logits_processor=processing) for ids in prompts()]


@cache
def model_for(way: Generate) -> PreTrainedModel:
    """Return the model for a way of calling."""
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
    """Return the results with transformers' own `generate`."""
    model = model_for(way)
    return way(model, model.generate)


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
