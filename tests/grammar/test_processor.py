"""The processor of `constrain` and its states: one matcher that goes from place to place, and outputs that must end."""

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


def test_masks_are_those_of_a_matcher_that_went_straight():
    """Places are visited in any order, ends of sequences too."""
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


def test_names_are_not_disguised_by_escapes():
    schema = {
        "properties": {"a": {"type": "integer"}},
        "patternProperties": {"^b": {"type": "integer"}},
        "type": "object",
    }
    grammar = compiled(byte_tokenizer(), "json_schema", {**schema, "additionalProperties": True})
    assert admits(grammar, '{"c": "x"}')
    assert not admits(grammar, '{"\\u0061": "x"}')
    assert not admits(grammar, '{"\\u0062": "x"}')


def output(processor, tokens):
    """What may follow each prefix of tokens, as `generate` asks."""
    ids, scores = torch.tensor([[7, 7]]), torch.zeros(1, 300)
    follows = [processor(ids, scores).isfinite()[0].nonzero()[:, 0].tolist()]
    for token in tokens:
        ids = torch.cat([ids, torch.tensor([[token]])], 1)
        follows.append(processor(ids, scores).isfinite()[0].nonzero()[:, 0].tolist())
    return follows


def test_a_processor_holds_one_sequence_and_lets_go_after_its_end():
    grammar = compiled(byte_tokenizer(), "regex", "ab?")
    follows = output(GrammarProcessor(grammar), [*b"a", END])
    assert follows[:2] == [[97], [98, END]]
    assert len(follows[2]) == 300
    processor = GrammarProcessor(grammar)
    assert processor.first_state() is not None
    output(processor, [])
    assert processor.first_state() is None


@pytest.mark.parametrize(
    ("form", "tokens"),
    [(("grammar", 'root ::= root root | "a" | root root root'), b"a" * 30), (("regex", "ab"), b"x")],
    ids=["too complex", "a token that is not allowed"],
)
def test_an_output_that_cannot_go_on_ends(form, tokens, monkeypatch):
    monkeypatch.setattr(compiling, "MAX_AMBIGUITY", 20)
    assert output(GrammarProcessor(compiled(byte_tokenizer(), *form)), [*tokens])[-1] == [END]


def test_masks_are_those_of_the_output_whatever_was_drafted():
    processor, other = (tr.constrain(tiny.tokenizer(), json_schema=SCHEMA) for _ in range(2))
    state, ids = processor.first_state(), torch.tensor([[5]])
    state.mask[:] = 0  # as if the matcher of drafts had lost its place
    for _ in range(8):
        scores = processor(ids, torch.zeros(1, 299))
        assert scores.equal(other(ids, torch.zeros(1, 299)))
        assert scores.isfinite().any()
        state.after(int(scores[0].argmin()))
        ids = torch.cat([ids, scores.argmax(dim=1)[None]], dim=1)


def another_end(tokenizer):
    tokenizer.eos_token = "c"


def another_token(tokenizer):
    tokenizer.add_tokens(["abab"])


@pytest.mark.parametrize("change", [another_end, another_token])
def test_a_tokenizer_that_changes_is_read_again(change):
    tokenizer = tiny.tokenizer()
    text = tokenizer.encode("ab", add_special_tokens=False)
    before = output(tr.constrain(tokenizer, regex="(ab)*"), text)
    change(tokenizer)
    after = output(tr.constrain(tokenizer, regex="(ab)*"), text)
    assert after == output(tr.constrain(copy.deepcopy(tokenizer), regex="(ab)*"), text) != before


def test_special_tokens_are_in_no_string():
    grammar = compiled(byte_tokenizer("<|mark|>"), "json_schema", {"type": "string"})
    assert admits(grammar, json.dumps("a <|mark|> b"))
    assert not admits(grammar, json.dumps("a <|mark|> b"), special=("<|mark|>",))
