"""A model with readable output and a tokenizer with a chat template; importing this module needs no server client."""

from __future__ import annotations

import copy

import torch
from support import tiny
from support.architectures import model_of
from support.recurrent_architectures import recurrent
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

CONTEXT = 4096
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

OF_PARTS = (
    "{% for message in messages %}{{ message.role }}: "
    "{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""The same text, of messages in parts, as in templates of models with pictures."""


def ascii_llama() -> LlamaForCausalLM:
    """Return a random llama whose greedy output is ASCII, so that every token is at least one whole character."""
    model, tokenizer = tiny.llama(vocab_size=300, max_position_embeddings=CONTEXT), tiny.tokenizer()
    with torch.no_grad():
        for token in range(300):
            if not tokenizer.decode([token]).isascii() or token == tokenizer.eos_token_id:
                model.lm_head.weight[token] = 0
    return model


def ending_llama() -> LlamaForCausalLM:
    """Return a model that can end its output, as constrained output requires."""
    model = ascii_llama()
    model.generation_config.eos_token_id = tiny.tokenizer().eos_token_id
    return model


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of `tiny` with a chat template."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def forgetful_chat() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return a random model with recurrent layers, and a tokenizer whose template repeats earlier turns without the
    empty reasoning, `<>`, with which it begins an answer.
    """
    config = copy.deepcopy(model_of(recurrent("qwen3_5_text")).config)
    config.vocab_size, config.max_position_embeddings = 300, CONTEXT
    torch.manual_seed(0)
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("assistant: {%", "assistant: <>\n{%")
    return AutoModelForCausalLM.from_config(config).eval(), tokenizer
