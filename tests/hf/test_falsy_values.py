"""Falsy values with a meaning: token 0 as end, padding and prompt, a seed of 0, empty lists, no new tokens.

The reference is plain `generate` on a copy of the model, for outputs that end and for those that must not.
"""

import pytest
import torch
from support import tiny
from support.cases import paired, thinned
from support.side_by_side import SideBySide

import token_recycling as tr

NEW = 12
ENDS = [0, [0], [0, 5], [5, 0], torch.tensor([0]), None, 63]


def favoring(token, seed):
    """Return a random model that often generates `token`, so that outputs end with it sooner or later."""
    model = tiny.llama(seed=seed)
    weights = model.get_output_embeddings().weight
    with torch.no_grad():
        weights[token] += (
            0.7 * weights.std() * torch.randn(weights.shape[1], generator=torch.Generator().manual_seed(1))
        )
    return model


@pytest.mark.parametrize("end", thinned(ENDS, 2, ids=str))
def test_output_ends_with_token_0_only_if_it_is_an_end_token(end):
    """After prompts without it, and after those that begin and end with it."""
    zeros, said = torch.tensor([[0, 0, 7, 0], [0, 0, 0, 0]]), 0
    for seed in (0, 2):
        both = SideBySide(lambda: favoring(0, seed))  # noqa: B023
        how = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": end, "pad_token_id": 1 if end == 63 else 0}
        prompts = torch.cat([tiny.prompt(seed + row, 9) for row in range(3)])
        for ids in (prompts[:1], prompts, zeros):
            how["attention_mask"] = torch.ones_like(ids)
            outputs = both.assert_same(lambda model: model.generate(ids, **how).tolist())  # noqa: B023
            said += sum(0 in output[ids.shape[1] : -1] for output in outputs)
    assert said, "token 0 was never generated before the last position"


@pytest.mark.parametrize(("end", "of_config"), paired([0, [0], [0, 5], [], [63], None], [False, True]))
def test_stream_ends_with_token_0_only_if_it_is_an_end_token(end, of_config):
    """The model generates token 0 after both prompts."""
    stated = None if end == [] else end
    for seed in (2, 5):
        model, ids = favoring(0, seed), tiny.prompt(seed, 9)
        assert 0 in model.generate(ids, do_sample=False, max_new_tokens=NEW, eos_token_id=None)[0, 9:-1]
        if of_config:
            model.generation_config.eos_token_id = stated
        how = {"max_new_tokens": NEW, "eos_token_id": None if of_config else end}
        tokens = [token for step in tr.stream(model, ids, **how) for token in step.tokens]
        wanted = model.generate(ids, do_sample=False, pad_token_id=1, max_new_tokens=NEW, eos_token_id=stated)
        assert tokens == wanted[0, 9:].tolist()


@pytest.mark.parametrize(
    "arguments",
    [
        {"stop_strings": []},
        {"bad_words_ids": None, "suppress_tokens": []},
        {"min_new_tokens": 0},
        {"max_new_tokens": 0},
        {"max_new_tokens": 1},
        {"max_new_tokens": None, "max_length": 8},
        {"eos_token_id": []},
        {"num_return_sequences": 0},
        {"prompt_lookup_num_tokens": 0},
        {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0},
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "do_sample": True},
        {"temperature": 0.0, "do_sample": False},
        {"begin_suppress_tokens": [0]},
        {"forced_eos_token_id": 0},
        {"forced_bos_token_id": 0},
        {"suppress_tokens": [0]},
        {"sequence_bias": {(0,): 9.0}},
        {"stopping_criteria": [], "logits_processor": []},
    ],
    ids=str,
)
def test_empty_and_zero_arguments_mean_the_same_as_in_generate(arguments):
    how = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **arguments}
    outputs = []
    for model in (favoring(0, 2), tr.accelerate(favoring(0, 2))):
        torch.manual_seed(0)
        try:
            outputs.append(model.generate(tiny.prompt(3, 7), **how).tolist())
        except ValueError as error:
            outputs.append([type(error)])
    assert outputs[0] == outputs[1]
