"""Small assistant models for a target, in the formats of transformers."""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
from support.releases import skip_before
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModel, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from token_recycling.model.compat import MtpModel


def dflash(model: PreTrainedModel, seed: int = 1, **config: Any) -> PreTrainedModel:
    """Return a random DFlash assistant with two layers, one of them windowed, and blocks of 5 tokens."""
    skip_before(5, 23)
    text = model.config.get_text_config(decoder=True)
    sizes = {
        "hidden_size": text.hidden_size,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "block_size": 5,
        "mask_token_id": 0,
        "target_layer_ids": [0, text.num_hidden_layers - 1],
        "initializer_range": 0.3,
    }
    torch.manual_seed(seed)
    return AutoModel.from_config(CONFIG_MAPPING["muse_glimmer_assistant"](**{**sizes, **config})).eval()


def trained_dflash(model: LlamaForCausalLM) -> PreTrainedModel:
    """Return a DFlash assistant trained on outputs of the counting llama."""
    assistant, vocabulary, places = dflash(model), model.config.vocab_size, 14
    optimizer, draws = torch.optim.Adam(assistant.parameters(), lr=1e-2), torch.Generator().manual_seed(0)
    embed, masks = model.get_input_embeddings(), torch.zeros(16, 4, dtype=torch.long)
    for step in range(60):
        text = (torch.randint(vocabulary, (16, 1), generator=draws) + torch.arange(places)) % vocabulary
        known = 3 + step % 6
        with torch.no_grad():
            states = model(text[:, :known], output_hidden_states=True).hidden_states
        outputs = assistant(
            noise_embeds=embed(torch.cat([text[:, known : known + 1], masks], dim=1)),
            context_hidden_states=torch.cat([states[1], states[2]], dim=-1),
            position_ids=torch.arange(known + 5)[None],
        )
        logits = model.lm_head(outputs.last_hidden_state[:, 1:])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, known + 1 : known + 5].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return assistant.eval()


def mtp(model: PreTrainedModel, layers: int = 2, seed: int = 1) -> MtpModel:
    """Return random MTP layers for a target, even if its family has none."""
    skip_before(5, 20)
    declared = vars(model.config).copy()
    model.config.num_mtp_layers = layers
    made = MtpModel(model, layers).eval()
    vars(model.config).clear()
    vars(model.config).update(declared)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in made.layers.parameters():
            weight.fill_(1.0) if weight.ndim == 1 else weight.normal_(std=0.3)
    return made


def counting_mtp(model: LlamaForCausalLM, layers: int = 2) -> MtpModel:
    """Return MTP layers for the counting llama: each passes on its input token, which the output layer increments."""
    made, width = mtp(model, layers), model.config.hidden_size
    with torch.no_grad():
        for layer in made.layers:
            layer.eh_proj.weight.copy_(torch.cat([torch.eye(width), torch.zeros(width, width)], dim=1))
            layer.mtp_block.self_attn.o_proj.weight.zero_()
            layer.mtp_block.mlp.down_proj.weight.zero_()
    return made


def word_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are the words `t0`, `t1` and so on."""
    made = Tokenizer(models.WordLevel({f"t{token}": token for token in range(size)}, unk_token="t0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def with_permuted_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, seed: int = 2
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return the same model and tokenizer with permuted token ids."""
    size = len(tokenizer)
    places = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()
    written = json.loads(tokenizer.backend_tokenizer.to_str())
    written["model"]["vocab"] = {token: places[own] for token, own in written["model"]["vocab"].items()}
    for token in written["added_tokens"]:
        token["id"] = places[token["id"]]
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight, own in (
            (other.get_input_embeddings().weight, model.get_input_embeddings().weight),
            (other.get_output_embeddings().weight, model.get_output_embeddings().weight),
        ):
            weight[places] = own[:size]
    moved = Tokenizer.from_str(json.dumps(written))
    return other, PreTrainedTokenizerFast(tokenizer_object=moved, eos_token="<end>", pad_token="<end>")
