"""Every supported architecture: trees against linear decoding, outputs against plain `generate`."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import tiny
from support.architecture_page import ALL, TOLERANCE, attentions, claimed, measured, page
from support.architectures import (
    BORDERS,
    EVERY_RUN,
    KEY_POSITIONS,
    SLOTS,
    VOCABULARY,
    WINDOWS,
    chosen,
    forget,
    model_of,
    named,
)
from support.cases import parameter
from support.further_architectures import BLOCKS, FURTHER_BORDERS, FURTHER_WINDOWS
from support.oracle import TREES, Oracle
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import token_recycling as tr
from token_recycling.model.architectures import TESTED, Reach
from token_recycling.model.self_test import largest_difference, random_tokens
from token_recycling.model.target import Target, TreeInputs

HERE = torch.device("cpu")
RUNS = [
    parameter(
        case,
        attention,
        id=f"{case}-{attention}".replace(" ", "-"),
        every_run=str(case) in EVERY_RUN and attention == attentions(case)[0],
    )
    for case in ALL
    for attention in attentions(case)
]


@pytest.mark.parametrize(("case", "attention"), RUNS)
def test_trees_equal_linear_decoding_and_outputs_equal_generate(case, attention):
    result = measured(case, attention)
    assert result.same_trees
    assert result.identical == result.texts
    briefly = case in [*BORDERS, *FURTHER_BORDERS] or not result.support.branches
    assert result.mat > (1 if briefly else 2.5)


def test_tested_families_are_those_with_a_case():
    """Except text decoders inside other models, which are self-tested every time."""
    alone = [case for case in ALL if "text_config" not in case.config]
    assert {CONFIG_MAPPING[case.family].model_type for case in alone} == TESTED


# The equality above proves something only if trees are wrong without the special handling.


@pytest.mark.parametrize("case", chosen([*WINDOWS, *FURTHER_WINDOWS]))
def test_ignoring_windows_gives_wrong_logits(case):
    target = Target(model_of(case))
    target.inputs = TreeInputs(replace(target.info, layers={"full_attention": Reach()}), HERE, target.dtype)
    text = random_tokens(target, 27)
    assert largest_difference(target, text, TREES["a random tree"].parents)[0] > 1e-3


@pytest.mark.parametrize("case", chosen([*KEY_POSITIONS, *BORDERS[:-1], BLOCKS]))
def test_ignoring_key_positions_or_length_limits_fails(case):
    target = Target(model_of(case))
    if case in KEY_POSITIONS:
        target.info = replace(target.info, key_bias=replace(target.info.key_bias, argument="not_there"))
        with pytest.raises(KeyError):
            largest_difference(target, random_tokens(target, 27), TREES["a chain"].parents)
        return
    length = {"llama4_text": 10}.get(case.family, 28)
    tree = TREES["a random tree"]
    assert not target.info.fits(length, len(tree))
    text = random_tokens(target, length + 1)
    assert largest_difference(target, text, tree.parents)[0] > 1e-4


def test_trees_are_wrong_for_a_family_that_counts_slots():
    target = Target(model_of(named("gpt_neo")))
    assert not target.info.branches
    for length, wrong in ((6, False), (40, True)):
        text = random_tokens(target, length)
        assert (largest_difference(target, text, TREES["a random tree"].parents)[0] > 1e-4) == wrong
        assert largest_difference(target, text, TREES["a chain"].parents)[0] < 1e-4


@pytest.mark.parametrize("family", ["llama", "gpt2", "mpt", "gpt_neo", "codegen", "llama4_text"])
def test_outputs_up_to_the_context_limit_equal_generate(family):
    case = named(family)
    limit = {"max_position_embeddings": 48} | ({"max_seq_len": 48} if family == "mpt" else {})
    model = model_of(replace(case, config={**case.config, **limit}))
    ids = tiny.prompt(3, 20, VOCABULARY)
    for new in (28, 60):  # drafts end there too, though more tokens are asked for
        how = {"max_new_tokens": new, "do_sample": False}
        how["stopping_criteria"] = [lambda ids, scores, **_: torch.full((1,), ids.shape[1] == 48)]
        plain = model.generate(ids, **how)
        ours = tr.generate(model, ids, drafter=Oracle(plain.repeat(1, 2)), **how)
        assert torch.equal(ours, plain)


BATCHES = [*WINDOWS, *KEY_POSITIONS, *SLOTS, named("llama"), named("gpt2"), named("deepseek_v3"), *BORDERS, BLOCKS]


@pytest.mark.parametrize("case", chosen(BATCHES))
@pytest.mark.falls_back
def test_batch_equals_single_decoding(case):
    model, new = model_of(case), 16
    prompts = [tiny.prompt(length, length, VOCABULARY) for length in (3, 21, 12)]
    wanted = []
    for ids in prompts:
        forget(model)
        wanted.append(model.generate(ids, max_new_tokens=new, do_sample=False)[0])
    padded = torch.cat([torch.nn.functional.pad(ids, (21 - ids.shape[1], 0)) for ids in prompts])
    tr.accelerate(model, Oracle(wanted))
    found = model.generate(padded, attention_mask=padded != 0, max_new_tokens=new, do_sample=False)
    if model.acceleration.fallback is not None:
        assert case in [*SLOTS, *BORDERS, BLOCKS] or case.family == "mpt"
        assert "one sequence without padding" in model.acceleration.fallback
        return
    for text, row in zip(wanted, found, strict=True):
        assert torch.equal(row[-new:], text[-new:])
    assert model.acceleration.stats.mat > 2


@pytest.mark.parametrize(("heads", "length"), [(1, 5), (2, 8), (1, 20)])
def test_outputs_equal_generate_where_index_scores_tie(heads, length):
    """With few heads often no key scores above 0. Then the number of slots determines which keys are selected, and the
    model itself gives another output with another number, such as without a cache.
    """
    model = indexed(index_topk=8, index_n_heads=heads)
    text = tiny.prompt(length, length, VOCABULARY)
    ours, theirs = DynamicCache(config=model.config), DynamicCache(config=model.config)
    for turn in range(3):
        wanted = model.generate(text, max_new_tokens=15, do_sample=False, past_key_values=theirs)
        found = tr.generate(
            model, text, drafter=Oracle(wanted), max_new_tokens=15, do_sample=False, past_key_values=ours
        )
        assert torch.equal(found, wanted)
        text = torch.cat([wanted, tiny.prompt(turn, 3, VOCABULARY)], dim=1)


def indexed(**config):
    """Return a model with sparse attention."""
    case = named("deepseek_v32")
    return model_of(replace(case, config={**case.config, **config}))


def test_flex_attention_on_cpu_is_refused():
    """Its logits are wrong there in torch, so acceleration with another attention would change the output."""
    model = tiny.llama()
    model.set_attn_implementation("flex_attention")
    with pytest.raises(tr.UnsupportedModelError, match=r"set_attn_implementation\('sdpa'\)"):
        tr.accelerate(model)
    model.set_attn_implementation("sdpa")
    assert tr.why_not(model) is None


def test_attention_without_tree_masks_is_replaced_only_during_accelerated_calls(caplog):
    model, ids, wanted = tiny.llama(), tiny.prompt(0, 6), "flash_attention_2"
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    model.config._attn_implementation = wanted
    with caplog.at_level(logging.WARNING, logger="token_recycling"):
        tr.accelerate(model)
        assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), plain)
        model.generate(ids, max_new_tokens=2, do_sample=False)
    assert sum(wanted in record.getMessage() for record in caplog.records) == 1
    assert model.config._attn_implementation == wanted
    tr.decelerate(model)
    assert model.config._attn_implementation == wanted


def test_unknown_family_is_self_tested_before_acceleration():
    model = tiny.unknown(tiny.llama())
    assert "is not among those tested" in " ".join(tr.check(model).notes)
    assert tr.why_not(model) is None
    ids = tiny.prompt(0, 6)
    assert torch.equal(tr.generate(model, ids, max_new_tokens=9), model.generate(ids, max_new_tokens=9))


def test_unknown_family_that_counts_slots_is_refused():
    model = tiny.unknown(model_of(named("gpt_neo")))
    model.config.window_size = 8
    for block in model.transformer.h:
        if block.attn.attention_type == "local":
            bias = block.attn.attention.bias
            block.attn.attention.bias = bias & ~torch.tril(torch.ones_like(bias), -8)
    with pytest.raises(tr.UnsupportedModelError, match="does not follow the mask or the positions"):
        tr.accelerate(model)


def test_failed_self_test_overrides_the_list_of_tested_families():
    """As with changed model code; here it shifts its positions."""
    model = tiny.llama()
    rotary = type(model.model.rotary_emb).forward
    assert tr.why_not(model) is None
    model.model.rotary_emb.forward = lambda x, position_ids: rotary(
        model.model.rotary_emb, x, position_ids * position_ids.shape[1]
    )
    assert tr.why_not(model) is None, "no self-test ran"
    found = tr.check(model, self_test=True)
    assert not found.supported
    assert found.difference is not None
    assert str(tr.why_not(model)).startswith(f"{found.reason}; it runs the function ")
    for attempt in (tr.accelerate, lambda model: tr.generate(model, tiny.prompt(0, 6))):
        with pytest.raises(tr.UnsupportedModelError, match="does not follow the mask or the positions"):
            attempt(model)
    del model.model.rotary_emb.forward
    found = tr.check(model, self_test=True)
    assert found.supported
    assert 0 <= found.difference < TOLERANCE
    assert tr.why_not(model) is None


@pytest.mark.nightly
def test_architectures_page_is_current():
    written = Path(__file__).parents[2] / "docs" / "architectures.md"
    assert written.read_text(encoding="utf-8") == page(claimed), "stale: run `nox -s tables`"
