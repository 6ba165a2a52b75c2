from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from token_recycling import accelerate

MODEL = Path(__file__).parents[2] / "models" / "target"
PROMPT = "class Stack:\n    def __init__(self, limit):\n        "


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    for name, value in {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "GRADIO_ANALYTICS_ENABLED": "False"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def fresh():
    """Return a function that loads the shipped model in float32, for a test to change."""
    return lambda **how: AutoModelForCausalLM.from_pretrained(MODEL, **{"dtype": torch.float32, **how})


@pytest.fixture
def assert_same_text():
    """Assert that a model's accelerated output equals its plain one, with drafts accepted."""
    inputs = AutoTokenizer.from_pretrained(MODEL)(PROMPT, return_tensors="pt")

    def compared(model):
        plain = model.generate(**inputs, max_new_tokens=40, do_sample=False)
        assert torch.equal(accelerate(model).generate(**inputs, max_new_tokens=40, do_sample=False), plain)
        assert model.acceleration.stats.mat > 1

    return compared
