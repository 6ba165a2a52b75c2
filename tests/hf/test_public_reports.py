"""Calls from public reports about speculative decoding and `generate`, and similar ones.

Each case names the repository and number of a report. Its outcome, including errors, equals that of plain `generate`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from support import tiny
from support.architectures import model_of, named
from support.batches import batch
from support.cases import paired, thinned
from support.drafters import Garbage
from support.recurrent_architectures import RECURRENT
from support.releases import needs
from support.side_by_side import SideBySide, assert_same
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_layers import GradientCheckpointingLayer

import token_recycling as tr
from token_recycling.trees.templates import chain, static

pytestmark = pytest.mark.falls_back

IDS, OTHERS = tiny.prompt(0, 5).repeat(1, 3), tiny.prompt(3, 4)
GREEDY: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0}
SAMPLED: dict[str, Any] = {"max_new_tokens": 14, "do_sample": True, "pad_token_id": 0}
ONE_CHOICE: dict[str, Any] = {**SAMPLED, "top_k": 1}
ENDS = [5, 11, 23, 41]
Report = Callable[[PreTrainedModel], Any]


def call(ids: torch.Tensor = IDS, **arguments: Any) -> Report:
    """Make two equal calls with a seed: the second one drafts from the output of the first."""

    def twice(model: PreTrainedModel) -> Any:
        outputs = []
        for _ in range(2):
            torch.manual_seed(1)
            outputs.append(model.generate(ids, **{**GREEDY, **arguments}))
        return outputs

    return twice


def cached(model: PreTrainedModel) -> DynamicCache:
    """Return a cache that holds `IDS`."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS, past_key_values=cache, use_cache=True)
    return cache


def by_cache(ids: torch.Tensor, **arguments: Any) -> Report:
    return lambda model: model.generate(ids, past_key_values=cached(model), **{**GREEDY, **arguments})


def within(context: Callable[[], Any], **arguments: Any) -> Report:
    def run(model: PreTrainedModel) -> Any:
        with context():
            return call(**arguments)(model)

    return run


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def training_after(model: PreTrainedModel) -> Any:
    with torch.inference_mode():
        ids = model.generate(IDS, **GREEDY)
    model(IDS, labels=IDS).loss.backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight.sub_(0.05 * weight.grad)
    return [ids, model.generate(IDS, **GREEDY)]


def caller_settings(model: PreTrainedModel) -> Any:
    given = GenerationConfig(**GREEDY, eos_token_id=ENDS, repetition_penalty=1.2)
    before = copy.deepcopy(given)
    return [model.generate(IDS, given), model.generate(IDS, given, max_new_tokens=3), given == before]


def streamed_pieces(model: PreTrainedModel) -> Any:
    """Return one piece of text per token, which some callers count."""
    streamer = TextIteratorStreamer(tiny.tokenizer(), timeout=5)
    model.generate(IDS, streamer=streamer, **GREEDY)
    return [*streamer]


def turns(model: PreTrainedModel, cache: Any) -> Any:
    outputs, ids = [], IDS
    for _ in range(3):
        outputs.append(model.generate(ids, past_key_values=cache, **GREEDY))
        ids = torch.cat([outputs[-1], OTHERS], 1)
    return outputs


def reused_prompt(model: PreTrainedModel) -> Any:
    prompt = cached(model)
    return [
        model.generate(torch.cat([IDS, more], 1), past_key_values=copy.deepcopy(prompt), **GREEDY)
        for more in (OTHERS, IDS, OTHERS)
    ]


def criterion_calls(ids: torch.Tensor) -> Report:
    """Count the calls of a criterion next to one that ends the call."""

    def run(model: PreTrainedModel) -> Any:
        asked = [0]

        def never(ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
            asked[0] += 1
            return torch.zeros(len(ids), dtype=torch.bool)

        return [model.generate(ids, stopping_criteria=StoppingCriteriaList([ends_at, never]), **GREEDY), asked]

    return run


def model_settings(model: PreTrainedModel) -> Any:
    model.generation_config.update(max_new_tokens=5, do_sample=True, temperature=0.1, pad_token_id=0)
    asked = [{"do_sample": False}, {"generation_config": GenerationConfig(do_sample=False, max_new_tokens=7)}, {}]
    outputs = []
    for settings in asked:
        torch.manual_seed(2)
        outputs.append(model.generate(IDS, **settings))
    return outputs


def allowed(row: int, ids: torch.Tensor) -> list[int]:
    return list(range(row, 64, 3))


def ends_at(*arguments: Any, **more: Any) -> torch.Tensor:
    return arguments[0][:, -1] % 7 == 3


def allowed_before_padding(row: int, ids: torch.Tensor) -> list[int]:
    if ids[-1] == 0:
        raise ValueError("padding is in no grammar")
    return list(range(1 + row, 64, 3))


BOTH = torch.cat([IDS, IDS.roll(2, 1)])
RIGHT = torch.tensor([[1] * 11 + [0] * 4])

REPORTS: dict[str, Report] = {
    "huggingface/transformers#30042 a prompt of one token": call(IDS[:, :1]),
    "huggingface/transformers#47912 an end within a step": call(eos_token_id=ENDS),
    "huggingface/transformers#48981 an end and a limit": call(eos_token_id=ENDS, max_new_tokens=7),
    "state-spaces/mamba#1040 a tokenizer's tensor of end tokens": call(eos_token_id=torch.tensor([ENDS])),
    "huggingface/transformers#29459 nested lists of ends, in a batch": call(BOTH, eos_token_id=[ENDS[:2], ENDS[2:]]),
    "huggingface/transformers#29459 an end by a criterion, without padding": call(
        pad_token_id=None, stopping_criteria=StoppingCriteriaList([EosTokenCriteria(ENDS)])
    ),
    "huggingface/transformers#24099 a forced end that is suppressed": call(forced_eos_token_id=9, suppress_tokens=[9]),
    "vllm-project/vllm#6718 a repetition penalty": call(repetition_penalty=1.4),
    "dottxt-ai/outlines#789 tokens allowed by prompt": call(BOTH, prefix_allowed_tokens_fn=allowed),
    "dottxt-ai/outlines#789 tokens allowed by prompt, several samples": call(
        BOTH, **ONE_CHOICE, num_return_sequences=2, prefix_allowed_tokens_fn=allowed
    ),
    "noamgat/lm-format-enforcer#86 tokens allowed by prompt, none after padding": call(
        BOTH, eos_token_id=ENDS, prefix_allowed_tokens_fn=allowed_before_padding
    ),
    "huggingface/transformers#31965 several samples": call(**ONE_CHOICE, num_return_sequences=3, eos_token_id=ENDS),
    "unslothai/unsloth#4078 a padded batch": lambda model: model.generate(**batch([4, 9, 5], 1), **GREEDY),
    "QwenLM/Qwen3#814 padding on the right": call(attention_mask=RIGHT),
    "QwenLM/Qwen3#814 padding inferred from the tokens": call(IDS * RIGHT.flip(1)),
    "huggingface/transformers#9150 scores": call(
        return_dict_in_generate=True, output_scores=True, output_logits=True, no_repeat_ngram_size=2
    ),
    "huggingface/transformers#48700 settings of the caller, which stay unchanged": caller_settings,
    "huggingface/transformers#22576 an iterated streamer": streamed_pieces,
    "alipay/PainlessInferenceAcceleration#28 a criterion": call(stopping_criteria=StoppingCriteriaList([ends_at])),
    "huggingface/transformers#24841 a prompt's cache, used again": reused_prompt,
    "huggingface/transformers#24841 turns on one cache": lambda model: turns(model, DynamicCache()),
    "huggingface/transformers#32946 turns on one static cache": lambda model: turns(
        model, StaticCache(config=model.config, max_cache_len=120)
    ),
    "huggingface/transformers#40906 a cache of the whole prompt": by_cache(IDS),
    "huggingface/transformers#20621 several samples, a cache of one": by_cache(
        torch.cat([IDS, OTHERS], 1), **ONE_CHOICE, num_return_sequences=2
    ),
    "pytorch/pytorch#119162 a default dtype of 16 bits": within(lambda: default_dtype(torch.bfloat16), **SAMPLED),
    "pytorch/pytorch#175953 a default device": within(lambda: torch.device("meta"), **SAMPLED),
    "unslothai/unsloth#2434 training after inference mode": training_after,
    "hao-ai-lab/LookaheadDecoding#62 a longer output": call(max_new_tokens=60),
    "unslothai/unsloth#11039 a criterion that returns one answer for all rows": call(
        BOTH, stopping_criteria=StoppingCriteriaList([lambda ids, scores, **more: bool(ends_at(ids)[-1])])
    ),
    "huggingface/transformers#31526 a criterion that returns no tensor": call(
        stopping_criteria=StoppingCriteriaList([lambda ids, scores, **more: bool(ends_at(ids))])
    ),
    "huggingface/transformers#45384 criteria next to one that is met": criterion_calls(IDS),
    "huggingface/transformers#45384 criteria next to one that is met, in a batch": criterion_calls(BOTH),
    "huggingface/transformers#47752 settings of the model": model_settings,
}
"""The calls by report."""

ON_EVERY_FAMILY = (
    *("#30042", "#47912", "mamba#1040 a tokenizer", "#6718", "#4078", "#31965", "#9150", "#24841", "#20621", "#28"),
    *("#2434", "#40906"),
)
"""Substrings of the reports that are tested with further families, too."""
LEFT_TO_GENERATE = ("padding on the right", "without padding", "#40906", "#20621")
FAMILIES = {
    "window": named("gemma3_text"),
    "learned positions": named("gpt2"),
    "experts": named("mixtral"),
    "hybrid": next(case for case in RECURRENT if case.family == "bamba"),
    "recurrent": next(case for case in RECURRENT if case.family == "mamba"),
}


@cache
def prototype(family: str) -> PreTrainedModel:
    """Return a random model whose outputs repeat themselves, so that drafts are accepted."""
    if family == "llama":
        return tiny.llama()
    model = model_of(FAMILIES[family])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and not any(part in name for part in ("embed", "head", "wte")):
                weight.mul_(0.4)
    return model


def outcome(report: Report, model: PreTrainedModel) -> Any:
    """Return the result of a report, with outputs as lists without caches, or the error that it raises."""
    try:
        return comparable(report(model))
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        return [type(error).__name__, str(error)]


def comparable(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [comparable(one) for one in value]
    if hasattr(value, "sequences"):
        return [comparable(value[name]) for name in ("sequences", "scores", "logits") if name in value]
    return value


@pytest.mark.parametrize(
    ("report", "drafter"),
    thinned(product(REPORTS, ["recycling", "prompt_lookup", "lookahead"]), kept=lambda case: case[1] == "recycling"),
)
def test_reported_call_matches_generate(report, drafter):
    compare(report, drafter, "llama")


@pytest.mark.parametrize(
    ("report", "family"),
    thinned(
        product((report for report in REPORTS if any(part in report for part in ON_EVERY_FAMILY)), FAMILIES),
        every=6,
    ),
)
def test_reported_call_matches_generate_in_every_family(report, family):
    compare(report, "recycling", family)


def compare(report: str, drafter: str, family: str) -> None:
    # For models with recurrent layers only, `generate` makes its own cache.
    left = family != "recurrent" and any(part in report for part in LEFT_TO_GENERATE)
    both = SideBySide(lambda: copy.deepcopy(prototype(family)), drafter)
    both.assert_same(partial(outcome, REPORTS[report]), "" if left else None)


def reassigned(cache: DynamicCache) -> DynamicCache:
    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            layer.keys, layer.values = layer.keys * 0.9, layer.values * 1.1
    return cache


CHANGES: dict[str, tuple[Callable[[DynamicCache], Any], int]] = {
    "nothing": (lambda cache: cache, 1),
    "NVIDIA/kvpress#102 other keys and values": (reassigned, 1),
    "huggingface/transformers#41569 a cache made of the cache": (DynamicCache, 1),
    "Comfy-Org/ComfyUI#14389 more sequences": (lambda cache: cache, 2),
}
"""Changes that callers make to a cache between calls, and the number of sequences of the next call."""


@pytest.mark.parametrize(("change", "family"), thinned(product(CHANGES, ["llama", "window", "experts"]), every=2))
def test_cache_changed_between_calls_matches_generate(family, change):
    """The next call is plain or accelerated `generate`, or a manual forward pass. An error is one of the same kind."""
    changed, batch = CHANGES[change]

    def outcomes(first: PreTrainedModel, model: PreTrainedModel) -> Any:
        cache = DynamicCache(config=model.config)
        said = first.generate(IDS, past_key_values=cache, **GREEDY)
        ids = torch.cat([said, OTHERS], 1).repeat(batch, 1)
        caches = [changed(copy.deepcopy(cache)) for _ in range(2)]
        following = [
            outcome(partial(next_call, ids, caches[0]), model),
            outcome(partial(by_hand, ids, caches[1]), model),
        ]
        return [said, [one[0] if isinstance(one, list) else one for one in following]]

    plain, accelerated = copy.deepcopy(prototype(family)), tr.accelerate(copy.deepcopy(prototype(family)))
    wanted = outcomes(plain, plain)
    assert_same(outcomes(accelerated, accelerated), wanted)
    assert_same(outcomes(accelerated, plain), wanted)


def next_call(ids: torch.Tensor, cache: Any, model: PreTrainedModel) -> torch.Tensor:
    return model.generate(ids, past_key_values=cache, **GREEDY)


def by_hand(ids: torch.Tensor, cache: Any, model: PreTrainedModel) -> torch.Tensor:
    return model(ids[:, -5:], past_key_values=cache, use_cache=True).logits


@pytest.mark.parametrize("reset", [False, pytest.param(True, marks=needs(5, 18))])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)])
def test_cache_of_another_dtype_is_converted_as_by_generate(dtypes, reset):
    """The model was converted between the calls. The second call falls back to `generate` unless the cache was reset
    (huggingface/transformers#48509).
    """
    outputs = []
    for make in (lambda model: model, tr.accelerate):
        model, cache = make(copy.deepcopy(prototype("llama"))), DynamicCache()
        model.to(dtypes[0]).generate(IDS, past_key_values=cache, **{**GREEDY, "max_new_tokens": 1})
        if reset:
            cache.reset()
        ids = model.to(dtypes[1]).generate(torch.cat([IDS, OTHERS], 1), past_key_values=cache, **GREEDY)
        outputs.append([ids, cache.layers[0].keys.dtype])
    assert_same(outputs[1], outputs[0])
    assert reset or str(dtypes[0]) in model.acceleration.fallback


class GarbageOfOne(Garbage):
    """Drafts for one of several sequences only."""

    def __init__(self, prompt, **options):
        super().__init__(**options)
        self.prompt = prompt

    def start(self, prompt, target):
        return (
            super().start(prompt, target)
            if prompt.equal(self.prompt)
            else tr.make_drafter("plain").start(prompt, target)
        )


@pytest.mark.parametrize(("ids", "family"), paired([IDS[:, :1], IDS, BOTH], ["llama", "window"]))
def test_nan_states_of_a_drafted_token_do_not_affect_other_tokens(ids, family):
    """Such as an overflow in float16 (huggingface/transformers#25311): masked values are multiplied by zero, which
    gives NaN at every node of a forward pass, including the pass over the prompt.
    """
    model = copy.deepcopy(prototype(family))
    model.set_output_embeddings(copy.deepcopy(model.get_output_embeddings()))
    wanted, embeddings = model.generate(ids, **GREEDY), model.get_input_embeddings().weight
    with torch.no_grad():
        embeddings[[token for token in range(len(embeddings)) if token not in wanted]] = torch.nan
    for drafter in (
        "recycling",
        Garbage(shapes=[chain(2)]),
        Garbage(shapes=[chain(1), static(6)]),
        GarbageOfOne(ids[-1]),
    ):
        assert_same(tr.generate(model, ids, drafter=drafter, **GREEDY), wanted)


@pytest.mark.parametrize("family", ["llama", "window"])
def test_shorter_rows_are_filled_with_their_own_tokens(family):
    """Not with token 0, whose embedding may never have been set: masked values are multiplied by zero, and NaN stays.
    Two turns on one cache, whose rows end at different lengths.
    """
    model = copy.deepcopy(prototype(family))
    model.set_output_embeddings(copy.deepcopy(model.get_output_embeddings()))
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = torch.nan
    ids = torch.cat([BOTH, IDS.roll(5, 1)])
    mask = torch.ones_like(ids)
    for row, padding in enumerate([6, 0, 11]):
        ids[row, :padding], mask[row, :padding] = 7, 0

    def two_turns(generate: Callable[..., Any], **how: Any) -> list[Any]:
        how |= {**GREEDY, "pad_token_id": 7, "eos_token_id": ENDS, "suppress_tokens": [0]}
        cache = DynamicCache(config=model.config)
        first = generate(ids, attention_mask=mask, past_key_values=cache, **how)
        both = torch.cat([first, OTHERS.expand(3, -1)], 1)
        seen = torch.nn.functional.pad(mask, (0, both.shape[1] - mask.shape[1]), value=1)
        return [first, generate(both, attention_mask=seen, past_key_values=cache, **how)]

    wanted = two_turns(model.generate)
    for drafter in ("recycling", Garbage(shapes=[chain(1), static(6)])):
        assert_same(two_turns(partial(tr.generate, model), drafter=drafter), wanted)


def larger_where_one(own: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, given, *args, **others: own(self, given, *args, **others) * (1 + 0.1 * (given.shape[1] == 1))


@pytest.mark.parametrize(
    ("family", "holder", "name", "make"),
    [
        (
            "phi3",  # which calls the method of its base (huggingface/transformers#43280)
            GenerationMixin,
            "prepare_inputs_for_generation",
            lambda own: lambda self, input_ids, *args, **others: own(self, (input_ids + 1) % 60, *args, **others),
        ),
        ("gemma3_text", torch.nn.Embedding, "forward", larger_where_one),
        ("gemma3_text", GradientCheckpointingLayer, "__call__", larger_where_one),
        ("phi3", torch.nn.Linear, "__call__", larger_where_one),
        ("gpt2", torch.nn.LayerNorm, "__call__", larger_where_one),
    ],
)
def test_method_replaced_in_a_base_class_between_calls_falls_back(family, holder, name, make, monkeypatch):
    both = SideBySide(lambda: model_of(named(family)))
    both.assert_same(lambda model: model.generate(IDS, **GREEDY))
    monkeypatch.setattr(holder, name, make(getattr(holder, name)))
    both.assert_same(lambda model: model.generate(BOTH, **GREEDY), "")


@pytest.mark.parametrize("family", ["window", "hybrid"])
def test_reordered_layers_fall_back(family):
    """Layers that were removed or moved by hand, as in huggingface/transformers#30508 and peremartra/optipfair#20."""
    both = SideBySide(lambda: copy.deepcopy(prototype(family)))
    for layers in both.change(lambda model: model.base_model.layers):
        layers._modules.update({str(place): layer for place, layer in enumerate([*layers][::-1])})
    both.assert_same(partial(outcome, call()), "in place 0")


@pytest.mark.parametrize("family", ["jamba", "bamba", "lfm2"])
def test_hybrid_without_its_attention_layer_falls_back(family):
    """The removed attention layer is the one whose cache counts the tokens."""
    model = model_of(next(case for case in RECURRENT if case.family == family))
    both = SideBySide(lambda: copy.deepcopy(model))
    layers = DynamicCache(config=model.config).layers
    counting = next(place for place, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin))
    both.change(lambda model: setattr(model.base_model, "layers", model.base_model.layers[:counting]))
    for ids in (IDS[:, :1], IDS):
        both.assert_same(partial(outcome, call(ids)), f"no layer of number {counting}")
