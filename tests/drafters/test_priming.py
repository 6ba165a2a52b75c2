"""Priming: the rows are the model's own answers after every single token, asked once a model."""

import numpy as np
import pytest
import torch
from support import tiny

from token_recycling import MatrixFileError
from token_recycling.drafters.recycling.priming import prime, primed_file
from token_recycling.model.inspection import weights_fingerprint
from token_recycling.model.tree_model import TreeModel
from token_recycling.recycling.ngram_matrix import FULL, NgramMatrix
from token_recycling.recycling.ngrams import ABSENT

BEGIN = 9


def asked_of(model):
    """A list to which every batch that the model is shown from now on is added."""
    batches = []

    def note(_, args, kwargs):
        batches.append(kwargs["input_ids"])

    model.register_forward_pre_hook(note, with_kwargs=True)
    return batches


def primed(model, k=3, orders=2):
    matrix = NgramMatrix(TreeModel(model).vocab_size, k, orders, memory=0.01)
    prime(matrix, TreeModel(model))
    return matrix


def same_rows(matrix, model, texts):
    """Whether each row is the model's own top-k after a text (tokens, length), one pass each."""
    for row, text in enumerate(texts):
        with torch.no_grad():
            best = model(input_ids=text[None]).logits[0, -1].softmax(-1).topk(matrix.k)
        assert matrix.candidates[row].tolist() == best.indices.tolist()
        np.testing.assert_allclose(matrix.shares[row] / FULL, best.values.numpy(), atol=2e-5)


def test_rows_are_the_models_candidates_after_a_token_alone(model):
    matrix = primed(model)
    assert matrix.filled.all()
    same_rows(matrix, model, torch.arange(64)[:, None])
    assert matrix.ngrams == 0


def test_rows_are_the_models_candidates_after_the_start_token():
    model = tiny.llama(context=1, bos_token_id=BEGIN)
    matrix = primed(model)
    same_rows(matrix, model, torch.tensor([[BEGIN, token] for token in range(64)]))
    alone = primed(tiny.llama(context=1))
    assert (matrix.candidates != alone.candidates).any(), "the start token makes a difference"


def test_what_was_learned_before_is_kept(model):
    matrix = NgramMatrix(64, 3, 2, memory=0.01)
    row = np.array([[50, 51, 52]], np.int32), np.array([[0.5, 0.25, 0.125]], np.float32)
    matrix.learn(np.array([[7, ABSENT]]), *row)
    prime(matrix, TreeModel(model))
    assert matrix.candidates[7].tolist() == [50, 51, 52]
    np.testing.assert_allclose(matrix.shares[7] / FULL, row[1][0], atol=2e-5)
    others = np.arange(64) != 7
    np.testing.assert_array_equal(matrix.candidates[others], primed(model).candidates[others])
    # What this matrix knew is no part of the file, which other matrices read.
    assert primed(model).candidates[7].tolist() != [50, 51, 52]


def test_the_model_is_asked_once(model, own_cache):
    asked = asked_of(model)
    first = primed(model)
    assert torch.cat(asked).tolist() == [[token] for token in range(64)]
    assert [path.parent.name for path in own_cache.rglob("*.safetensors")] == ["primed"]
    asked.clear()
    again = primed(model)
    assert asked == []
    np.testing.assert_array_equal(again.candidates, first.candidates)
    np.testing.assert_array_equal(again.shares, first.shares)
    # The same weights loaded again are the same model; the rows of another k are asked for.
    primed(tiny.llama())
    assert len(list(own_cache.rglob("*.safetensors"))) == 1
    primed(model, k=4)
    assert len(asked) == 1


def test_big_vocabularies_are_asked_in_pieces(model, monkeypatch):
    whole = primed(model)
    primed_file(model, 3).unlink()
    monkeypatch.setattr("token_recycling.drafters.recycling.priming._LOGITS_AT_ONCE", 64 * 10)
    asked = asked_of(model)
    pieces = primed(model)
    assert [len(ids) for ids in asked] == [10] * 6 + [4]
    np.testing.assert_array_equal(pieces.candidates, whole.candidates)


def change_a_weight(model):
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1.01)


@pytest.mark.parametrize(
    "change",
    [
        change_a_weight,
        lambda model: model.to(torch.bfloat16),
        lambda model: setattr(model.config, "bos_token_id", BEGIN),
        lambda model: setattr(model.config, "rms_norm_eps", 0.1),
    ],
    ids=["weights", "type", "start token", "configuration"],
)
def test_the_file_of_another_model_is_not_used(model, change, own_cache):
    primed(model)
    before = weights_fingerprint(model)
    change(model)
    assert weights_fingerprint(model) != before
    matrix = primed(model)
    assert len(list(own_cache.rglob("*.safetensors"))) == 2
    if model.dtype == torch.float32:
        begin = [] if model.config.bos_token_id is None else [BEGIN]
        same_rows(matrix, model, torch.tensor([[*begin, token] for token in range(64)]))


def test_where_a_model_was_loaded_from_does_not_matter(model):
    before = weights_fingerprint(model)
    model.config._name_or_path = "elsewhere"
    assert weights_fingerprint(model) == before


def test_a_damaged_file_is_refused(model):
    primed(model)
    path = primed_file(model, 3)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(MatrixFileError, match=r"cannot be read .*; delete it to start anew"):
        primed(model)


def test_ids_that_cannot_be_shown_stay_empty(model):
    """64 logits, 60 embedded ids: four rows have no answer."""
    model.model.embed_tokens = torch.nn.Embedding(60, 32)
    matrix = primed(model)
    assert matrix.filled.tolist() == [token < 60 for token in range(64)]
