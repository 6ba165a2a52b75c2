"""One cache continued by plain `generate`, by ours and by streams that are left, in any order: every output is that of
a cold cache, and the cache holds all tokens but the last.
"""

from __future__ import annotations

from functools import cache

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from support import tiny
from support.architectures import VOCABULARY, model_of, named
from support.recurrent_architectures import RECURRENT
from transformers import DynamicCache

import token_recycling as tr

FAMILIES = [named("llama"), named("gemma2", "window of 8"), next(c for c in RECURRENT if c.family == "qwen3_5_text")]
DRAFTERS = st.sampled_from(["recycling:tree=8", "published", "suffix", "prompt_lookup", "plain"])


@cache
def family(place):
    model = model_of(FAMILIES[place])
    model.generation_config.eos_token_id = None
    return model


class OneCache(RuleBasedStateMachine):
    @initialize(place=st.integers(0, len(FAMILIES) - 1), length=st.integers(1, 12))
    def begin(self, place, length):
        self.model, self.ids = family(place), tiny.prompt(length, length, VOCABULARY)
        self.fast = [False] if FAMILIES[place] in RECURRENT else [False, True]
        self.cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))

    def call(self, generate, new, **more):
        how = {"attention_mask": torch.ones_like(self.ids), "max_new_tokens": new, "do_sample": False, **more}
        return generate(self.ids, **how)

    def continued(self, wanted, ids):
        assert torch.equal(ids, wanted[:, : ids.shape[1]])
        assert int(self.cache.get_seq_length()) == ids.shape[1] - 1
        self.ids = ids

    @rule(new=st.integers(1, 12))
    def plain(self, new):
        wanted = self.call(self.model.generate, new)
        self.continued(wanted, self.call(self.model.generate, new, past_key_values=self.cache))

    @rule(new=st.integers(1, 12), drafter=DRAFTERS, fast=st.booleans())
    def ours(self, new, drafter, fast):
        wanted, how = self.call(self.model.generate, new), {"drafter": drafter, "fast": fast and self.fast[-1]}
        generate = lambda ids, **given: tr.generate(self.model, ids, **how, **given)  # noqa: E731
        self.continued(wanted, self.call(generate, new, past_key_values=self.cache))

    @rule(steps=st.integers(1, 4), drafter=DRAFTERS, fast=st.booleans())
    def stream_that_is_left(self, steps, drafter, fast):
        wanted = self.call(self.model.generate, 40)
        how = {"max_new_tokens": 40, "past_key_values": self.cache, "fast": fast and self.fast[-1]}
        stream, tokens = tr.stream(self.model, self.ids, drafter, **how), []
        for _, step in zip(range(steps), stream, strict=False):
            tokens += step.tokens
        stream.close()
        self.continued(wanted, torch.cat([self.ids, torch.tensor([tokens])], dim=1))

    @rule(tokens=st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=3))
    def say(self, tokens):
        self.ids = torch.cat([self.ids, torch.tensor([tokens])], dim=1)


OneCache.TestCase.settings = settings(max_examples=12, stateful_step_count=8)
TestOneCache = OneCache.TestCase
