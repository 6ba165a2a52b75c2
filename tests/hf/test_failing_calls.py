"""A call that ends with an error in the caller's code leaves the same as `generate`: the tokens given to its streamer,
the slots of the caller's cache, and the state of the random generator.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack

import pytest
import torch
from support import tiny
from support.architectures import VOCABULARY, model_of, named
from support.automata import AutomatonProcessor
from support.batches import batch
from support.cases import parameter
from support.drafters import example
from support.elsewhere import THERE, another_device, put_there
from support.noting import own
from support.oracle import Oracle
from support.recurrent_architectures import recurrent
from support.releases import needs
from support.running import GoneError
from support.slots import assert_same_slots
from transformers import DynamicCache, TextIteratorStreamer
from transformers.cache_utils import DynamicLayer

import token_recycling as tr
from token_recycling.model.hidden import decoder_layers

IDS = tiny.prompt(0, 6)
TOKENS = (1, 2, 5, 8)
"""The new token at which a call fails, counted from 1."""


class Streamer:
    """Records its tokens and fails at the given one, if any."""

    def __init__(self, tokens):
        self.left, self.given = tokens, []

    def put(self, value):
        if self.given and self.left == 1:
            raise GoneError
        if self.given and self.left:
            self.left -= 1
        self.given += value.tolist() if self.given else value[0].tolist()

    def end(self):
        raise AssertionError("a call that has failed has no end")


def failing_code(what, tokens, tokenizer, of_users):
    """Return arguments with which a call fails at a token, and a function that returns the streamed output. A user's
    streamer receives single tokens, one of transformers whole steps.
    """
    own = Streamer(tokens if what == "streamer" else None)
    of_transformers = TextIteratorStreamer(tokenizer)
    streamer, given = (own, lambda: own.given) if of_users else (of_transformers, lambda: text_of(of_transformers))

    def criterion(ids, scores, **_):
        if ids.shape[1] == IDS.shape[1] + tokens:
            raise GoneError
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    def processor(ids, scores):
        if ids.shape[1] == IDS.shape[1] + tokens - 1:
            raise GoneError
        return scores

    code = {"criterion": {"stopping_criteria": [criterion]}, "processor": {"logits_processor": [processor]}}
    return {**code.get(what, {}), "streamer": streamer}, given


def text_of(streamer):
    """Return all text of a streamer, including text that waits for the end of a word."""
    waiting = streamer.tokenizer.decode(streamer.token_cache)[streamer.print_len :]
    return "".join(streamer.text_queue.queue) + waiting


def state_after_failure(generate, ids, tokens, sample, *how):
    """Return what a call leaves that fails at a token: streamed output, cache, state of the generator."""
    code, streamed = failing_code(how[0], tokens, *how[1:])
    cache = DynamicCache()
    torch.manual_seed(3)
    with pytest.raises(GoneError):
        generate(ids, max_new_tokens=20, do_sample=sample, cache=cache, **code)
    return streamed(), cache, torch.get_rng_state()


CODE = [("criterion", False), ("criterion", True), ("processor", False), ("processor", True), ("streamer", True)]
"""The kind of code that fails, and whether the streamer is a user's."""


@pytest.mark.parametrize(
    ("place", "what", "of_users", "sample"),
    [
        parameter(place, *code, sample, every_run=sample == turn % 2 and (place == "here" or not turn))
        for place in ("here", "there")
        for turn, code in enumerate(CODE)
        for sample in (False, True)
    ],
)
def test_failed_call_leaves_the_same_state_as_generate(tokenizer, place, what, of_users, sample):
    """Drafts continue past the failing token with the model's own tokens."""
    model, how = tiny.llama(3, vocab_size=VOCABULARY), (sample, what, tokenizer, of_users)
    torch.manual_seed(3)
    drafter = Oracle([model.generate(IDS, max_new_tokens=32, do_sample=sample)[0]])
    wanted = [state_after_failure(model.generate, IDS, tokens, *how) for tokens in TOKENS]
    with ExitStack() as device:
        ids = IDS
        if place == "there":
            device.enter_context(another_device())
            put_there(model)
            ids = IDS.to(THERE)
        tr.accelerate(model, drafter)
        for tokens, (streamed, cache, state) in zip(TOKENS, wanted, strict=True):
            ours, own, after = state_after_failure(model.generate, ids, tokens, *how)
            assert model.acceleration.fallback is None
            assert ours == streamed
            assert torch.equal(after, state)
            assert_same_slots(own, cache, atol=1e-5)
            assert [*map(type, own.layers)] == [*map(type, cache.layers)]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("lengths", "spare"), [([9, 9, 9], 0), ([4, 9, 6], 0), ([4, 9], 2), ([9], 2)])
def test_failed_call_of_a_batch_leaves_the_same_cache_as_generate(ending, lengths, spare, tokens):
    """Rows have advanced by different numbers of tokens."""
    inputs, width, caches = batch(lengths, 1, spare), max(lengths) + spare, []
    criterion = failing_code("criterion", width - IDS.shape[1] + tokens, None, True)[0]["stopping_criteria"]
    for generate in (ending.generate, tr.accelerate(copy.deepcopy(ending)).generate):
        for given in (None, DynamicCache()):
            with pytest.raises(GoneError):
                generate(**inputs, max_new_tokens=20, do_sample=False, cache=given, stopping_criteria=criterion)
        caches.append(given)
    wanted, own = caches
    assert_same_slots(own, wanted, [width - length for length in lengths])
    assert [*map(type, own.layers)] == [*map(type, wanted.layers)]


@pytest.mark.parametrize("at", ["start", "draft", "observe", "statistics", "describe"])
def test_drafter_error_reaches_the_caller(at):
    def fail(*_):
        raise GoneError

    drafter = type("Failing", (tr.Drafter,), {"draft": lambda self, context: tr.Draft.chain(context.root), at: fail})
    with pytest.raises(GoneError):
        tr.generate(tiny.llama(), IDS, drafter=drafter(), max_new_tokens=4, do_sample=False)


def module_state(model):
    """Attribute names and hooks of every module, and the attention implementation."""
    parts = [(*vars(part), *part._forward_pre_hooks, *part._forward_hooks) for part in model.modules()]
    return parts, model.config._attn_implementation


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize(
    ("case", "drafter"),
    [
        (named("llama", ""), "recycling:tree=8"),
        (named("llama", ""), "medusa"),
        (named("bloom"), "recycling:tree=8"),
        pytest.param(recurrent("qwen3_5_text"), "recycling:tree=8", marks=needs(5, 14)),
    ],
    ids=str,
)
def test_failed_forward_pass_leaves_no_state_in_the_model(case, drafter, passes, tmp_path):
    """It runs out of memory between two layers, over the prompt or over a tree."""
    model, ids, left = model_of(case), tiny.prompt(0, 9, VOCABULARY).repeat(1, 2), [0]
    how = {"max_new_tokens": 12, "do_sample": False}
    wanted, logits = model.generate(ids, **how), model(ids).logits

    def fail(*_):
        left[0] -= 1
        if not left[0]:
            raise torch.OutOfMemoryError("no room")

    decoder_layers(model)[1][-1].register_forward_pre_hook(own(fail))
    made = example(drafter, model, tmp_path) if drafter == "medusa" else tr.make_drafter(drafter)
    tr.accelerate(model, made).generate(ids, **how)
    before, stats, left[0] = module_state(model), model.acceleration.stats, passes
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        model.generate(ids, **how)
    assert model.acceleration.fallback is None
    assert model.acceleration.stats is not stats, "the failed call is recorded"
    assert module_state(model) == before
    torch.testing.assert_close(model(ids).logits, logits)
    assert torch.equal(model.generate(ids, **how), wanted)


@pytest.mark.parametrize("forced", [False, True])
def test_sequence_beyond_the_position_limit_fails_at_the_same_token_as_generate(forced):
    """No earlier draft exceeds the limit, although the caller allows more tokens, and a grammar forces them."""
    model, ids = model_of(named("gpt2")), tiny.prompt(0, 250, VOCABULARY)
    how = {"do_sample": False, "logits_processor": [AutomatonProcessor([{5: 0}], VOCABULARY)] if forced else []}
    text = model.generate(ids, max_new_tokens=7, **copy.deepcopy(how))[0]
    assert len(text) == model.config.max_position_embeddings + 1
    for generate in (model.generate, tr.accelerate(copy.deepcopy(model), Oracle([text])).generate):
        streamer = Streamer(0)
        with pytest.raises(IndexError):
            generate(ids, max_new_tokens=20, streamer=streamer, **copy.deepcopy(how))
        assert streamer.given == text.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_batch_beyond_the_position_limit_leaves_layers_of_transformers(seed):
    """One row reaches the limit before the others, which cannot be continued to it."""
    model, cache = tr.accelerate(model_of(named("gpt2")), "suffix"), DynamicCache()
    torch.manual_seed(seed)
    with pytest.raises(IndexError):
        model.generate(
            tiny.prompt(0, 5, VOCABULARY).repeat(3, 48), max_new_tokens=40, do_sample=True, top_k=2, cache=cache
        )
    assert {type(layer) for layer in cache.layers} == {DynamicLayer}
