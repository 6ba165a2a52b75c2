"""All supported kinds of tokenizers: outputs of random allowed tokens are JSON of the schema."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from support import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from token_recycling.grammar.adapters import state_of_grammar
from token_recycling.grammar.compile import compiled
from token_recycling.grammar.vocabulary import special_tokens, vocabulary

TEXTS = ['hello world {"name": "x", "age": 12} é ü 中文 '] * 3
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 20}},
    "required": ["name", "age"],
}


def fast(tokenizer, trainer):
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def sentencepiece_with_bytes():
    return tiny.sentencepiece_tokenizer(TEXTS)


def sentencepiece_bpe():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return fast(tokenizer, trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "</s>"]))


def sentencepiece_unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    return fast(tokenizer, trainer)


def byte_level():
    return tiny.tokenizer()


@pytest.mark.parametrize("make", [byte_level, sentencepiece_with_bytes, sentencepiece_bpe, sentencepiece_unigram])
def test_outputs_of_every_tokenizer_are_json_of_the_schema(make):
    tokenizer = make()
    stop = tokenizer.eos_token_id or 0
    added = tokenizer.added_tokens_decoder.items()
    other = next((number for number, token in added if token.special and number != stop), 1)
    size = len(tokenizer) + 5
    known = vocabulary(tokenizer, size, [stop, other, size - 1])
    grammar = compiled(known, "json_schema", SCHEMA)
    assert grammar.stops == (stop, other)  # the tokenizer does not know the last one
    with pytest.raises(ValueError, match="no output except the empty one"):
        compiled(known, "regex", "")
    texts = ('{"name": "x", "age": 1}', '{"name": "x", "age": 1}\N{SNOWMAN}')
    assert [grammar.admits(known, text) for text in texts] == [True, False]
    assert vocabulary(tokenizer, 9, stop).vocab_size == len(tokenizer), (
        "some tokenizers have more tokens than their model"
    )
    special = {*special_tokens(tokenizer, known).values()} - {*grammar.stops}
    ends = set()
    for seed in range(8):
        state, draw, tokens = state_of_grammar(grammar), random.Random(seed), list[int]()
        while state is not None:
            (allowed,) = np.unpackbits(state.mask.view(np.uint8), bitorder="little").nonzero()
            assert not special & {*allowed.tolist()}
            tokens.append(int(draw.choice(allowed)))
            state = state.after(tokens[-1])
        ends.add(tokens.pop())
        value = json.loads(tokenizer.decode(tokens))
        assert 0 <= value["age"] <= 20
        assert len(value["name"]) <= 5
    assert ends == {*grammar.stops}


def test_tokenizer_without_byte_representation_is_refused():
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.decoder = decoders.WordPiece()
    pieces = fast(tokenizer, trainers.WordPieceTrainer(vocab_size=60, special_tokens=["<unk>", "</s>"]))
    with pytest.raises(ValueError, match="WordPiece"):
        vocabulary(pieces, 60, 1)


def test_tokenizer_of_another_library_is_refused():
    class Slow(PreTrainedTokenizerBase):
        pass

    with pytest.raises(ValueError, match="got Slow"):
        vocabulary(Slow(), 60, 1)


@pytest.mark.parametrize("stop", [None, [], 10_000])
def test_model_without_eos_token_is_refused(stop):
    with pytest.raises(ValueError, match="end-of-sequence"):
        vocabulary(tiny.tokenizer(), 300, stop)
