"""Peak memory of keys and values during a call, compared with plain `generate`."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from support import tiny
from support.cases import thinned
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

import token_recycling as tr
from token_recycling.model import parts
from token_recycling.model.graphs import support

SIZE, HEADS = 20, 2
"""Dimensions of keys and values; no other tensor has both."""
PROMPT, NEW, WINDOW = 1600, 24, 1024
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}


class LiveBytes(TorchDispatchMode):
    """Records the peak number of bytes in storages of keys and values, whatever object holds them."""

    def __init__(self):
        super().__init__()
        self.most, self._live = 0, {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result, known = operation(*args, **(kwargs or {})), len(self._live)
        for made in tree_leaves(result):
            if (
                isinstance(made, torch.Tensor)
                and made.ndim >= 4
                and made.shape[-1] == SIZE
                and HEADS in made.shape[1:3]
            ):
                storage = made.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if len(self._live) > known:
            self._live = {name: one for name, one in self._live.items() if not one[0].expired()}
            self.most = max(self.most, sum(nbytes for _, nbytes in self._live.values()))
        return result


def model_of(windows: str) -> torch.nn.Module:
    torch.manual_seed(1)
    sizes = tiny.sizes(
        "vocab_size=96 hidden_size=40 intermediate_size=32 num_hidden_layers=4 num_attention_heads=4 "
        f"num_key_value_heads={HEADS} head_dim={SIZE} max_position_embeddings=8192"
    )
    if windows == "some":
        made = Gemma2ForCausalLM(Gemma2Config(**sizes, sliding_window=WINDOW, bos_token_id=None, eos_token_id=None))
    else:
        window = WINDOW if windows == "all" else None
        made = MistralForCausalLM(MistralConfig(**sizes, sliding_window=window, bos_token_id=None, eos_token_id=None))
    return made.eval()


@cache
def plain_output_and_peak(windows: str) -> tuple[torch.Tensor, int]:
    """Return the output of plain `generate`, and its peak number of bytes."""
    with LiveBytes() as live:
        output = model_of(windows).generate(tiny.prompt(0, PROMPT, 96), **GREEDY)
    return output, live.most


@pytest.mark.parametrize(
    ("windows", "fast"), thinned((windows, fast) for windows in ("none", "all", "some") for fast in (False, True))
)
def test_peak_of_keys_and_values_is_at_most_a_quarter_above_generate(windows, fast, monkeypatch):
    for module in (parts, support):  # both look for torch modes, and would find `LiveBytes`
        monkeypatch.setattr(module, "MODES", ())
    wanted, most = plain_output_and_peak(windows)
    with LiveBytes() as live:
        ours = tr.generate(
            model_of(windows), tiny.prompt(0, PROMPT, 96), drafter="recycling:tree=16", fast=fast, **GREEDY
        )
    assert torch.equal(ours, wanted)
    assert live.most <= 1.25 * most
