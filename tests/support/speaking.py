"""A model that speaks and a tokenizer with a chat template, where no client of a server is installed either."""

from __future__ import annotations

import torch
from support import tiny
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 4096
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def speaking_llama() -> LlamaForCausalLM:
    """A random llama that emits ASCII when greedy, so that every token is a whole character or more."""
    model, tokenizer = tiny.llama(vocab_size=300, max_position_embeddings=CONTEXT), tiny.tokenizer()
    with torch.no_grad():
        for token in range(300):
            if not tokenizer.decode([token]).isascii() or token == tokenizer.eos_token_id:
                model.lm_head.weight[token] = 0
    return model


def ending_llama() -> LlamaForCausalLM:
    """One that can end an output, so that outputs may have a form."""
    model = speaking_llama()
    model.generation_config.eos_token_id = tiny.tokenizer().eos_token_id
    return model


def chatty(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer.chat_template = TEMPLATE
    return tokenizer
