"""Models with states over the text: what a pass over a tree costs, and whole calls against plain `generate`.

The models are random, of 40 to 70M parameters, with the layers of a hybrid family: what they write says nothing, what
their passes take does. Two texts: one drawn at temperature 1, in which nothing repeats, so that whatever is drafted is
lost; and a greedy one of a model whose next token follows mostly from the one before, so that the text comes to repeat
itself. One thread, processor time, all ways in turn, prompt by prompt; the ratios are of sums over all prompts but the
first, which warms up.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import token_recycling as tr
from token_recycling.bench.run.outcome import Stopwatch
from token_recycling.model.kv_cache import TreeCache
from token_recycling.model.prefill import read_prompts
from token_recycling.model.tree_model import TreeModel
from token_recycling.trees.draft import Draft
from token_recycling.trees.templates import chain, root_only

VOCABULARY, PROMPT, NEW = 8192, 64, 128
SIZES = (1, 2, 4, 8, 16)
ROUNDS = 7
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "head_dim": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
HEADS = {"mamba_n_heads": 20, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1, "mamba_expand": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 10,
        "linear_num_value_heads": 20,
    },
    "falcon_h1": {**HEADS, "mamba_d_ssm": 1280},
    "granitemoehybrid": {
        **HEADS,
        "layer_types": (["mamba"] * 3 + ["attention"]) * 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 2048,
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2},
}
TEXTS: dict[str, dict[str, Any]] = {
    "drawn, nothing repeats": {"do_sample": True, "temperature": 1.0, "top_k": 0},
    "greedy, comes to repeat": {"do_sample": False},
}
WAYS = ("plain", "recycling", "suffix", "prompt_lookup")
_HEAD = """# Models with states over the text

Written by `python benchmarks/hybrids.py`; random models, one thread, processor time, torch {torch}, transformers
{transformers}. First, a pass over a chain of n nodes by one over a single token; then whole calls of {new} new tokens
by plain `generate`, and behind each the tokens that a step emitted.

"""


def model_of(family: str, dtype: torch.dtype, repeats: bool) -> PreTrainedModel:
    """A random model; `repeats`: whose layers add little to the newest token's embedding."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **COMMON, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.generation_config.pad_token_id = 0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if repeats and weight.ndim > 1 and "embed" not in name and "head" not in name:
                weight.mul_(0.1)
    return model


@torch.no_grad()
def passes(model: PreTrainedModel) -> list[float]:
    """What a pass over a chain takes by one over a single token, of each size; medians of rounds."""
    target, text = TreeModel(model), torch.arange(1, PROMPT + 1)
    cache, times = target.new_cache(), {size: list[float]() for size in SIZES}
    read_prompts(target, [text], cache)
    kept = TreeCache(cache)
    for _ in range(ROUNDS):
        for size in SIZES:
            draft = Draft(chain(size - 1) if size > 1 else root_only(), text[:size])
            watch = Stopwatch(target.device)
            target.forward(target.inputs.of([draft], [PROMPT], PROMPT), cache)
            times[size].append(watch.read()[1])
            kept.keep(PROMPT, [PROMPT], [[]])
    medians = [statistics.median(taken) for taken in times.values()]
    return [median / medians[0] for median in medians]


def calls(model: PreTrainedModel, prompts: int, how: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """For each way its speed as a multiple of plain `generate`'s, and the tokens a step emitted."""
    drafters = {way: tr.make_drafter(way) for way in WAYS}
    spent, stats = dict.fromkeys(("generate", *WAYS), 0.0), {way: tr.Stats() for way in WAYS}
    for prompt in range(prompts + 1):
        ids = torch.randint(1, VOCABULARY, (1, PROMPT), generator=torch.Generator().manual_seed(prompt))
        given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, **how}
        for way in spent:
            torch.manual_seed(prompt)
            watch = Stopwatch(model.device)
            if way == "generate":
                model.generate(ids, **given)
            else:
                tr.generate(model, ids, drafter=drafters[way], stats=stats[way], **given)
            spent[way] += watch.read()[1] if prompt else 0.0
    return {way: (spent["generate"] / spent[way], stats[way].mat) for way in WAYS}


def _head(what: str, columns: Sequence[str]) -> str:
    return f"| model | type | {what} | {' | '.join(columns)} |\n|{'---|' * (3 + len(columns))}\n"


def lines(prompts: int) -> Iterator[str]:
    """Those of both tables."""
    yield _head("parameters", [f"n = {size}" for size in SIZES])
    table = ["\n" + _head("text", WAYS)]
    for family in FAMILIES:
        for dtype in (torch.float32, torch.bfloat16):
            kind = str(dtype).removeprefix("torch.")
            for (text, how), repeats in zip(TEXTS.items(), (False, True), strict=True):
                model = model_of(family, dtype, repeats)
                if not repeats:
                    size = sum(weight.numel() for weight in model.parameters()) / 1e6
                    shown = " | ".join(f"{ratio:.2f}" for ratio in passes(model))
                    yield f"| {family} | {kind} | {size:.0f}M | {shown} |\n"
                found = calls(model, prompts, how)
                shown = " | ".join(f"{ratio:.2f} ({mat:.2f})" for ratio, mat in found.values())
                table.append(f"| {family} | {kind} | {text} | {shown} |\n")
    yield from table


def main(
    output: Annotated[Path, typer.Option(help="file of the tables")] = Path("docs/results/hybrids.md"),
    prompts: Annotated[int, typer.Option(help="prompts of a line")] = 3,
) -> None:
    """Measures, writes and prints both tables."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    versions = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    text = _HEAD.format(**versions, new=NEW) + "".join(lines(prompts))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
