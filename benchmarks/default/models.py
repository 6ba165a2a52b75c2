"""The model: SmolLM2-135M-Instruct, asked through its chat template."""

from __future__ import annotations

from functools import lru_cache

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.real_model import fetched
from token_recycling import load
from token_recycling.bench.run.prompts import BenchmarkConfig

from .scenarios import Scenario


def configured(scenario: Scenario) -> BenchmarkConfig:
    """The model in a scenario's type, and its tokenizer."""
    return BenchmarkConfig(*_loaded(scenario.dtype), scenario.tokens, chat=True)


@lru_cache(maxsize=1)
def _loaded(dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return load(fetched(), dtype=getattr(torch, dtype))
