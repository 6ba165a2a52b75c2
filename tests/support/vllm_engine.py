"""vLLM on a CPU for tests: small models, engines, and reference outputs of transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

# Set before vLLM is imported. Tests can inspect an engine that runs in their own process.
os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
    VLLM_REGEX_COMPILATION_TIMEOUT_S="120",  # 5 s are too short on a loaded machine
    HF_HUB_OFFLINE="1",
)

import torch
from support import tiny
from transformers import LlamaForCausalLM
from vllm import LLM, SamplingParams

PROPOSER = "token_recycling.VLLM"
VOCABULARY = 32
SHIPPED = Path(__file__).parents[2] / "models" / "target"


def speculation(tokens: int) -> dict[str, Any]:
    """Return the configuration that a user writes."""
    return {"model": PROPOSER, "num_speculative_tokens": tokens}


def llama(**config: Any) -> LlamaForCausalLM:
    """Return a random llama with the head size that vLLM's CPU attention requires."""
    return tiny.llama(
        **{"vocab_size": VOCABULARY, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, **config}
    )


def engine(folder: Path, options: dict[str, Any] | None = None, tokens: int = 6, **arguments: Any) -> LLM:
    """Return an engine with Token Recycling that reads and returns only token ids."""
    settings = {
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "enable_prefix_caching": False,
        "max_model_len": 256,
        "speculative_config": speculation(tokens),
        "additional_config": {"token_recycling": options or {}},
    }
    return LLM(model=str(folder), **{**settings, **arguments})


def runner_of(llm: LLM) -> Any:
    """Return the model runner of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def say(llm: LLM, prompts: list[list[int]], parameters: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    """Return the engine's outputs for prompts of ids."""
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [list(result.outputs[0].token_ids) for result in llm.generate(inputs, parameters, use_tqdm=False)]


def counts(llm: LLM) -> dict[str, int]:
    """Return vLLM's own counters of speculation: drafts, draft_tokens, accepted_tokens."""
    prefix = "vllm:spec_decode_num_"
    found = {metric.name: metric for metric in llm.get_metrics() if metric.name.startswith(prefix)}
    return {name.removeprefix(prefix): metric.value for name, metric in found.items() if hasattr(metric, "value")}


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def wanted(model: LlamaForCausalLM, prompt: list[int], tokens: int, **options: Any) -> list[int]:
    """Return the greedy output of transformers, with `options` of its `generate`."""
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, **options)
    return output[0, len(prompt) :].tolist()


def prompts(number: int, shortest: int = 1, longest: int = 90) -> list[list[int]]:
    """Return prompts of different lengths."""
    lengths = [shortest + seed * 37 % (longest - shortest + 1) for seed in range(number)]
    return [tiny.prompt(seed, length, VOCABULARY)[0].tolist() for seed, length in enumerate(lengths)]
