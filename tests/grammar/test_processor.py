"""The processor of `constrain` and its states, which share one matcher; outputs that must end."""

from __future__ import annotations

import copy
import json
import random

import numpy as np
import pytest
import torch
from support import tiny
from support.byte_grammars import END, admits, byte_tokenizer

import token_recycling as tr
from token_recycling.grammar import compile as compiling
from token_recycling.grammar.adapters import GrammarProcessor, state_of_grammar
from token_recycling.grammar.compile import compiled

SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 4}}, "required": ["a"]}


def allowed(mask):
    return np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()


def test_masks_equal_those_of_a_new_matcher():
    """States are visited in any order, including ends of sequences."""
    grammar, draw = compiled(byte_tokenizer(), "json_schema", SCHEMA), random.Random(0)
    places = [(state_of_grammar(grammar), list[int]())]
    for _ in range(400):
        state, path = draw.choice(places)
        fresh = grammar.pristine.deep_copy()
        fresh.consume_tokens(path)
        assert allowed(state.mask) == allowed(np.frombuffer(fresh.compute_bitmask(), np.uint8).view(np.int32))
        token = draw.choice(allowed(state.mask))
        after = state.after(token)
        assert (after is None) == (token == END)
        if after is not None:
            places.append((after, [*path, token]))


def test_escapes_do_not_bypass_property_names():
    schema = {
        "properties": {"a": {"type": "integer"}},
        "patternProperties": {"^b": {"type": "integer"}},
        "type": "object",
    }
    grammar = compiled(byte_tokenizer(), "json_schema", {**schema, "additionalProperties": True})
    assert admits(grammar, '{"c": "x"}')
    assert not admits(grammar, '{"\\u0061": "x"}')
    assert not admits(grammar, '{"\\u0062": "x"}')


def allowed_after(processor, tokens):
    """Return the tokens allowed after each prefix, with the calls that `generate` makes."""
    ids, scores = torch.tensor([[7, 7]]), torch.zeros(1, 300)
    follows = [processor(ids, scores).isfinite()[0].nonzero()[:, 0].tolist()]
    for token in tokens:
        ids = torch.cat([ids, torch.tensor([[token]])], 1)
        follows.append(processor(ids, scores).isfinite()[0].nonzero()[:, 0].tolist())
    return follows


def test_processor_constrains_one_sequence_until_its_end():
    grammar = compiled(byte_tokenizer(), "regex", "ab?")
    follows = allowed_after(GrammarProcessor(grammar), [*b"a", END])
    assert follows[:2] == [[97], [98, END]]
    assert len(follows[2]) == 300
    processor = GrammarProcessor(grammar)
    assert processor.first_state() is not None
    allowed_after(processor, [])
    assert processor.first_state() is None


@pytest.mark.parametrize(
    ("form", "tokens"),
    [(("grammar", 'root ::= root root | "a" | root root root'), b"a" * 30), (("regex", "ab"), b"x")],
    ids=["too complex", "forbidden token"],
)
def test_output_that_cannot_continue_ends(form, tokens, monkeypatch):
    monkeypatch.setattr(compiling, "MAX_AMBIGUITY", 20)
    assert allowed_after(GrammarProcessor(compiled(byte_tokenizer(), *form)), [*tokens])[-1] == [END]


def test_masks_do_not_depend_on_drafts():
    processor, other = (tr.constrain(tiny.tokenizer(), json_schema=SCHEMA) for _ in range(2))
    state, ids = processor.first_state(), torch.tensor([[5]])
    state.mask[:] = 0  # as if the matcher of drafts were in a wrong state
    for _ in range(8):
        scores = processor(ids, torch.zeros(1, 299))
        assert scores.equal(other(ids, torch.zeros(1, 299)))
        assert scores.isfinite().any()
        state.after(int(scores[0].argmin()))
        ids = torch.cat([ids, scores.argmax(dim=1)[None]], dim=1)


def change_eos_token(tokenizer):
    tokenizer.eos_token = "c"


def add_token(tokenizer):
    tokenizer.add_tokens(["abab"])


@pytest.mark.parametrize("change", [change_eos_token, add_token])
def test_changed_tokenizer_is_read_again(change):
    tokenizer = tiny.tokenizer()
    text = tokenizer.encode("ab", add_special_tokens=False)
    before = allowed_after(tr.constrain(tokenizer, regex="(ab)*"), text)
    change(tokenizer)
    after = allowed_after(tr.constrain(tokenizer, regex="(ab)*"), text)
    assert after == allowed_after(tr.constrain(copy.deepcopy(tokenizer), regex="(ab)*"), text) != before


def test_special_tokens_are_not_admitted_in_strings():
    grammar = compiled(byte_tokenizer("<|mark|>"), "json_schema", {"type": "string"})
    assert admits(grammar, json.dumps("a <|mark|> b"))
    assert not admits(grammar, json.dumps("a <|mark|> b"), special=("<|mark|>",))


def test_changed_end_token_of_a_model_is_read_again(loaded, monkeypatch):
    after = []
    for end in (97, 98, 97):
        monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", end)
        after.append(allowed_after(tr.constrain(loaded.model, regex="[cd]"), loaded.tokenizer.encode("c"))[-1])
    assert after == [[97], [98], [97]]
