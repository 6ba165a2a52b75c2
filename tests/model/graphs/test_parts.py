"""Parts of a step in tensors of fixed shapes, each against its eager counterpart or values computed by hand."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import strategies, tiny
from torch.testing import assert_close
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as warpers
from transformers.generation.stopping_criteria import MaxLengthCriteria

from token_recycling import Draft, Template
from token_recycling._util.topk import grouped_topk
from token_recycling.loop.accept import TreeSteps, accept_walk
from token_recycling.loop.processors import penalize
from token_recycling.loop.request import TokenSelector, TokenSequence
from token_recycling.model.architectures import Reach
from token_recycling.model.frames import ROWS, band_of, batch_of, rows_of, tree_masks
from token_recycling.model.graphs.passes import CapturedPasses
from token_recycling.model.prefill import prefill
from token_recycling.model.target import Target
from token_recycling.trees.packed import PADDING, send

CPU = torch.device("cpu")


def test_bands_grow_by_at_most_a_factor_of_two():
    bands = sorted({band_of(slots) for slots in range(1, 9000)})
    assert bands == [1024, 2048, 3072, 4096, 6144, 8192, 12288]
    assert all(band_of(slots) >= slots > band_of(slots) / 2 for slots in range(600, 9000))
    assert all(band_of(band) == band for band in bands)


def test_buckets_are_the_next_larger_sizes():
    assert [rows_of(nodes) for nodes in (1, 2, 8, 9, 81, 256, 257, 600)] == [1, 8, 8, 16, 96, 256, 512, 768]
    assert all(rows_of(bucket) == bucket for bucket in ROWS)
    assert [batch_of(sequences) for sequences in (1, 2, 3, 32, 33)] == [1, 2, 4, 32, 64]


@given(st.lists(strategies.drafts(), min_size=1, max_size=3), st.integers(0, 5))
def test_packing_preserves_drafts_and_hides_padding(drafts, more):
    n = max(len(draft) for draft in drafts) + more
    trees = send(drafts, range(5, 5 + len(drafts)), n, CPU)
    assert trees.lengths.tolist() == list(range(5, 5 + len(drafts)))
    for row, draft in enumerate(drafts):
        own = len(draft)
        assert trees.tokens[row].tolist() == [*draft.tokens.tolist(), *[PADDING] * (n - own)]
        assert trees.parents[row, :own].tolist() == [0, *draft.parents[1:].tolist()]
        assert trees.depths[row].tolist() == [*draft.depths.tolist(), *[0] * (n - own)]
        assert torch.equal(trees.ancestors[row, :own, :own], torch.from_numpy(draft.ancestors))
        assert torch.equal(trees.ancestors[row, own:], torch.eye(n, dtype=torch.bool)[own:])
        assert not trees.ancestors[row, :own, own:].any()


@pytest.mark.parametrize("length", [0, 3, 9])
def test_masks_equal_eager_ones_and_hide_unused_slots(model, length):
    tree, target = Template.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)]), Target(model)
    drafts = [Draft(np.zeros(len(tree)), tree.parents)]
    wanted = target.inputs.of(drafts, [length], length).mask
    trees = send(drafts, [length], len(tree), CPU)
    made = tree_masks({"full": Reach()}, trees, 24, torch.float32)
    assert torch.equal(made[..., : length + len(tree)], wanted)
    assert (made[..., length + len(tree) :] == torch.finfo(torch.float32).min).all()


def test_windows_count_positions_not_slots():
    drafts = [Draft(np.zeros(4), [-1, 0, 0, 1])]
    made = tree_masks({"sliding": Reach("sliding", 3)}, send(drafts, [5], 4, CPU), 12, torch.float32)
    seen = (made[0, 0] == 0).nonzero().tolist()
    # The root is at position 5 and sees 3 to 5; nodes 1 and 2 are at 6, node 3 at 7.
    by_node = [[slot for node, slot in seen if node == one] for one in range(4)]
    assert by_node == [[3, 4, 5], [4, 5, 6], [4, 5, 7], [5, 6, 8]]


@given(st.lists(strategies.drafts(distinct_siblings=True), min_size=1, max_size=3), st.integers(0, 2**32 - 1))
def test_batched_acceptance_equals_a_walk_per_sequence(drafts, seed):
    """With any padding; candidates come from each draft's own logits."""
    numbers = torch.Generator().manual_seed(seed)
    n = max(len(draft) for draft in drafts) + seed % 6
    logits = torch.rand(len(drafts), n, 16, generator=numbers)
    found = TreeSteps(drafts, logits, send(drafts, [0] * len(drafts), n, CPU), logits.argmax(dim=-1), k=2)
    for row, draft in enumerate(drafts):
        own = logits[row, : len(draft)]
        wanted = accept_walk(draft, own, lambda token: False, lambda scores: int(scores.argmax()))
        step = found.step(row, lambda token: False)
        assert (step.accepted, step.tokens) == (wanted.accepted, wanted.tokens)
        assert torch.equal(step.logits, own)
        ids, shares = step.top(2)
        assert (ids == own.topk(2).indices.numpy()).all()
        assert_close(torch.from_numpy(shares), own.softmax(-1).topk(2).values)


PROCESSORS = [[], [warpers.TemperatureLogitsWarper(0.7), warpers.TopKLogitsWarper(9), warpers.TopPLogitsWarper(0.8)]]


@given(strategies.drafts(distinct_siblings=True), st.sampled_from(PROCESSORS), st.integers(0, 2**32 - 1), st.booleans())
def test_sampling_at_all_nodes_equals_a_walk(draft, processors, seed, again):
    """Both give the same tokens for the same random numbers. Numbers used beyond the path, or by a pass that is
    repeated (`again`), are returned to the generator.
    """
    logits = 3 * torch.rand(1, len(draft), 16, generator=torch.Generator().manual_seed(seed))
    trees, steps, states = send([draft], [0], len(draft), CPU), [], []
    for all_nodes in (True, False):
        numbers = torch.Generator().manual_seed(seed)
        sequence = TokenSequence(torch.zeros(1, dtype=torch.long), StoppingCriteriaList([MaxLengthCriteria(99)]))
        selector = TokenSelector(sequence, LogitsProcessorList(processors), sample=True, generator=numbers)
        if all_nodes:
            if again:
                selector.every_node(-logits[0], trees, draft.depth)
            choices = selector.every_node(logits[0], trees, draft.depth)
            steps.append(TreeSteps([draft], logits, trees, choices[None]).step(0, lambda token: token == 7))
            selector.sampled(len(steps[0].tokens))
        else:
            steps.append(accept_walk(draft, logits[0], lambda token: token == 7, selector))
        states.append(numbers.get_state())
    assert steps[0].tokens == steps[1].tokens
    assert steps[0].accepted == steps[1].accepted
    assert torch.equal(*states)


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_sampling_from_nan_fails_only_if_the_node_is_reached(at):
    """As in a walk: earlier tokens are emitted, and nothing fails if the sequence ends before the node."""
    draft, logits = Draft.chain([1, 2, 3, 4]), torch.zeros(1, 4, 8)
    logits[0, [0, 1, 2, 3], [2, 3, 4, 5]] = 99
    logits[0, at] = torch.nan
    trees = send([draft], [0], 4, CPU)
    for end in (2, 3, 4, 7):
        found = []
        for all_nodes in (True, False):
            sequence = TokenSequence(torch.zeros(1, dtype=torch.long), StoppingCriteriaList([MaxLengthCriteria(99)]))
            selector = TokenSelector(sequence, LogitsProcessorList(), sample=True)
            path, emitted = [], []

            def append(token, emitted=emitted, end=end):
                emitted.append(token)
                return token == end

            step = None
            with pytest.raises(RuntimeError, match="nan") if end > 1 + at else nullcontext():
                if all_nodes:
                    choices = selector.every_node(logits[0], trees, 3)
                    step = TreeSteps([draft], logits, trees, choices[None]).step(0, append, path)
                else:
                    step = accept_walk(draft, logits[0], append, selector, 0, path)
            found.append((emitted, step and (step.accepted, step.tokens, step.finished), path[: len(emitted)]))
        assert found[0] == found[1]
        assert found[0][0] == [*range(2, min(end, 1 + at) + 1)]


@given(strategies.drafts(vocab_size=9), st.integers(0, 2**32 - 1))
def test_repetition_penalty_at_every_node_equals_transformers(draft, seed):
    numbers = torch.Generator().manual_seed(seed)
    n, before = len(draft), torch.randint(0, 9, (5,), generator=numbers)
    logits = torch.randn(1, n, 9, generator=numbers)
    penalty = warpers.RepetitionPenaltyLogitsProcessor(1.7)
    made = penalize(
        penalty, logits[0], torch.cat([before, torch.from_numpy(draft.tokens[:1])]), send([draft], [5], n, CPU)
    )
    for node, lineage in enumerate(draft.lineages):
        path = torch.cat([before, torch.from_numpy(draft.tokens[list(lineage)])])
        assert torch.equal(made[node], penalty(path[None], logits[:, node])[0])


@pytest.mark.parametrize("vocabulary", [5, 64, 640, 1000, 1024])
def test_grouped_topk_equals_topk(vocabulary):
    logits = torch.randn(7, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    for k in (1, 5):
        values, ids = grouped_topk(logits, k)
        wanted = logits.topk(k)
        assert torch.equal(values, wanted.values)
        assert torch.equal(ids, wanted.indices)


@pytest.mark.parametrize("lengths", [[9], [9, 5]])
def test_cache_round_trip_through_captured_slots(model, lengths):
    target, texts = Target(model), [tiny.prompt(row, length)[0] for row, length in enumerate(lengths)]
    given, wanted = target.new_cache(), target.new_cache()
    prefill(target, [text[: min(lengths) - 2] for text in texts], given)
    prefill(target, texts, wanted)
    passes, cached = CapturedPasses(target), [length - 1 for length in lengths]
    passes.begin(target, wanted, cached, 32)
    given.take(passes.slots, 0, cached)
    for own, theirs in zip(given.layers, wanted.layers, strict=True):
        for row, length in enumerate(lengths):
            assert_close(own.keys[row, :, : length - 1], theirs.keys[row, :, : length - 1])
            assert_close(own.values[row, :, : length - 1], theirs.values[row, :, : length - 1])
