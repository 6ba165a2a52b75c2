"""Tiny random models of every architecture that is claimed to be supported or refused, and the measurement of both.

Each case is a family and a configuration of a few thousand parameters in float32. Windows, chunks and other borders are
so small that a short text crosses them. `measured` runs one case; the tests assert on it, and
`benchmarks/architectures.py` writes docs/architectures.md from it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from support import tiny
from transformers import AutoModelForCausalLM, PreTrainedModel, T5Config, T5ForConditionalGeneration
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import token_recycling as tr
from token_recycling import templates
from token_recycling.draft import Draft
from token_recycling.model.self_test import largest_difference, random_text
from token_recycling.model.tree_model import TreeModel

VOCABULARY = 96
WINDOW = 8
LEFT_OUT: Any = object()
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MLA = {
    "num_key_value_heads": 4,
    "head_dim": LEFT_OUT,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
GROUP = {"n_group": 1, "topk_group": 1}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
    "original_max_position_embeddings": 32,
    "factor": 4.0,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@dataclass(frozen=True)
class Case:
    """One configuration of one family."""

    family: str
    tested: str = ""
    """What is particular about this configuration."""
    config: dict[str, Any] = field(default_factory=dict)
    sdpa: bool = True
    """Whether the family has sdpa attention besides eager."""

    def __str__(self) -> str:
        return f"{self.family} {self.tested}".strip()


def _one_mask(text: str, **config: Any) -> list[Case]:
    return [Case(family, config=config) for family in text.split()]


ONE_MASK = [
    *_one_mask("llama ministral3 qwen2 qwen3 mixtral gemma phi phi3 phimoe gpt2 gpt_neox gpt_bigcode opt stablelm"),
    *_one_mask("olmo olmo2 olmoe granite granitemoe cohere glm glm4 smollm3 starcoder2 nemotron seed_oss ernie4_5"),
    *_one_mask("helium apertus arcee bitnet persimmon hunyuan_v1_dense nanochat diffllama doge biogpt"),
    *_one_mask("qwen2_moe qwen3_moe glm4_moe minimax_m2", **MOE),
    Case("falcon", config={"head_dim": LEFT_OUT}),
    Case("gptj", config={"rotary_dim": 4}, sdpa=False),
    Case("codegen", config={"rotary_dim": 4}, sdpa=False),
    *_one_mask("deepseek_v2 deepseek_v3 youtu", **{**MOE, **MLA, **GROUP}),
    Case("jetmoe", config={"num_local_experts": 4, "kv_channels": 8, "num_attention_heads": 4}),
    Case("xglm", config={"ffn_dim": 48}, sdpa=False),
    Case("mistral", "without window", {"sliding_window": None}),
]
WINDOWS = [
    Case("mistral", "window of 8", {"sliding_window": WINDOW}),
    Case("starcoder2", "window of 8", {"sliding_window": WINDOW}),
    Case("phi3", "window of 8", {"sliding_window": WINDOW}),
    Case("qwen2", "window of 8", {**MIXED, "use_sliding_window": True, "max_window_layers": 1}),
    Case("ministral", "window of 8", MIXED),
    Case("gemma2", "window of 8", MIXED, sdpa=False),
    Case("gemma3_text", "window of 8", MIXED),
    Case(
        "gemma3n_text",
        "window of 8, shared keys and values",
        {
            **MIXED,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    Case(
        "gemma4_text",
        "window of 8, shared keys and values",
        {
            **MIXED,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "global_head_dim": 16,
        },
    ),
    Case("gpt_oss", "window of 8", {**MIXED, **MOE}, sdpa=False),
    Case("cohere2", "window of 8", MIXED),
    Case("olmo3", "window of 8", MIXED),
    Case("exaone4", "window of 8", {**MIXED, "sliding_window_pattern": 2}),
    Case("afmoe", "window of 8", {**MIXED, **MOE, "num_dense_layers": 1, "num_shared_experts": 1}),
    Case("mimo_v2_flash", "window of 8", {**MIXED, **MOE, "v_head_dim": 12}, sdpa=False),
    Case("vaultgemma", "window of 8", MIXED, sdpa=False),
    Case("smollm3", "window of 8", {**MIXED, "use_sliding_window": True, "no_rope_layers": [1, 0]}),
]
KEY_POSITIONS = [
    Case("bloom", config={"n_layer": 2, "n_head": 4}, sdpa=False),
    Case("mpt", config={"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 256, "use_cache": True}, sdpa=False),
    Case("falcon", "ALiBi", {"alibi": True, "head_dim": LEFT_OUT}),
]
BORDERS = [
    Case(
        "llama4_text",
        "chunks of 8, temperature step at 16",
        {
            **MOE,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": WINDOW,
            "floor_scale": 16,
            "attn_scale": 0.5,
            "no_rope_layers": [1, 1, 1, 0],
        },
    ),
    Case("phi3", "longrope, border at 32", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    Case(
        "phimoe", "longrope, border at 32", {"rope_parameters": {**LONGROPE, "short_mscale": 1.0, "long_mscale": 1.2}}
    ),
    Case("llama", "dynamic rotary scaling from 32", {"rope_parameters": DYNAMIC, "max_position_embeddings": 32}),
    Case(
        "gpt_neo",
        "local window of 32",
        {
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 32,
            "num_hidden_layers": LEFT_OUT,
            "num_attention_heads": LEFT_OUT,
        },
        sdpa=False,
    ),
    Case(
        "deepseek_v32",
        "8 keys a query",
        {**MOE, **MLA, **GROUP, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 16},
    ),
]
SUPPORTED = [*ONE_MASK, *WINDOWS, *KEY_POSITIONS, *BORDERS]

HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
REFUSED = [
    Case("mamba", config={"state_size": 4}),
    Case("mamba2", config={"state_size": 4, "num_heads": 4, "head_dim": 16, "expand": 2, "n_groups": 1}),
    Case("jamba", config={"attn_layer_offset": 1, "attn_layer_period": 2, **MOE}),
    Case("qwen3_next", config={**HYBRID, **MOE}),
    Case("qwen3_5_text", config=HYBRID),
    Case("falcon_h1"),
    Case("bamba", config={"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}),
    Case("rwkv"),
    Case("lfm2", config={"layer_types": ["conv", "full_attention"]}),
    Case("recurrent_gemma", config={"num_hidden_layers": 3, "block_types": ["recurrent", "recurrent", "attention"]}),
    Case("minimax", config={**HYBRID, **MOE}),
]


def model_of(case: Case, attention: str | None = None, seed: int = 0) -> PreTrainedModel:
    """The tiny random model of a case; `attention` sdpa or eager."""
    torch.manual_seed(seed)
    known = CONFIG_MAPPING[case.family]
    config = known(**{name: value for name, value in {**BASE, **case.config}.items() if value is not LEFT_OUT})
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **_attention(attention)).eval()
    made.generation_config.eos_token_id = made.generation_config.bos_token_id = None
    made.generation_config.pad_token_id = 0
    with torch.no_grad():
        for parameter in made.parameters():
            # Biases and norms of a fresh model are constants, which would hide errors in what they multiply.
            if parameter.ndim == 1 and parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return made


@dataclass(frozen=True)
class Result:
    """What a case showed."""

    support: tr.Support
    difference: float
    """The largest between logits of trees and of linear decoding."""
    identical: int
    """Texts that came out as from plain `generate`."""
    texts: int
    mat: float


TREES = {
    "the paper's": templates.paper(),
    "a chain": templates.chain(4),
    "a random tree": tr.Tree((-1, 0, 0, 0, 2, 1, 1, 3, 4, 5, 4, 9, 9, 10), (0, 0, 1, 2, 0, 0, 1, 0, 0, 0, 1, 0, 1, 0)),
}
LENGTHS = (6, 26)
"""Texts before a tree: within all windows, and beyond them."""
PROMPTS = (5, 29, 40)
NEW = 24
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 12}


def measured(case: Case, attention: str) -> Result:
    """Trees against linear decoding, and accelerated against plain `generate`, greedy and sampled with a seed."""
    if (str(case), attention) not in _MEASURED:
        model = model_of(case, attention)
        # Eager attention differs from sdpa in few lines: where there are both, one length of text is enough for it.
        both = case.sdpa and attention == "eager"
        matches, stats = generated(model, PROMPTS[1:2] if both else PROMPTS)
        difference = tree_difference(model, LENGTHS[1:] if both else LENGTHS)
        _MEASURED[str(case), attention] = Result(tr.check(model), difference, sum(matches), len(matches), stats.mat)
    return _MEASURED[str(case), attention]


_MEASURED: dict[tuple[str, str], Result] = {}


def tree_difference(model: PreTrainedModel, lengths: tuple[int, ...] = LENGTHS) -> float:
    """The largest difference of logits over several trees and lengths of text, where the library would draft."""
    target, worst = TreeModel(model), 0.0
    for tree in TREES.values():
        for length in lengths:
            fitting = tree.cut(target.depth_limit(tree, length))
            text = random_text(target, length + 1, seed=length)
            worst = max(worst, largest_difference(target, text, fitting)[0])
    return worst


@dataclass
class Oracle(tr.Drafter):
    """Drafts over random trees what it knows to follow, up to a random depth and on a random branch, among tokens that
    do not; so that many scattered nodes are accepted.
    """

    wanted: Sequence[torch.Tensor]
    """Each text as plain `generate` continues it."""

    def start(self, prompts: Sequence[torch.Tensor], target: TreeModel) -> None:
        self.random = random.Random(len(prompts[0]))

    def draft(self, context: tr.Context) -> Draft:
        tree = self.random.choice(list(TREES.values()))
        tokens = torch.tensor([int(context.root), *self.random.choices(range(VOCABULARY), k=len(tree) - 1)])
        branch = self.random.choice([node for node in range(len(tree)) if not tree.children[node]])
        known = self.wanted[context.row][len(context.tokens) :][: self.random.randint(0, tree.depth)]
        for node, token in zip(tree.lineages[branch][1:], known, strict=False):
            tokens[node] = token
        return Draft(tree, tokens)


def generated(model: PreTrainedModel, prompts: tuple[int, ...] = PROMPTS) -> tuple[list[bool], tr.Stats]:
    """Whether each text equals plain `generate`'s, and the statistics of all."""
    stats, matches = tr.Stats(), []
    for length in prompts:
        ids = tiny.prompt(length, length, VOCABULARY)
        for sampling in ({"do_sample": False}, SAMPLED):
            arguments = {"max_new_tokens": NEW, **sampling}
            forget(model)
            plain, _ = tiny.seeded(model.generate, ids, **arguments)
            forget(model)
            ours, _ = tiny.seeded(tr.generate, model, ids, drafter=Oracle(plain), stats=stats, **arguments)
            matches.append(torch.equal(ours, plain))
    return matches, stats


@torch.no_grad()
def forget(model: PreTrainedModel) -> None:
    """Dynamic rotary scaling remembers the longest text in the model itself; a short one makes it forget."""
    model(input_ids=torch.tensor([[1]]), use_cache=False)


def _attention(name: str | None) -> dict[str, Any]:
    return {} if name is None else {"attn_implementation": name}


TOLERANCE = 5e-5
"""Between logits of a tree and of linear decoding, in float32; those of these models are of the size of 1."""

_HEAD = f"""# Architectures

Written by `python benchmarks/architectures.py`; a test fails when it is stale. Every line is a tiny random model in
float32, measured: the logits of three trees, the paper's among them, against linear decoding (**trees**: `exact` means
within {TOLERANCE:.0e}), and whole texts against plain `generate`, greedy and sampled with a seed (**texts**: identical
ones), with prompts on both sides of every window, chunk and border.

`token-recycling check MODEL` says the same of one model. A model of a family that is not listed is tried on a short
text before it is accelerated, and refused if its tree differs.

## Supported

| family | configuration | what trees need | attention | trees | texts |
|---|---|---|---|---|---|
"""
_NOTES = """
Layers with a window or chunks are kept at full length while a call is accelerated, and masked by position: a cache that
has been accelerated works in plain `generate` too, and takes the memory of full attention. deepseek_v32 picks the keys
that a query sees by score; where scores tie exactly, a tree may break the tie otherwise.

## Where no tree is drafted

Near these lengths of text, decoding goes on token by token, with the same result. Batches and padded prompts of these
models, and of mpt, are left to transformers:

"""
_REFUSED = """
## Refused

| family | reason |
|---|---|
"""


def page() -> str:
    """docs/architectures.md."""
    lines, borders = [], []
    for case in SUPPORTED:
        attention = ["sdpa", "eager"] if case.sdpa else ["eager"]
        results = [measured(case, name) for name in attention]
        exact = "exact" if max(result.difference for result in results) < TOLERANCE else "DIFFERENT"
        texts = f"{sum(result.identical for result in results)} of {sum(result.texts for result in results)}"
        found = results[0].support
        lines.append(f"| {case.family} | {case.tested} | {found.how} | {', '.join(attention)} | {exact} | {texts} |\n")
        borders += [f"- {case.family}: {note}\n" for note in found.notes]
    refused = [f"| {case.family} | {tr.check(model_of(case)).reason} |\n" for case in REFUSED]
    refused.append(f"| encoder-decoders | {tr.check(_t5()).reason} |\n")
    return "".join([_HEAD, *lines, _NOTES, *borders, _REFUSED, *refused])


def _t5() -> PreTrainedModel:
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    return T5ForConditionalGeneration(config)
