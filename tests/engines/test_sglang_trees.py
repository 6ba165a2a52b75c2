"""Trees for SGLang, tested without SGLang: layout, masks, equal siblings, arguments."""

from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from token_recycling.engines.engine import EngineOptions, Replica
from token_recycling.engines.sglang import Trees, prepare_server_args

VOCABULARY, NODES = 12, 8


def request(prompt, said=(), grammar=None, custom_logit_processor=None, **parameters):
    """Return the fields of SGLang's request record that the adapter reads."""
    usual = {
        "logit_bias": None,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
    }
    return SimpleNamespace(
        origin_input_ids_unpadded=prompt if isinstance(prompt, CountingTokens) else array("q", prompt),
        output_ids=said if isinstance(said, CountingTokens) else array("q", said),
        grammar=grammar,
        custom_logit_processor=custom_logit_processor,
        sampling_params=SimpleNamespace(**{**usual, **parameters}),
    )


def trees_after(seed, rows):
    """Return trees of a matrix that has candidates after `rows` random tokens."""
    generator = torch.Generator().manual_seed(seed)
    recycler = Replica(VOCABULARY, NODES - 1, EngineOptions(k=3))
    known = torch.randperm(VOCABULARY, generator=generator)[:rows].numpy()
    contexts = np.full((rows, 3), -1)
    contexts[:, 0] = known
    recycler.learn_logits(contexts, torch.randn(rows, VOCABULARY, generator=generator) * 3)
    return Trees(recycler, NODES)


texts = st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12), min_size=1, max_size=4)


@given(texts, st.integers(0, VOCABULARY), st.integers(0, 9))
def test_masks_are_ordered_trees_with_distinct_siblings(prompts, rows, seed):
    drafted, masks = trees_after(seed, rows).grow([request(prompt) for prompt in prompts], [[] for _ in prompts])
    assert drafted.shape == (len(prompts) * NODES,)
    assert masks.dtype == bool
    for prompt, tokens, mask in zip(prompts, drafted.reshape(-1, NODES), masks.reshape(-1, NODES, NODES), strict=True):
        assert tokens[0] == prompt[-1], "the newest token is the root"
        assert not np.triu(mask, 1).any(), "parents precede children"
        assert mask.diagonal().all()
        above = [np.flatnonzero(mask[node, :node]) for node in range(NODES)]
        parents = [int(nodes[-1]) if len(nodes) else -1 for nodes in above]
        assert parents[1:] == [parent for parent in parents[1:] if parent >= 0], "there is one root"
        for node in range(1, NODES):
            assert np.array_equal(mask[node, :node], mask[parents[node], :node]), "a node attends to all ancestors"
        assert len({(parents[node], tokens[node]) for node in range(1, NODES)}) == NODES - 1, "siblings are distinct"


def test_rows_of_logits_are_learned_for_their_nodes():
    trees, said = trees_after(0, 0), torch.full((2 * NODES, VOCABULARY), -9.0)
    tokens, masks = trees.grow([request([3, 4]), request([7])], [[], [5]])
    assert tokens.tolist() == [4] * NODES + [5] * NODES, "padding nodes have a token"
    assert masks[:NODES].tolist() == [True] + [False] * (NODES - 1)
    said[0, 6] = said[NODES, 8] = 9.0
    trees.observe(said)
    matrix = trees.recycler.matrix
    assert matrix.look_up(4)[0][0] == 6
    assert matrix.look_up(3, 4)[0][0] == 6
    assert matrix.look_up(7, 5)[0][0] == 8, "accepted tokens that are not in the output yet are part of the context"
    assert matrix.filled.sum() == 2, "logits of padding nodes are not learned"


@pytest.mark.parametrize(
    "changed",
    [
        {"grammar": object()},
        {"custom_logit_processor": "a serialized class"},
        {"logit_bias": {"3": -100.0}},
        {"repetition_penalty": 1.2},
        {"min_new_tokens": 5},
    ],
)
def test_logits_changed_for_one_request_are_not_learned(changed):
    trees = trees_after(0, 0)
    trees.grow([request([3], **changed), request([7])], [[], []])
    said = torch.full((2 * NODES, VOCABULARY), -torch.inf)
    said[0, 6] = said[NODES, 8] = 9.0
    trees.observe(said)
    assert trees.recycler.matrix.filled.nonzero()[0].tolist() == [7]


def test_learned_candidates_are_drafted():
    trees = trees_after(1, VOCABULARY)
    tokens, masks = trees.grow([request([3], [5])], [[]])
    best = [token for token, _ in trees.recycler.matrix.look_up(5)]
    assert tokens[1] == best[0]
    assert masks.reshape(NODES, NODES)[:, 1:].sum() > NODES - 1, "more than a star"


class CountingTokens:
    """Tokens of a request that count reads."""

    def __init__(self, tokens=()):
        self.tokens, self.read = list(tokens), 0

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, place):
        found = self.tokens[place]
        self.read += len(found) if isinstance(place, slice) else 1
        return found


@pytest.mark.parametrize("overlap", [False, True])
def test_step_reads_only_the_new_tokens_of_a_request(overlap):
    """With overlap, tokens of a step are passed as accepted first, and are in the output a step later."""
    trees, prompt, output = trees_after(0, 0), CountingTokens(range(8)), CountingTokens()
    asked = request(prompt, output)
    for step in range(100):
        accepted = [step % 12, (step + 3) % 12]
        if not overlap:
            output.tokens += accepted
        tokens, _ = trees.grow([asked], [accepted if overlap else []])
        assert tokens[0] == accepted[-1]
        if overlap:
            output.tokens += accepted
    assert prompt.read + output.read < 2 * (8 + 200)


def test_request_whose_output_is_rolled_back_is_read_again():
    trees, asked = trees_after(0, 0), request([1, 2], [3, 4, 5])
    trees.grow([asked], [[]])
    asked.output_ids = array("q", [6])
    for _ in range(2):  # the second time, the request's output has not grown
        tokens, _ = trees.grow([asked], [[7]])
        assert tokens[0] == 7
    assert asked.token_recycling_tokens.tokens.tolist() == [1, 2, 6, 7]


def server_arguments(**given_arguments):
    known = {
        "device": "cuda",
        "enable_dp_attention": False,
        "page_size": 1,
        "attention_backend": "triton",
        "max_running_requests": None,
        "speculative_num_draft_tokens": None,
    }
    return SimpleNamespace(**{**known, **given_arguments})


def test_arguments_are_set_as_ngram_requires():
    settled = server_arguments(speculative_num_draft_tokens=24, page_size=64, attention_backend="flashinfer")
    prepare_server_args(settled)
    assert (settled.speculative_num_draft_tokens, settled.speculative_eagle_topk) == (24, 23)
    assert settled.enable_mixed_chunk is False
    plain = server_arguments()
    prepare_server_args(plain)
    assert (plain.speculative_num_draft_tokens, plain.max_running_requests) == (16, 48)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": "cpu"}, "cpu"),
        ({"enable_dp_attention": True}, "dp-attention"),
        ({"page_size": 64}, "page_size 64"),
        ({"speculative_num_draft_tokens": 1}, "got 1"),
        ("{", "must be JSON"),
        ('{"n": 1}', "'n'|option n"),
    ],
)
def test_invalid_arguments_are_refused_at_start(given, message, monkeypatch):
    """Server arguments, and options of this package in the environment."""
    if isinstance(given, str):
        monkeypatch.setenv("TOKEN_RECYCLING", given)
    with pytest.raises(ValueError, match=message):
        prepare_server_args(server_arguments(**({} if isinstance(given, str) else given)))
