"""Conversations: every answer equals that of a cold cache, whatever is cached from earlier turns."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from support import tiny
from support.drafters import example
from support.noting import noted, own
from support.releases import needs
from support.speaking import OF_PARTS, ascii_llama, chat_tokenizer, forgetful_chat
from transformers import DynamicCache, GenerationConfig, StoppingCriteriaList
from transformers.models.llama import modeling_llama

from token_recycling import Conversation, make_drafter
from token_recycling._util.chat_templates import readable
from token_recycling._util.text_stream import decoded
from token_recycling.model.target import Target

pytestmark = pytest.mark.core

SAID = ("add a, b", "print it", "again", "import os")
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture
def chat():
    return Conversation(ascii_llama(), chat_tokenizer(), **GREEDY)


def cold_answer(chat, messages, **arguments):
    """Return the answer of plain `generate` to these messages, without a cache."""
    inputs = chat.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    text = chat.model.generate(**inputs, **{**GREEDY, **arguments})
    return text[0, inputs["input_ids"].shape[1] :].tolist()


def test_templates_that_read_only_parts_show_texts(chat):
    """As those of LLaVA and Idefics."""
    answers = [chat.say(said) for said in SAID[:2]]
    chat.reset()
    chat.tokenizer.chat_template = OF_PARTS
    assert [chat.say(said) for said in SAID[:2]] == answers


def test_what_a_template_reads_keeps_no_tokenizer_alive():
    tokenizer = chat_tokenizer()
    assert readable(tokenizer, [{"role": "user", "content": "hi"}])
    gone = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert gone() is None


def test_every_answer_equals_that_of_a_cold_cache(chat):
    cached = []
    read, _ = noted(chat.model, lambda given: given["input_ids"].shape[1])
    for said in SAID:
        asked = [*chat.messages, {"role": "user", "content": said}]
        wanted = cold_answer(chat, asked)
        pieces = []
        read.clear()
        answer = chat.say(said, pieces.append)
        assert chat.last is not None
        assert chat.last.tokens == wanted
        assert chat.last.stats.tokens == len(wanted)
        assert "".join(pieces) == answer == decoded(chat.tokenizer, wanted)
        assert len(pieces) > 1
        asked_tokens = chat.last.arguments["input_ids"].shape[1]
        assert not cached or read[0] < asked_tokens - cached[-1], "a turn must read only its new tokens"
        assert chat.messages == [*asked, {"role": "assistant", "content": answer}]
        assert chat.model.generate(**chat.last.arguments)[0, -len(wanted) :].tolist() == wanted
        cached.append(chat.last.cached)
    assert cached[0] == 0
    assert cached[1] > 10
    assert sorted(cached) == cached
    assert chat.acceleration.fallback is None


@pytest.mark.parametrize("name", ["draft_model", "assistant", "layer_skip", "specdec_pp", "fuse"])
def test_draft_model_reads_only_the_new_tokens_of_a_turn(name, tmp_path, monkeypatch):
    model = ascii_llama()
    drafter: Any = make_drafter("fuse", parts=["suffix", make_drafter("draft_model", model=model, nodes=4)], nodes=8)
    if name != "fuse":
        drafter = example(name, model, tmp_path)
        drafter.nodes = 8
    chat, asked, rows = Conversation(model, chat_tokenizer(), drafter, **GREEDY), 0, list[int]()
    for function in (Target.read, Target.forward):

        def noting(target, given, *more, function=function, **named):
            if target is not chat.acceleration.target:
                rows.append((given if isinstance(given, torch.Tensor) else given.tokens).numel())
            return function(target, given, *more, **named)

        monkeypatch.setattr(Target, function.__name__, noting)
    for said in SAID:
        wanted = cold_answer(chat, [*chat.messages, {"role": "user", "content": said}])
        rows.clear()
        chat.say(said)
        assert chat.last is not None
        assert chat.last.tokens == wanted
        asked, before = chat.last.arguments["input_ids"].shape[1], asked
        assert 0 < max(rows) <= asked - before + 1


@needs(5, 14)
def test_recurrent_states_resume_where_the_template_drops_reasoning():
    chat, seen = Conversation(*forgetful_chat(), system="import sys\n" * 20, **GREEDY), list[torch.Tensor]()

    def noting(ids, scores):
        seen.append(scores.clone())
        return scores

    for turn, said in enumerate(SAID):
        seen.clear()
        asked = [*chat.messages, {"role": "user", "content": said}]
        wanted = cold_answer(chat, asked, logits_processor=[noting])
        chat.say(said, logits_processor=[noting])
        assert chat.last is not None
        assert chat.last.tokens == wanted
        plain, ours = torch.cat(seen).chunk(2)
        torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-3)
        asked = chat.last.arguments["input_ids"].shape[1]
        assert turn == 0 or 0 < asked - chat.last.cached < 130 < asked
    assert chat.acceleration.fallback is None


def test_turn_reuses_the_longest_common_prefix(chat):
    """Prompt and answer of the previous turn except the last token, as far as the template repeats them."""
    for turn, said in enumerate(SAID):
        before, prompt = chat.last, chat._encoded([*chat.messages, {"role": "user", "content": said}]).tolist()
        chat.say(said, max_new_tokens=1 + 3 * turn)
        if before is not None:
            read = [*before.arguments["input_ids"][0].tolist(), *before.tokens[:-1]]
            same = (one == other for one, other in zip(read, prompt[:-1], strict=False))
            assert chat.last.cached == sum(itertools.takewhile(bool, same))


@pytest.mark.parametrize("length", range(1, 7))
def test_pieces_add_up_to_the_answer_wherever_it_ends(chat, length):
    """Even in the middle of a character."""
    tokens, pieces = chat.tokenizer("\u00e9\u20ac!")["input_ids"], []
    assert len(tokens) == 6
    prompt = len(chat._encoded([{"role": "user", "content": "a"}]))

    def say(ids, scores):
        begun = ids.shape[1] - prompt
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([tokens[begun]]), 0.0)

    answer = chat.say("a", pieces.append, max_new_tokens=length, logits_processor=[say])
    assert "".join(pieces) == answer == decoded(chat.tokenizer, tokens[:length])


def larger(module, inputs, output):
    return 1.5 * output


CHANGES: dict[str, Any] = {
    "weights": lambda model: model.model.layers[0].self_attn.k_proj.weight.mul_(0.5),
    "a buffer": lambda model: model.model.rotary_emb.inv_freq.mul_(0.5),
    "an attribute": lambda model: setattr(model.model.layers[0].input_layernorm, "variance_epsilon", 0.5),
    "a hook": lambda model: model.model.layers[0].register_forward_hook(larger),
    "another dtype": lambda model: model.double(),
    "weights, by their data": lambda model: model.model.layers[0].self_attn.k_proj.weight.data.mul_(0.5),
    "a column, by its data": lambda model: model.model.layers[0].mlp.down_proj.weight.data[:, 5].add_(20),
    "weights, by numpy": lambda model: model.model.norm.weight.detach().numpy().__imul__(0.5),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_model_reads_earlier_turns_again(chat, change):
    chat.say(SAID[0])
    with torch.no_grad():
        change(chat.model)
    assert_read_again(chat)


@pytest.mark.falls_back
def test_model_changed_by_a_processor_reads_earlier_turns_again(chat):
    weight = chat.model.model.layers[0].self_attn.k_proj.weight

    def change(ids, scores):
        weight.data.mul_(0.9)
        return scores

    chat.say(SAID[0])
    chat.say(SAID[0], logits_processor=[change])
    assert_read_again(chat)


def test_replaced_function_of_the_family_reads_earlier_turns_again(chat, monkeypatch):
    chat.say(SAID[0])
    rotate = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: rotate(q, 2 * k, cos, sin))
    assert_read_again(chat)


def test_variable_of_a_hook_changed_between_turns_reads_earlier_turns_again(chat):
    share, vector = 0.0, torch.zeros(32)
    chat.model.model.layers[0].register_forward_hook(lambda module, inputs, output: output + share * output.flip(-1))
    chat.model.model.layers[0].register_forward_hook(lambda module, inputs, output: output + vector)
    chat.say(SAID[0])
    share = 0.5
    assert_read_again(chat)
    chat.reset()
    chat.say(SAID[0])
    vector[3] = 1.0
    assert_read_again(chat)


def test_turn_under_autocast_does_not_share_a_cache_with_others(chat):
    chat.say(SAID[0])
    with torch.autocast("cpu", torch.bfloat16):
        chat.say(SAID[1])
        assert chat.last.cached == 0
    assert_read_again(chat)


def assert_read_again(chat):
    for turn, said in enumerate(SAID[1:3]):
        wanted = cold_answer(chat, [*chat.messages, {"role": "user", "content": said}])
        chat.say(said)
        assert chat.last.tokens == wanted
        assert (chat.last.cached > 0) == (turn > 0)


def test_reset_clears_the_messages_and_keeps_the_drafter():
    drafter = make_drafter("recycling:tree=8")
    chat = Conversation(ascii_llama(), chat_tokenizer(), drafter, system="import sys", **GREEDY)
    first = chat.say("add a, b")
    assert chat.messages[0] == {"role": "system", "content": "import sys"}
    chat.say("again")
    steps = chat.acceleration.total.steps
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "import sys"}]
    assert chat.last is None
    assert chat.say("add a, b") == first
    assert chat.last.cached == 0
    assert chat.acceleration.drafter is drafter
    assert chat.acceleration.total.steps > steps


def test_reproducible_answer_equals_that_of_a_new_conversation():
    """It does not use the prefix cache, whose states were rounded in other forward passes."""
    model, turns = ascii_llama().bfloat16(), []
    tokenizer, drafter = chat_tokenizer(), make_drafter("recycling", reproducible=True)
    chat = Conversation(model, tokenizer, drafter, **GREEDY)
    for said in SAID:
        new = Conversation(model, tokenizer, drafter, **GREEDY)
        new.messages = [*chat.messages]
        turns.append((chat.say(said), chat.last.cached))
        assert turns[-1] == (new.say(said), 0)


def test_interrupt_keeps_the_partial_answer(chat):
    """Raised by a custom criterion, which is called for every token. Without a token nothing is kept."""
    left = [1]

    def interrupting(ids, scores, **_):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return ids[:, -1] < 0

    chat.say("add a, b")
    before = [*chat.messages]
    for left[0] in (1, 20):
        assert chat.messages == before
        with pytest.raises(KeyboardInterrupt):
            chat.say("print it", max_new_tokens=100, stopping_criteria=StoppingCriteriaList([interrupting]))
    assert chat.last is not None
    assert chat.messages[-2:] == [
        {"role": "user", "content": "print it"},
        {"role": "assistant", "content": decoded(chat.tokenizer, chat.last.tokens)},
    ]
    assert 0 < len(chat.last.tokens) < 100
    wanted = cold_answer(chat, [*chat.messages, {"role": "user", "content": "again"}])
    chat.say("again")
    assert chat.last.tokens == wanted


def test_error_leaves_the_conversation_unchanged(chat):
    chat.say("add a, b")
    before, last = list(chat.messages), chat.last

    def fail(piece):
        raise OSError("the terminal is gone")

    with pytest.raises(OSError, match="gone"):
        chat.say("print it", fail)
    assert (chat.messages, chat.last) == (before, last)
    wanted = cold_answer(chat, [*before, {"role": "user", "content": "print it"}])
    chat.say("print it")
    assert chat.last is not None
    assert chat.last.tokens == wanted


@pytest.mark.parametrize("passes", [1, 2, 4])
def test_slots_of_a_failed_forward_pass_are_not_reused(chat, passes):
    """It fails between two layers, in the pass over the question or in a later one."""
    left = [0]

    def fail(*_):
        left[0] -= 1
        if not left[0]:
            raise MemoryError

    chat.model.model.layers[1].register_forward_pre_hook(own(fail))
    chat.say(SAID[0])
    left[0] = passes
    with pytest.raises(MemoryError):
        chat.say(SAID[1])
    for said in SAID[1:]:
        wanted = cold_answer(chat, [*chat.messages, {"role": "user", "content": said}])
        chat.say(said)
        assert chat.last.tokens == wanted
    assert chat.acceleration.fallback is None


def test_answer_ends_at_the_context_limit_and_the_next_turn_is_rejected():
    model = tiny.llama(vocab_size=300, max_position_embeddings=64)
    chat = Conversation(model, chat_tokenizer(), max_new_tokens=150, do_sample=False)
    chat.say("add a, b")
    assert chat.last is not None
    assert chat.last.arguments["input_ids"].shape[1] + len(chat.last.tokens) == 64
    before = list(chat.messages)
    with pytest.raises(ValueError, match=r"context of 64, got \d+; start a new one with reset\(\)"):
        chat.say("again")
    assert chat.messages == before
    chat.reset()
    assert chat.say("add a, b") == before[-1]["content"]


def test_prompt_must_be_shorter_than_the_context():
    chat = Conversation(tiny.llama(vocab_size=300), chat_tokenizer(), max_new_tokens=1)
    chat.say("add a, b")
    length = chat.last.arguments["input_ids"].shape[1]
    for context in (length, length + 1):
        model = tiny.llama(vocab_size=300, max_position_embeddings=context)
        chat = Conversation(model, chat_tokenizer(), max_new_tokens=9)
        if context == length:
            with pytest.raises(ValueError, match=f"context of {length}, got {length}; start a new one"):
                chat.say("add a, b")
        else:
            chat.say("add a, b")
            assert len(chat.last.tokens) == 1


def test_length_can_be_limited_by_other_arguments(chat):
    length = len(chat._encoded([{"role": "user", "content": "add a, b"}]))
    of_config = GenerationConfig(max_new_tokens=5, do_sample=False)
    for arguments in (
        {"max_new_tokens": None, "max_length": length + 5},
        {"max_length": length + 5},
        {"generation_config": of_config},
        {"generation_config": GenerationConfig(max_length=length + 5, do_sample=False)},
    ):
        chat.reset()
        chat.arguments = {"do_sample": False}
        chat.say("add a, b", **arguments)
        assert len(chat.last.tokens) == 5


def test_answer_ends_at_a_stop_string(chat):
    asked, wanted = {"role": "user", "content": "add a, b"}, chat.say("add a, b", max_new_tokens=40)
    stop = wanted[len(wanted) // 2]
    ended = cold_answer(chat, [asked], max_new_tokens=40, stop_strings=[stop], tokenizer=chat.tokenizer)
    chat.reset()
    assert chat.say("add a, b", max_new_tokens=40, stop_strings=[stop]) == decoded(chat.tokenizer, ended) != wanted


def test_several_answers_are_rejected(chat):
    with pytest.raises(ValueError, match="got 2"):
        chat.say("add a, b", num_return_sequences=2, do_sample=True)
    assert chat.messages == []


def test_tokenizer_needs_a_working_chat_template(model):
    with pytest.raises(ValueError, match="chat template"):
        Conversation(model, tiny.tokenizer())
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system message') }}"
    chat = Conversation(tiny.llama(vocab_size=300), tokenizer)
    with pytest.raises(ValueError, match="no system message"):
        chat.say("hi")
    assert chat.messages == []


def test_cache_of_the_caller_is_continued_as_in_generate(chat):
    """Its contents are used although the earlier turns are cached."""
    caches = [DynamicCache(config=chat.model.config) for _ in range(2)]
    for said in SAID[:2]:
        chat.say(said, past_key_values=caches[0])
        arguments = {**chat.last.arguments, "past_key_values": caches[1]}
        wanted = chat.model.generate(**arguments)[0, arguments["input_ids"].shape[1] :]
        assert chat.last.tokens == wanted.tolist()
        for cache in caches:
            for layer in cache.layers:
                layer.values.mul_(0.2)
