"""A server whose model emits scripted texts and calls functions."""

import pytest
import torch
from support import tiny
from support.serving import serving
from support.speaking import TEMPLATE, ascii_llama
from transformers import LogitsProcessor

from token_recycling.serving import generation

WITH_TOOLS = "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}" + TEMPLATE
RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant: ",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<end>", "content": "text"},
    },
}


WORDS = ["tool_call", '"name": "look"', '"arguments": ']
"""Single tokens, as in real tokenizers, since calls are long. Other delimiters consist of several tokens."""


class Scripted(LogitsProcessor):
    """Makes a model emit the given tokens."""

    def __init__(self, tokens, prompt_tokens):
        self.tokens, self.prompt_tokens = tokens, prompt_tokens

    def __call__(self, input_ids, scores):
        forced = scores.new_full(scores.shape, float("-inf"))
        forced[0, self.tokens[input_ids.shape[1] - self.prompt_tokens]] = 0
        return forced


@pytest.fixture(scope="session")
def model(tokenizer):
    made = ascii_llama()
    made.generation_config.eos_token_id = 0
    made.resize_token_embeddings(len(tokenizer) + 1, mean_resizing=False)
    with torch.no_grad():
        made.lm_head.weight[-len(WORDS) - 1 :] = 0  # emitted only if a test or a grammar forces them
    return made


@pytest.fixture(scope="session")
def tokenizer():
    made = tiny.tokenizer()
    made.add_tokens(WORDS)
    made.chat_template, made.response_template = WITH_TOOLS, RESPONSES
    return made


@pytest.fixture(scope="session")
def server(model, tokenizer):
    with serving(model, tokenizer) as running:
        yield running


@pytest.fixture
def says(monkeypatch, tokenizer):
    """Return a function that makes the model emit a text."""
    usual = generation.processors

    def script(text):
        tokens = [*tokenizer(text)["input_ids"], 0]

        def scripted(wanted, *more):
            found = usual(wanted, *more)
            return type(found)([*found, Scripted(tokens, wanted.ids.shape[-1])])

        monkeypatch.setattr(generation, "processors", scripted)

    return script
