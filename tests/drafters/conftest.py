from __future__ import annotations

import pytest
from support import tiny
from transformers import LlamaForCausalLM


@pytest.fixture
def deep() -> LlamaForCausalLM:
    """A llama with states to read between its six layers."""
    return tiny.llama(3, num_hidden_layers=6)
