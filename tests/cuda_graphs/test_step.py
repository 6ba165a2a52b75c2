"""The parts of a fast step, each against what the ordinary way does or against numbers worked out by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest
from support import strategies, tiny
from torch.testing import assert_close
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as warpers
from transformers.generation.stopping_criteria import MaxLengthCriteria

from token_recycling import Draft, Tree
from token_recycling._util.topk import grouped_topk
from token_recycling.cuda_graphs.noise import _GAMMA, _mixed, gumbel
from token_recycling.cuda_graphs.runner import StepRunner
from token_recycling.cuda_graphs.step import Choice, Report, StepPlan, _move
from token_recycling.loop.accept import TreeSteps, accept_walk
from token_recycling.loop.state import Sequence, TokenSelector
from token_recycling.model.architectures import Reach
from token_recycling.model.kv_cache import TreeCache
from token_recycling.model.prefill import prefill
from token_recycling.model.tree_model import ROWS, TreeModel, band_of, batch_of, rows_of, tree_masks
from token_recycling.trees.packed import PADDING, send
from token_recycling.trees.templates import root_only


def chosen(choice, logits):
    """The choice (n,) after each row of logits (n, vocabulary), each at a place of its own."""
    n = len(logits)
    drafts = [Draft(root_only(), torch.zeros(1, dtype=torch.long))] * n
    trees = send(drafts, range(n), 1, CPU)
    scores = choice.scores(logits[:, None], trees, None)
    return choice.tokens(scores, trees, SEED.expand(n), 1)[:, 0]


SEED = torch.tensor([12345])
CPU = torch.device("cpu")


def test_bands_grow_by_a_half_or_a_third_and_hold_what_is_needed():
    bands = sorted({band_of(slots) for slots in range(1, 9000)})
    assert bands == [1024, 2048, 3072, 4096, 6144, 8192, 12288]
    assert all(band_of(slots) >= slots > band_of(slots) / 2 for slots in range(600, 9000))
    assert all(band_of(band) == band for band in bands)


def test_buckets_hold_what_is_needed():
    assert [rows_of(nodes) for nodes in (1, 2, 8, 9, 81, 256, 257, 600)] == [1, 8, 8, 16, 96, 256, 512, 768]
    assert all(rows_of(bucket) == bucket for bucket in ROWS)
    assert [batch_of(sequences) for sequences in (1, 2, 3, 32, 33)] == [1, 2, 4, 32, None]


@given(st.lists(strategies.drafts(), min_size=1, max_size=3), st.integers(0, 5))
def test_packed_drafts_are_what_they_were_and_padding_is_seen_by_nobody(drafts, more):
    n = max(len(draft.tree) for draft in drafts) + more
    trees = send(drafts, range(5, 5 + len(drafts)), n, CPU)
    assert trees.lengths.tolist() == list(range(5, 5 + len(drafts)))
    for row, draft in enumerate(drafts):
        own, shape = len(draft.tree), draft.tree.on(CPU)
        assert trees.tokens[row].tolist() == [*draft.tokens.tolist(), *[PADDING] * (n - own)]
        assert torch.equal(trees.parents[row, :own], shape.parents)
        assert torch.equal(trees.depths[row], torch.nn.functional.pad(shape.depths, (0, n - own)))
        assert torch.equal(trees.ancestors[row, :own, :own], shape.ancestors)
        assert torch.equal(trees.ancestors[row, own:], torch.eye(n, dtype=torch.bool)[own:])
        assert not trees.ancestors[row, :own, own:].any()


@pytest.mark.parametrize("length", [0, 3, 9])
def test_masks_are_those_of_the_ordinary_way_with_nothing_behind(model, length):
    tree, target = Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)]), TreeModel(model)
    drafts = [Draft(tree, torch.zeros(len(tree), dtype=torch.long))]
    wanted = target.inputs.of(drafts, [length], length)["attention_mask"]
    trees = send(drafts, [length], len(tree), CPU)
    made = tree_masks({"full": Reach()}, trees, trees.lengths[:, None], 24, torch.float32)
    assert torch.equal(made[..., : length + len(tree)], wanted)
    assert (made[..., length + len(tree) :] == torch.finfo(torch.float32).min).all()


def test_windows_are_counted_in_positions():
    drafts = [Draft(Tree.from_paths([(0,), (1,), (0, 0)]), torch.zeros(4, dtype=torch.long))]
    made = tree_masks({"sliding": Reach("sliding", 3)}, send(drafts, [5], 4, CPU), 5, 12, torch.float32)
    seen = (made[0, 0] == 0).nonzero().tolist()
    # The root is at position 5 and sees 3 to 5; nodes 1 and 2 are at 6, node 3 at 7.
    by_node = [[slot for node, slot in seen if node == one] for one in range(4)]
    assert by_node == [[3, 4, 5], [4, 5, 6], [4, 5, 7], [5, 6, 8]]


@given(st.lists(strategies.drafts(distinct_siblings=True), min_size=1, max_size=3), st.integers(0, 2**32 - 1))
def test_acceptance_of_a_batch_is_that_of_each_walk(drafts, seed):
    """Whatever trees are filled up to; candidates are those of each draft's own logits."""
    numbers = torch.Generator().manual_seed(seed)
    n = max(len(draft.tree) for draft in drafts) + seed % 6
    logits = torch.rand(len(drafts), n, 16, generator=numbers)
    found = TreeSteps(drafts, logits, send(drafts, [0] * len(drafts), n, CPU), logits.argmax(dim=-1), k=2)
    for row, draft in enumerate(drafts):
        own = logits[row, : len(draft.tree)]
        wanted = accept_walk(draft, own, lambda token: False, lambda scores: int(scores.argmax()))
        step = found.step(row, lambda token: False)
        assert (step.accepted, step.tokens) == (wanted.accepted, wanted.tokens)
        assert torch.equal(step.logits, own)
        ids, shares = step.top(2)
        assert (ids == own.topk(2).indices.numpy()).all()
        assert_close(torch.from_numpy(shares), own.softmax(-1).topk(2).values)


PROCESSORS = [[], [warpers.TemperatureLogitsWarper(0.7), warpers.TopKLogitsWarper(9), warpers.TopPLogitsWarper(0.8)]]


@given(strategies.drafts(distinct_siblings=True), st.sampled_from(PROCESSORS), st.integers(0, 2**32 - 1))
def test_sampling_at_all_nodes_is_that_of_a_walk(draft, processors, seed):
    """The same tokens of the same random numbers, of which those behind the path are given back."""
    logits = 3 * torch.rand(1, len(draft.tree), 16, generator=torch.Generator().manual_seed(seed))
    trees, steps, states = send([draft], [0], len(draft.tree), CPU), [], []
    for at_once in (True, False):
        numbers = torch.Generator().manual_seed(seed)
        sequence = Sequence(torch.zeros(1, dtype=torch.long), StoppingCriteriaList([MaxLengthCriteria(99)]))
        selector = TokenSelector(sequence, LogitsProcessorList(processors), sample=True, generator=numbers)
        if at_once:
            choices = selector.every_node(logits[0], trees.depths[0], draft.tree.depth)
            steps.append(TreeSteps([draft], logits, trees, choices[None]).step(0, lambda token: token == 7))
            selector.sampled(len(steps[0].tokens))
        else:
            steps.append(accept_walk(draft, logits[0], lambda token: token == 7, selector))
        states.append(numbers.get_state())
    assert steps[0].tokens == steps[1].tokens
    assert steps[0].accepted == steps[1].accepted
    assert torch.equal(*states)


def test_sampling_without_a_distribution_fails_where_it_is_reached():
    draft, logits = Draft(Tree.from_paths([(0,)]), torch.tensor([1, 2])), torch.zeros(1, 2, 4)
    logits[0, 1] = torch.nan
    trees = send([draft], [0], 2, CPU)
    sequence = Sequence(torch.zeros(1, dtype=torch.long), StoppingCriteriaList([MaxLengthCriteria(99)]))
    for most_probable, fails in ((2, True), (3, False)):
        logits[0, 0, most_probable] = 99
        choices = TokenSelector(sequence, LogitsProcessorList(), sample=True).every_node(logits[0], trees.depths[0], 1)
        logits[0, 0, most_probable] = 0
        steps = TreeSteps([draft], logits, trees, choices[None])
        if fails:
            with pytest.raises(RuntimeError, match="nan"):
                steps.step(0, lambda token: False)
        else:
            assert steps.step(0, lambda token: False).tokens == [3]


def test_noise_is_never_infinite_and_draws_the_distribution():
    noise = gumbel(SEED, torch.arange(1000), 1000)
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    logits = torch.tensor([1.0, 0.0, -1.0, -3.0])
    drawn = chosen(Choice(sample=True), logits.expand(40_000, 4))
    counts = torch.bincount(drawn, minlength=4)
    expected = logits.double().softmax(0).numpy() * 40_000
    assert chisquare(counts, expected).pvalue > 0.01


@pytest.mark.parametrize("places", [slice(0, 1), slice(None)], ids=["one place", "all"])
def test_uniform_numbers_are_uniform_whatever_they_are_counted_by(places):
    """By token, by place and by seed, one by one and together with their neighbours."""
    numbers = torch.exp(-torch.exp(-gumbel(SEED, torch.arange(64)[places], 4096).double()))
    by_seed = torch.cat([gumbel(SEED + seed, torch.tensor([5]), 64) for seed in range(1024)])
    for uniform in (numbers, torch.exp(-torch.exp(-by_seed.double()))):
        assert kstest(uniform.flatten().numpy(), "uniform").pvalue > 1e-3
        for one, next_one in ((uniform[:, 1:], uniform[:, :-1]), (uniform[1:], uniform[:-1])):
            if one.numel():
                cells = (one * 8).long() * 8 + (next_one * 8).long()
                assert chisquare(torch.bincount(cells.flatten(), minlength=64).numpy()).pvalue > 1e-3


def test_bits_are_those_of_splitmix64():
    """The generator's first numbers for the seed 0, as published with it."""
    bits = _mixed(torch.arange(1, 4) * _GAMMA)
    assert [int(one) & (2**64 - 1) for one in bits] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_an_unlikely_token_is_not_drawn_because_a_uniform_number_is_zero(monkeypatch):
    """24 bits are 0 once in 2^24 numbers; taken as they are, that token would win whatever its probability."""
    monkeypatch.setattr("token_recycling.cuda_graphs.noise._mixed", lambda bits: torch.zeros_like(bits))
    assert gumbel(SEED, torch.zeros(1, dtype=torch.long), 3).isfinite().all()
    half, hardly = 1 << 63, 1 << 39
    numbers = torch.tensor([[half - 2**64, hardly]])
    monkeypatch.setattr("token_recycling.cuda_graphs.noise._mixed", lambda bits: numbers.expand(bits.shape[0], 2))
    noise = gumbel(SEED, torch.zeros(1, dtype=torch.long), 2)
    assert int((torch.tensor([[0.0, -30.0]]) + noise).argmax()) == 0


@given(strategies.drafts(vocab_size=9), st.integers(0, 2**32 - 1))
def test_a_penalty_is_that_of_transformers_at_every_node(draft, seed):
    numbers = torch.Generator().manual_seed(seed)
    n, before = len(draft.tree), torch.randint(0, 9, (5,), generator=numbers)
    logits = torch.randn(1, n, 9, generator=numbers)
    said = torch.zeros(1, 9, dtype=torch.bool)
    said[0, [*before.tolist(), int(draft.tokens[0])]] = True
    penalty = warpers.RepetitionPenaltyLogitsProcessor(1.7)
    made = Choice((penalty,)).scores(logits, send([draft], [5], n, CPU), said)
    for node, lineage in enumerate(draft.tree.lineages):
        path = torch.cat([before, draft.tokens[list(lineage)]])
        assert torch.equal(made[0, node], penalty(path[None], logits[:, node])[0])


@pytest.mark.parametrize("vocabulary", [5, 64, 640, 1000, 1024])
def test_candidates_are_the_largest(vocabulary):
    logits = torch.randn(7, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    for k in (1, 5):
        values, ids = grouped_topk(logits, k)
        wanted = logits.topk(k)
        assert torch.equal(values, wanted.values)
        assert torch.equal(ids, wanted.indices)


def test_accepted_slots_are_moved_together(model):
    target = TreeModel(model)
    cache = target.new_cache()
    prefill(target, [torch.arange(1, 18)] * 2, cache)
    kept = TreeCache(cache)
    for store in kept.stores:
        store.buffer.copy_(torch.arange(store.buffer.shape[3])[:, None].expand_as(store.buffer))
    _move(kept, torch.tensor([4, 2]), torch.tensor([[0, 2, 5], [0, 1, 0]]))
    for store in kept.stores:
        assert (store.buffer[:, 0, :, :7] == torch.tensor([0.0, 1, 2, 3, 4, 6, 9])[:, None]).all()
        assert (store.buffer[:, 1, :, :4] == torch.tensor([0.0, 1, 2, 3])[:, None]).all()


@pytest.mark.parametrize("lengths", [[9], [9, 5]])
def test_sequences_go_in_and_come_back(model, lengths):
    target, texts = TreeModel(model), [tiny.prompt(row, length)[0] for row, length in enumerate(lengths)]
    given, wanted = target.new_cache(), target.new_cache()
    first = min(lengths) - 3
    prefill(target, [text[: first + 1] for text in texts], given)
    prefill(target, texts, wanted)
    runner = StepRunner(target)
    runner.begin(target, wanted, len(lengths), 32)
    runner.write(given, [length - 1 for length in lengths], first)
    for own, theirs in zip(given.layers, wanted.layers, strict=True):
        for row, length in enumerate(lengths):
            assert_close(own.keys[row, :, : length - 1], theirs.keys[row, :, : length - 1])
            assert_close(own.values[row, :, : length - 1], theirs.values[row, :, : length - 1])


def test_the_report_says_what_was_accepted():
    plan = StepPlan(batch=1, nodes=3, depths=2, band=1024, k=2)
    shares = torch.tensor([[0.5, 0.25], [1.0, 0.0], [0.75, 0.125]])
    numbers = torch.cat(
        [torch.tensor([2, 0, 2, 8, 9, 10, 11, 12, 13, 14, 15]).int(), shares.view(torch.int32).flatten()]
    )
    report = Report(plan, numbers[None].numpy())
    assert report.accepted(0) == ([0, 2], [8, 9])
    ids, found = report.candidates(0, 2)
    assert ids.tolist() == [[10, 11], [12, 13]]
    assert found.tolist() == shares[:2].tolist()
