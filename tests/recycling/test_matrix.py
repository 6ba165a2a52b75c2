"""The adjacency matrix of the published method: updates and drafts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import trees

from token_recycling import Template
from token_recycling.drafters.published import AdjacencyMatrix


def rows(count, k, vocab_size, seed=0):
    return torch.randint(0, vocab_size, (count, k), generator=torch.Generator().manual_seed(seed))


def test_look_up_returns_written_rows():
    matrix = AdjacencyMatrix(10, 3)
    matrix.update(torch.tensor([4, 7]), torch.tensor([[1, 2, 3], [9, 8, 0]]))
    found = matrix.look_up(torch.tensor([7, 4, 4, 0]), torch.tensor([0, 2, 0, 1]))
    assert found.tolist() == [9, 3, 1, 0]
    assert found.dtype == torch.int64
    assert matrix.filled.nonzero().flatten().tolist() == [4, 7]
    matrix.update(torch.tensor([4, 2, 4]), torch.tensor([[1, 2, 0], [3, 4, 0], [5, 6, 0]]), "unordered")
    assert matrix.candidates[4].tolist() in ([1, 2, 0], [5, 6, 0])
    assert matrix.candidates[2].tolist() == [3, 4, 0]
    assert AdjacencyMatrix(32_000, 8).nbytes == 32_001 * 8 * 4
    for vocab_size, k in ((0, 1), (8, 0), (8, 9)):
        with pytest.raises(ValueError, match="got vocabulary"):
            AdjacencyMatrix(vocab_size, k)


@pytest.mark.parametrize("update", [AdjacencyMatrix.update, AdjacencyMatrix.write], ids=["cpu", "accelerator"])
@pytest.mark.parametrize("rule", ["last", "first"])
@pytest.mark.parametrize("count", [1, 256, 257, 700])
def test_the_same_row_wins_for_any_number_of_updates(update, rule, count):
    vocab_size, k = 50, 4
    tokens = rows(count, 1, vocab_size, seed=count)[:, 0]
    candidates = torch.arange(count * k).view(count, k)
    wanted = torch.zeros(vocab_size, k, dtype=torch.int32)
    order = range(count) if rule == "last" else reversed(range(count))
    for place in order:
        wanted[tokens[place]] = candidates[place].int()
    matrix = AdjacencyMatrix(vocab_size, k)
    update(matrix, tokens, candidates, rule)
    assert torch.equal(matrix.candidates, wanted)


@given(trees(), st.integers(0, 10**6))
def test_nodes_are_filled_with_their_parents_candidates(tree, seed):
    """Node by node on a CPU, layer by layer on an accelerator; the tokens are the same."""
    matrix = AdjacencyMatrix(30, 24)
    matrix.candidates.copy_(rows(30, 24, 30, seed))
    wanted = [seed % 30]
    for parent, rank in zip(tree.parents[1:], tree.ranks[1:], strict=True):
        wanted.append(int(matrix.candidates[wanted[parent], rank]))
    for fill in (matrix.fill, matrix.fill_by_layers):
        tokens = fill(tree, torch.tensor([seed % 30]))
        assert tokens.tolist() == wanted
        assert tokens.dtype == torch.int64


def test_ids_beyond_the_vocabulary_share_one_row():
    """Such ids have an embedding but no logit: prompts may contain them, candidates never do."""
    tree, root = Template.from_paths([(0,), (1,), (0, 0)]), torch.tensor([12])
    for update in (AdjacencyMatrix.update, AdjacencyMatrix.write):
        matrix = AdjacencyMatrix(10, 2)
        update(matrix, torch.tensor([11, 3]), torch.tensor([[3, 4], [5, 6]]))
        assert matrix.candidates[9].tolist() == [0, 0]
        assert matrix.fill(tree, root).tolist() == matrix.fill_by_layers(tree, root).tolist() == [12, 3, 4, 5]
