from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from hypothesis import settings
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

SHIPPED = Path(__file__).parents[1] / "models" / "target"

# The same examples on every machine and in every run.
settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=60, database=None)
settings.load_profile("fixed")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def model() -> LlamaForCausalLM:
    """A random llama of 64 tokens, made for this test alone."""
    return tiny.llama()


@pytest.fixture
def counting() -> LlamaForCausalLM:
    """A llama of 16 tokens that counts."""
    return tiny.counting_llama()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny.tokenizer()


@pytest.fixture(scope="session")
def shipped() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The target model that ships with the project, in float32, and its tokenizer."""
    if not (SHIPPED / "model.safetensors").exists():
        pytest.skip(f"no model in {SHIPPED}")
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(SHIPPED)
