"""The models: the shipped one, and a random one whose passes take as long as those of a small model in use.

Neither ends a text, so that every method decodes as many tokens.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from token_recycling.bench.run.prompts import BenchmarkConfig

from .scenarios import Scenario

SHIPPED = Path(__file__).parents[2] / "models" / "target"


def configured(scenario: Scenario) -> BenchmarkConfig:
    """A scenario's model and tokenizer; the tokens of the shipped tokenizer are also the random model's first ones."""
    return BenchmarkConfig(_model(scenario.model, scenario.dtype), _tokenizer(), scenario.tokens)


@lru_cache(maxsize=1)
def _model(name: str, dtype: str) -> PreTrainedModel:
    kind = getattr(torch, dtype)
    model = _random().to(kind) if name == "random" else AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=kind)
    model.eval().generation_config.update(eos_token_id=None, pad_token_id=0)
    return model


@lru_cache(maxsize=1)
def _tokenizer() -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(SHIPPED)


def _random() -> LlamaForCausalLM:
    """246 million parameters, 33 million of them embeddings; what it writes follows from nothing."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32000,
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_key_value_heads=4,
            max_position_embeddings=2048,
        )
    )
