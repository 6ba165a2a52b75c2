"""What is noted of a call: by itself, whatever else is called meanwhile, and for every way past our loop."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
from support import tiny
from support.releases import HERE, needs, skip_before
from transformers import StoppingCriteriaList
from transformers.generation.continuous_batching import ContinuousMixin
from transformers.generation.utils import GENERATION_MODES_MAPPING

import token_recycling as tr

pytestmark = pytest.mark.core

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
IDS = tiny.prompt(0, 6)


def meanwhile(other, thread):
    """A criterion that ends nothing, and lets something else happen once, from beginning to end."""
    happened = []

    def criterion(input_ids, scores, **more):
        if not happened:
            happened.append(threading.Thread(target=other))
            if thread:
                happened[0].start()
                happened[0].join()
            else:
                other()
        return torch.zeros(len(input_ids), dtype=torch.bool)

    return StoppingCriteriaList([criterion])


OTHERS: dict[str, dict[str, Any]] = {
    "accelerated": {"max_new_tokens": 5, "do_sample": False},
    "left to transformers": {"num_beams": 2, **GREEDY},
    "early exit": {"assistant_early_exit": 1, **GREEDY},
}


@pytest.mark.parametrize("thread", [True, False])
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_a_call_is_noted_by_itself(model, other, thread):
    """Whatever is called in between, by another thread or in this one."""
    if "assistant_early_exit" in other and HERE[:2] == (5, 0):
        pytest.skip("needs a transformers whose early exit works: not 5.0")
    wanted = model.generate(IDS, **GREEDY)
    tr.accelerate(model, "plain")
    noted = []

    def between():
        model.generate(IDS, **other)
        noted.append((model.acceleration.stats.tokens, model.acceleration.fallback))

    ours = model.generate(IDS, stopping_criteria=meanwhile(between, thread), return_dict_in_generate=True, **GREEDY)
    accelerated = other is OTHERS["accelerated"]
    assert torch.equal(ours.sequences, wanted)
    assert ours.stats.tokens == 12
    assert model.acceleration.stats is ours.stats
    assert model.acceleration.fallback is None
    assert model.acceleration.total.tokens == 12 + 5 * accelerated
    assert noted[0][0] == 5 * accelerated
    assert (noted[0][1] is None) == accelerated


def test_a_call_left_to_transformers_is_noted_by_itself(model):
    """It was left to transformers, though one that was accelerated began later and ended before."""
    tr.accelerate(model, "plain")
    criteria = meanwhile(lambda: model.generate(IDS, **GREEDY), thread=True)
    model.generate(IDS, num_beams=2, stopping_criteria=criteria, **GREEDY)
    assert "beam search" in str(model.acceleration.fallback)
    assert model.acceleration.stats.steps == 0
    assert model.acceleration.total.tokens == 12


def test_nothing_is_said_of_a_call_that_failed_before_it_began(model):
    tr.accelerate(model, "plain").generate(IDS, num_beams=2, **GREEDY)
    with pytest.raises(ValueError, match="nonsense"):
        model.generate(IDS, nonsense=3, **GREEDY)
    assert model.acceleration.fallback is None


# Ways past our loop


def small():
    """Arguments for continuous batching with little memory."""
    skip_before(5, 4)
    from transformers import ContinuousBatchingConfig

    return {
        "warmup": False,
        "continuous_batching_config": ContinuousBatchingConfig(max_batch_tokens=16, num_blocks=8),
    }


def generate_batch(model):
    said = model.generate_batch([[3, 4], [5]], max_new_tokens=3, **small())
    return [one.generated_tokens for one in said.values()]


def paged(model):
    return model.generate(IDS, max_new_tokens=3, do_sample=False, cache_implementation="paged", **small()).tolist()


def manager(model):
    model.init_continuous_batching()


def custom(model):
    return model.generate(IDS, custom_generate=_last_token_twice)


def _last_token_twice(model, input_ids, **given):
    return torch.cat([input_ids, input_ids[:, -1:]], dim=1).tolist()


def beams(model):
    return model.generate(IDS, num_beams=2, **GREEDY).tolist()


def prompt_lookup(model):
    return model.generate(IDS, prompt_lookup_num_tokens=3, eos_token_id=[63], **GREEDY).tolist()


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        pytest.param(generate_batch, "continuous batching", marks=pytest.mark.nightly),
        pytest.param(paged, "continuous batching", marks=pytest.mark.nightly),
        (manager, "continuous batching"),
        (custom, "custom_generate"),
        (beams, "beam search"),
        (prompt_lookup, "assisted generation"),
    ],
)
def test_a_way_past_our_loop_is_noted_and_said_once(model, caplog, way, reason):
    wanted = way(model)
    tr.accelerate(model, "plain").generate(IDS, max_new_tokens=2)
    with caplog.at_level(logging.WARNING, "token_recycling"):
        for _ in range(2):
            assert way(model) == wanted
            assert reason in str(model.acceleration.fallback)
            assert model.acceleration.stats.steps == 0
    assert sum(reason in record.getMessage() for record in caplog.records) == 1


@needs(5, 23)
def test_transformers_hands_calls_to_no_other_method():
    """A new way of transformers must be noted: the methods of its modes, and those that make a manager."""
    methods = {name for name in GENERATION_MODES_MAPPING.values() if "/" not in name}
    assert methods == {"_sample", "_beam_search", "_assisted_decoding"}
    assert {name for name in vars(ContinuousMixin) if not name.startswith("_")} == {
        "init_continuous_batching",  # which the next two call
        "continuous_batching_context_manager",
        "generate_batch",
        "destroy_cached_continuous_batching_manager",
    }
