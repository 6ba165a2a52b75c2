"""Small objects for tests: random models, a llama that counts, prompts, a tokenizer, seeded runs."""

from __future__ import annotations

import copy
from ast import literal_eval
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

SENTENCES = [
    "def add(a, b):\n    return a + b\n",
    "for index in range(10):\n    print(index)\n",
    "import os\nimport sys\n",
]

PARTS = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1", "model.norm", "lm_head")
"""Modules of a llama with two layers, for a device map."""


def sizes(text: str) -> dict[str, Any]:
    """Return the fields of a configuration, written as `hidden_size=32 num_hidden_layers=2`."""
    return {name: literal_eval(value) for name, value in (field.split("=") for field in text.split())}


class WithAllLogits(torch.nn.Module):
    """Mixin before a model's class that returns the logits at all positions, as some models do."""

    def forward(  # type: ignore[no-untyped-def]
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        cache=None,
        use_cache=None,
        return_dict=None,
    ):
        filled = past_key_values if cache is None else cache
        return super().forward(input_ids, attention_mask, position_ids, filled, use_cache=use_cache)  # type: ignore[misc]


def llama(seed: int = 0, context: float = 0.1, **config: Any) -> LlamaForCausalLM:
    """Return a random llama in float32 with grouped queries and no end of sequence; large weights vary its choices.

    `context` scales the layers' contribution to the newest token's embedding. At 1 a random model seldom repeats
    itself; at 0.1 a third of its choices depend only on the newest token, and acceptance is like a trained model's.
    """
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **config})).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(context)
            layer.mlp.down_proj.weight.mul_(context)
    return model


def unknown(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return the model with the configuration of an unknown family."""
    model.config.__class__ = type("UnknownConfig", (type(model.config),), {"model_type": "unknown"})
    return model


def counting_llama(vocab_size: int = 16, **config: Any) -> LlamaForCausalLM:
    """Return a llama that counts: after token t its candidates are t + 1, t + 2, ... modulo the vocabulary size."""
    sizes = {"hidden_size": vocab_size, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = llama(context=0, vocab_size=vocab_size, **sizes, **config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(vocab_size))
        for token in range(vocab_size):
            following = (token + 1 + torch.arange(vocab_size)) % vocab_size
            model.lm_head.weight[following, token] = torch.linspace(3, -3, vocab_size)
    return model


def windowed(window: int = 8) -> MistralForCausalLM:
    """Return a random mistral with 64 tokens, whose layers see a window of `window`."""
    torch.manual_seed(0)
    config = sizes("hidden_size=32 intermediate_size=64 num_hidden_layers=2 vocab_size=64 pad_token_id=0")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "eos_token_id": None}
    return MistralForCausalLM(MistralConfig(**config, **heads, sliding_window=window)).eval()


def continued(model: PreTrainedModel, more: int) -> dict[str, Any]:
    """Return arguments that continue a call of `generate`: its cache, and its output with `more` random tokens."""
    cache = DynamicCache(config=model.config)
    text = model.generate(prompt(0, 40).to(model.device), past_key_values=cache, max_new_tokens=20, do_sample=False)
    return {"inputs": torch.cat([text, prompt(1, more).to(model.device)], dim=1), "past_key_values": cache}


def gpt2(n_positions: int = 256, vocab_size: int = 80) -> GPT2LMHeadModel:
    """Return a random GPT-2; its positions are learned, so the context limit is strict."""
    sizes = {"vocab_size": vocab_size, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": n_positions}
    config = GPT2Config(**sizes, initializer_range=0.3)
    config.bos_token_id = config.eos_token_id = None
    return GPT2LMHeadModel(config)


def related(model: LlamaForCausalLM, noise: float = 0.005) -> LlamaForCausalLM:
    """Return a model that often agrees with the given one."""
    other = copy.deepcopy(model)
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(noise * torch.randn_like(weight))
    return other


def prompt(seed: int, length: int, vocab_size: int = 64) -> torch.Tensor:
    """Return random ids (1, length); none is 0, which serves as padding."""
    return torch.randint(1, vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))


def tokenizer() -> PreTrainedTokenizerFast:
    """Train and return a byte-level BPE tokenizer with 300 tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    made.train_from_iterator(SENTENCES * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>")


def sentencepiece_tokenizer(texts: Sequence[str] = SENTENCES) -> PreTrainedTokenizerFast:
    """Train and return a tokenizer like Llama 2's: a space belongs to the word after it, and the first one is hidden;
    other characters are bytes.
    """
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = pre_tokenizers.Split(Regex("▁+[^▁]*"), "isolated")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    special = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")


def tokenizer_with_bos() -> PreTrainedTokenizerFast:
    """Return the same tokenizer, but with a special token before every prompt, as in Llama's."""
    made = tokenizer()
    special = [("<end>", made.eos_token_id)]
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<end> $A", special_tokens=special)
    return made


def seeded(run: Any, *args: Any, seed: int = 0, **kwargs: Any) -> tuple[Any, torch.Tensor]:
    """Return the result of `run` after `torch.manual_seed(seed)`, and the final state of the generator."""
    torch.manual_seed(seed)
    return run(*args, **kwargs), torch.get_rng_state()
