"""Memory of long prompts: logits are computed in pieces, and capacity for keys and values grows in small steps."""

from __future__ import annotations

import pytest
import torch
from support import tiny
from support.cases import thinned
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, LlamaForCausalLM

import token_recycling as tr
from token_recycling.model.foreign import search
from token_recycling.model.prefill import PIECE

VOCABULARY = 331
"""No other dimension of the model has this size, so it identifies tensors of logits."""
PROMPT = 1500


class Rows(TorchDispatchMode):
    """Records the largest number of rows of a tensor of logits."""

    most = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        turned = operation is torch.ops.aten.t.default  # the weights of the output layer
        for made in () if turned else tree_leaves(result):
            if isinstance(made, torch.Tensor) and made.ndim and made.shape[-1] == VOCABULARY:
                self.most = max(self.most, made.numel() // VOCABULARY)
        return result


class WithoutOption(tiny.WithAllLogits, LlamaForCausalLM):
    """A model without `logits_to_keep`."""


@pytest.fixture(scope="module")
def model():
    made = tiny.llama(vocab_size=VOCABULARY, max_position_embeddings=4096)
    made.generation_config.pad_token_id = 0
    return made


def most_rows(model, ids, drafter):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "code_around", lambda model: [])  # `Rows` keeps state, which would cause a fallback
        with Rows() as rows, tr.accelerated(model, drafter) as acceleration:
            model.generate(ids, attention_mask=(ids != 0).long(), max_new_tokens=4, do_sample=False)
    assert acceleration.fallback is None
    assert acceleration.stats.prompt_tokens == int((ids != 0).sum())
    return rows.most


def test_unneeded_logits_are_not_computed(model):
    assert most_rows(model, tiny.prompt(0, PROMPT, VOCABULARY), "recycling:tree=8") <= 9
    assert most_rows(model, tiny.prompt(0, PROMPT, VOCABULARY), "plain") == 1


def test_model_without_logits_to_keep_reads_in_pieces(model):
    ids = tiny.prompt(0, PROMPT, VOCABULARY)
    other = WithoutOption(model.config).eval()
    other.load_state_dict(model.state_dict())
    assert most_rows(other, ids, "plain") == PIECE
    ours = tr.generate(other, ids, drafter="plain", max_new_tokens=8)
    assert torch.equal(ours, model.generate(ids, max_new_tokens=8))


@pytest.mark.parametrize("length", thinned([700, 1], 2))
def test_capacity_for_keys_and_values_grows_by_an_eighth(model, length):
    """Buffers are seldom reallocated, and never far larger than their contents."""
    cache, new, sizes = DynamicCache(config=model.config), 600, []
    ids = tiny.prompt(0, length, VOCABULARY)
    of_slot = model.config.num_key_value_heads * model.config.head_dim * 4 * 2
    for _ in tr.stream(model, ids, "recycling:tree=chain:8", max_new_tokens=new, past_key_values=cache):
        for layer in cache.layers:
            capacity = layer.keys.untyped_storage().nbytes() // of_slot
            assert cache.get_seq_length() <= capacity <= 9 / 8 * cache.get_seq_length() + 8 + 128 + 64
        sizes.append(capacity)
    assert len(set(sizes)) <= 1 + new // 128
