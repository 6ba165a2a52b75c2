"""Random calls of random models against `generate`: combinations that parametrized tests do not cover.

Hypothesis selects a model family, a drafter, a way of calling, a cache and arguments of `generate` at fixed seeds: the
same cases in every run. Token ids must equal those of plain `generate`; scores and logits may differ by 1e-4 of their
scale. A case may be rejected with an error message, or fail as `generate` fails. After a tie within the rounding of a
forward pass, the rest of the output is not compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from support.architectures import SUPPORTED, VOCABULARY, forget, model_of
from support.drafters import EXAMPLES, Garbage
from support.drafters import example as example_drafter
from support.recurrent_architectures import RECURRENT
from support.strategies import fuzz, trees
from transformers import PreTrainedModel

import token_recycling as tr

CASES, NIGHTLY = 30, 1000
TIE, TOLERANCE = 1e-5, 1e-4
FAMILIES = {str(case): case for case in [*SUPPORTED, *RECURRENT]}
STATEFUL = {str(case) for case in RECURRENT}
COMMON = ["llama", "qwen2 window of 8", "qwen3", "mistral window of 8", "gemma2 window of 8", "gpt2", "mixtral"]
"""Used in every second case."""
NO_SHARED_CACHE = ("mamba", "falcon_mamba", "longrope", "local window")
"""Families whose `generate` accepts no cache of earlier calls, or replaces it."""
SPECS = [
    *("recycling:tree=4", "recycling:tree=16,k=2", "recycling:tree=chain:3,suffix=false", "recycling:tree=0 1 00"),
    *("recycling:orders=1", "published", "published:tree=chain:4,update=first", "suffix:num_tokens=8,min_match=1"),
    *("prompt_lookup:num_tokens=5", "lookahead:window=2,ngram_size=3", "layer_skip:layers=1", "plain"),
]
"""Drafters that need no file, in addition to the default one and `EXAMPLES`."""
SURFACES = ("accelerate", "generate", "stream")
ENDS = {"eos_token_id": [5, 11, 23, 41, 60, 77], "pad_token_id": 0}
ARGUMENTS: list[dict[str, Any]] = [
    ENDS,
    {"eos_token_id": 9, "pad_token_id": 9, "min_new_tokens": 6},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2, "bad_words_ids": [[5], [7, 8], [11, 3, 2]]},
    {"sequence_bias": {(4,): 2.0, (9, 7): -3.0}, "suppress_tokens": [3, 4, 5]},
    {"forced_eos_token_id": 9, "exponential_decay_length_penalty": (3, 1.5), **ENDS},
    {"prefix_allowed_tokens_fn": lambda row, ids: list(range(len(ids) % 3, VOCABULARY, 2))},
    {"guidance_scale": 1.5},
    {"renormalize_logits": True, "remove_invalid_values": True},
    {"use_cache": False},
    {"num_beams": 2},
    {"stopping_criteria": [lambda ids, scores, **_: ids[:, -1] % 9 == 2]},
    {"stopping_criteria": [lambda ids, scores, **_: torch.full((len(ids),), bool((ids[:, -1] % 7 == 3).any()))]},
    {"logits_processor": [lambda ids, scores: scores.roll(int(ids.shape[1]) % 3, -1)]},
]
OUTPUTS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
"""For about half of the calls."""
FOR_STEPS = [one for one in ARGUMENTS if one is ENDS or set(one) <= {"stopping_criteria", "logits_processor"}]
"""Arguments that `stream` accepts, too."""
SAMPLING = [
    {"do_sample": True, "top_k": 0},
    {"do_sample": True, "top_k": 0, "temperature": 0.7},
    {"do_sample": True, "top_k": 0, "top_p": 0.9},
    {"do_sample": True, "top_k": 12, "min_p": 0.02},
    {"do_sample": True, "top_k": 0, "typical_p": 0.9, "epsilon_cutoff": 0.002},
]
ONE_CHOICE = {"do_sample": True, "top_k": 1}
"""For calls that sample in another order than `generate`: with one choice the result is the same."""


@dataclass(frozen=True)
class Call:
    """One call of `generate`."""

    prompts: list[list[int]]
    new: int
    arguments: dict[str, Any]
    spare: int = 0
    """Columns of padding before the longest prompt."""
    resumes: bool = False
    """Whether it continues the output of the previous call, in the same cache if there is one."""
    interrupted: bool = False
    """Whether a criterion raises an error."""


@dataclass(frozen=True)
class Case:
    """A model, the options of its acceleration, and calls."""

    family: str
    drafter: str | tuple[int, tuple[tr.Template, ...]]
    """A spec, a name of `EXAMPLES`, or the seed and the shapes of random drafts."""
    calls: list[Call] = field(default_factory=list)
    surface: str = "generate"
    fast: bool = False
    cache: str = ""
    repeats: bool = False
    attention: str | None = None


@st.composite
def calls(draw: st.DrawFn, surface: str, seeded: bool, shared: bool, resumes: bool, rows: int) -> Call:
    length = st.integers(1, 4) if resumes else st.sampled_from([1, 2, 6, 12, 30])
    lengths = [draw(length)] * rows if resumes else [draw(length) for _ in range(rows)]
    prompts = []
    for size in lengths:
        ids = draw(st.lists(st.integers(1, VOCABULARY - 1), min_size=size, max_size=size))
        prompts.append((ids[: 1 + size // 3] * 3)[:size] if draw(st.booleans()) else ids)
    steps = surface == "stream"
    sampling: list[dict[str, Any]] = [{}] if steps else [{}, ONE_CHOICE]
    if seeded and rows == 1:
        sampling = [{}, {}, *(SAMPLING[:1] if steps else SAMPLING)]
    more = draw(st.lists(st.sampled_from(FOR_STEPS if steps else ARGUMENTS), max_size=2))
    arguments = {"do_sample": False, **draw(st.sampled_from(sampling))}
    for one in (*more, {} if steps or draw(st.booleans()) else OUTPUTS):
        arguments |= one
    if shared or arguments["do_sample"]:
        arguments.pop("num_beams", None)
    return Call(
        prompts,
        draw(st.sampled_from([1, 2, 3, 8, 16, 24, 40])),
        arguments,
        spare=0 if steps else draw(st.sampled_from([0, 0, 0, 1, 5])),
        resumes=resumes,
        interrupted=not shared and not steps and draw(st.integers(0, 15)) == 0,
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    family = draw(st.sampled_from(COMMON) if draw(st.booleans()) else st.sampled_from(sorted(FAMILIES)))
    stateful = family in STATEFUL
    drafter = draw(
        st.one_of(
            st.just("recycling"),
            st.sampled_from(SPECS),
            st.sampled_from(["recycling"] if stateful else sorted(set(EXAMPLES) - {"mtp"})),
            st.tuples(st.integers(0, 9), st.lists(trees(8), min_size=1, max_size=3).map(tuple)),
        )
    )
    surface = draw(st.sampled_from(SURFACES))
    caches = ["", "", "", "passed in"]
    if not stateful and surface != "stream":
        caches += ["static", "static, passed in", "offloaded"]
    cache = draw(st.sampled_from(caches))
    if any(word in family for word in NO_SHARED_CACHE):
        cache = ""
    fast = not stateful and draw(st.booleans())
    shared = "passed in" in cache
    seeded = not fast and drafter not in EXAMPLES
    rows = 1 if surface == "stream" or shared else draw(st.sampled_from([1, 1, 2, 3]))
    first = draw(calls(surface, seeded, shared, False, rows))
    found = [first]
    if draw(st.booleans()) and not first.interrupted:
        resumes = shared or draw(st.booleans())
        found.append(draw(calls(surface, seeded, shared, resumes, rows)))
    attention = "eager" if FAMILIES[family].sdpa and draw(st.integers(0, 4)) == 0 else None
    return Case(family, drafter, found, surface, fast, cache, draw(st.booleans()), attention)


@cache
def prototype(family: str, repeats: bool, attention: str | None) -> PreTrainedModel:
    """Return a random model. With `repeats` layers add little to the newest token's embedding, so outputs repeat."""
    model = model_of(FAMILIES[family], attention)
    if repeats:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim > 1 and not any(word in name for word in ("embed", "head", "wte")):
                    weight.mul_(0.4)
    return model


def drafter_of(case: Case, model: PreTrainedModel, folder: Path) -> tr.Drafter:
    if isinstance(case.drafter, tuple):
        seed, shapes = case.drafter
        return Garbage([*shapes], seed, VOCABULARY)
    if case.drafter in EXAMPLES:
        return example_drafter(case.drafter, copy.deepcopy(model), folder)
    return tr.make_drafter(case.drafter)


def surface_of(case: Case, model: PreTrainedModel, folder: Path) -> Callable[..., Any]:
    """Return the function under test, which is called like the `generate` of an accelerated model."""
    drafter = drafter_of(case, model, folder)
    if case.surface == "accelerate":
        return tr.accelerate(model, drafter, fast=case.fast).generate
    if case.surface == "generate":
        return lambda ids, **arguments: tr.generate(model, ids, drafter=drafter, fast=case.fast, **arguments)

    def streamed(
        ids: torch.Tensor, attention_mask: Any = None, pad_token_id: Any = None, top_k: int = 0, **arguments: Any
    ) -> Any:
        assert not arguments["do_sample"] or not top_k
        steps = tr.stream(model, ids, drafter, fast=case.fast, **arguments)
        return torch.cat([ids, torch.tensor([[token for step in steps for token in step.tokens]])], dim=1)

    return streamed


class InterruptionError(Exception):
    """Raised by a criterion."""


def interrupting(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
    if ids.shape[1] % 3 == 0:
        raise InterruptionError
    return ids[:, -1] < 0


def slots(case: Case, cache: Any, mask: torch.Tensor) -> list[torch.Tensor]:
    """Return the length of a cache, and the keys and values of every sequence without padding."""
    if cache is None or case.family in STATEFUL:
        return []
    length = int(cache.get_seq_length())
    found = [torch.tensor(float(length))]
    for layer in cache.layers:
        dropped = max(0, length - layer.keys.shape[2])
        for row, padding in enumerate((mask == 0).sum(dim=1).tolist()):
            for name in ("keys", "values", "indexer_keys"):
                if getattr(layer, name, None) is not None:
                    # Copied because the next call overwrites the slots of a window.
                    found.append(getattr(layer, name)[row, ..., max(0, padding - dropped) : length, :].clone())
    return found


def results(case: Case, model: PreTrainedModel, generate: Callable[..., Any]) -> list[list[torch.Tensor]]:
    """Return the results of each call: token ids, requested scores and logits, and contents of the cache."""
    held: Any = None
    if case.cache == "passed in":
        held = transformers.DynamicCache(config=model.config)
    elif case.cache == "static, passed in":
        held = transformers.StaticCache(config=model.config, max_cache_len=256)
    found: list[list[torch.Tensor]] = []
    before = torch.empty(0, 0)
    for number, call in enumerate(case.calls):
        width = max(map(len, call.prompts)) + call.spare
        ids = torch.tensor([[0] * (width - len(row)) + row for row in call.prompts])
        mask = (ids != 0).long()
        if call.resumes:
            mask = torch.cat([before, torch.ones_like(found[-1][0][:, before.shape[1] :])], 1)
            ids, mask = torch.cat([found[-1][0], ids], 1), torch.cat([mask, (ids >= 0).long()], 1)
        before = mask
        arguments = {"max_new_tokens": call.new, **call.arguments}
        if held is not None:
            arguments["past_key_values"] = held
        elif case.cache:
            arguments["cache_implementation"] = case.cache
        if call.interrupted:
            arguments["stopping_criteria"] = [*arguments.get("stopping_criteria", []), interrupting]
        for name, kind in (
            ("stopping_criteria", transformers.StoppingCriteriaList),
            ("logits_processor", transformers.LogitsProcessorList),
        ):
            if name in arguments:
                arguments[name] = kind(arguments[name])
        forget(model)
        torch.manual_seed(number)
        try:
            output = generate(ids, attention_mask=mask, **arguments)
        except InterruptionError:
            output = torch.empty(len(ids), 0, dtype=torch.long)
        if isinstance(output, torch.Tensor):
            found.append([output, *slots(case, None if call.interrupted else held, mask)])
        else:
            kept = slots(case, getattr(output, "past_key_values", None), mask)
            found.append([output.sequences, *(output.scores or ()), *(output.logits or ()), *kept])
    return found


def ties(model: PreTrainedModel, case: Case, wanted: torch.Tensor, found: torch.Tensor) -> bool:
    """Return whether greedy outputs diverge where the two best logits are equal within rounding error."""
    if wanted.shape[0] != 1 or any(one.resumes or one.arguments["do_sample"] for one in case.calls):
        return False
    shared = min(wanted.shape[1], found.shape[1])
    places = (wanted[0, :shared] != found[0, :shared]).nonzero()
    if not len(places):
        return False
    forget(model)
    with torch.no_grad():
        logits = model(input_ids=wanted[:, : int(places[0])], use_cache=False).logits[0, -1].float()
    best, second = logits.topk(2).values.tolist()
    return best - second < TIE * max(1.0, float(logits.abs().max()))


@pytest.fixture(scope="module")
def outcomes():
    """Count compared and rejected cases: a test that rejects everything shows nothing."""
    counts = {"same": 0, "refused": 0, "both failed": 0, "tie": 0}
    yield counts
    assert counts["same"] >= sum(counts.values()) / 2, counts
    assert counts["tie"] <= sum(counts.values()) / 50, counts


@fuzz(CASES)
@given(case=cases())
@pytest.mark.falls_back
def test_random_calls_give_the_output_of_generate(case, outcomes, tmp_path_factory):
    compare(case, outcomes, tmp_path_factory)


@pytest.mark.nightly
@fuzz(NIGHTLY)
@given(case=cases())
@pytest.mark.falls_back
def test_more_random_calls_give_the_output_of_generate(case, outcomes, tmp_path_factory):
    compare(case, outcomes, tmp_path_factory)


def compare(case, outcomes, tmp_path_factory):
    model = copy.deepcopy(prototype(case.family, case.repeats, case.attention))
    try:
        wanted, failure = results(case, model, model.generate), None
    except Exception as error:
        wanted, failure = [], error
    ours = copy.deepcopy(prototype(case.family, case.repeats, case.attention))
    try:
        found = results(case, ours, surface_of(case, ours, tmp_path_factory.mktemp("drafter")))
    except (tr.UnsupportedModelError, tr.NoFastPathError):
        outcomes["refused"] += 1
        return
    except Exception as error:
        if failure is not None or isinstance(error, ValueError):
            outcomes["both failed" if failure else "refused"] += 1
            return
        raise
    if failure is not None:  # plain `generate` alone fails: nothing to compare with
        outcomes["both failed"] += 1
        return
    for theirs, own in zip(wanted, found, strict=True):
        if not torch.equal(theirs[0], own[0]):
            assert ties(model, case, theirs[0], own[0]), (theirs[0].tolist(), own[0].tolist())
            outcomes["tie"] += 1
            return
        assert len(theirs) == len(own)
        for one, other in zip(theirs[1:], own[1:], strict=True):
            if one.ndim == 3:  # of a cache: a layer with a window may keep more slots than later tokens see
                size = min(one.shape[1], other.shape[1])
                one, other = one[:, one.shape[1] - size :], other[:, other.shape[1] - size :]
            scale = max(1.0, float(one[one.isfinite()].abs().max()) if one.isfinite().any() else 1.0)
            torch.testing.assert_close(other, one, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True)
    outcomes["same"] += 1
