"""Properties of every tree, draft, padding, cut and length, compared with brute force by hypothesis."""

import itertools
from functools import cache

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny
from support.batches import padded
from support.drafters import Garbage
from support.strategies import drafts, trees
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, StoppingCriteriaList

import token_recycling as tr
from token_recycling.loop.accept import accept_walk
from token_recycling.model.architectures import Reach
from token_recycling.model.kv_cache import TreeCache
from token_recycling.model.target import masks

VOCABULARY = 5


def target_output(seed, vocab_size=3):
    """Return the target's output of 20 tokens, independent of drafts."""
    return torch.randint(0, vocab_size, (20,), generator=torch.Generator().manual_seed(seed)).tolist()


@given(drafts(vocab_size=3, distinct_siblings=True), st.integers(0, 10**6), st.integers(1, 8))
def test_walk_emits_the_longest_drafted_prefix_and_one_token(draft, seed, room):
    """Brute force: of all paths of the tree, the longest prefix of the target's output."""
    said, tokens = target_output(seed), draft.tokens.tolist()
    drafted = {tuple(tokens[node] for node in lineage[1:]) for lineage in draft.lineages}
    longest = max(length for length in range(len(said)) if tuple(said[:length]) in drafted)
    text = []
    nodes = torch.arange(len(tokens))[:, None]

    def choose(logits):
        lineage = draft.lineages[int(logits)]
        assert [tokens[node] for node in lineage[1:]] == text, "called at the node of the emitted tokens"
        return said[len(text)]

    def append(token):
        text.append(token)
        return len(text) == room

    step = accept_walk(draft, nodes, append, choose)
    assert step.tokens == text == said[: min(longest + 1, room)]
    assert [tokens[node] for node in step.accepted[1:]] == text[:-1]
    assert step.accepted[1:] == [node for node in step.accepted[1:] if draft.parents[node] in step.accepted]
    assert step.finished == (len(text) == room)
    assert (step.beyond is not None) == (room <= longest)


@given(trees(), st.sampled_from([("full", 0), ("sliding", 3), ("chunked", 4)]), st.integers(0, 9), st.integers(0, 9))
def test_node_attends_to_its_lineage_within_reach_only(tree, reach, length, hole):
    """`length` slots of the sequence precede `hole` empty slots, as in the shorter rows of a batch."""
    kind, size = reach
    n = len(tree)
    visible = torch.zeros(1, 1, n, length + hole + n, dtype=torch.bool)
    visible[..., :length] = True
    visible[..., length + hole :] = torch.from_numpy(tree.ancestors)
    depths = torch.from_numpy(tree.depths)[None] + length
    keys = torch.cat([torch.arange(length + hole)[None], depths], dim=1)
    made = masks({"any": Reach(kind, size) if size else Reach()}, visible, depths, keys, torch.float32)
    assert isinstance(made, torch.Tensor)
    for node, lineage in enumerate(tree.lineages):
        here = length + tree.depths[node]
        line = [*range(length), *(length + tree.depths[other] for other in lineage)]
        slots = [*range(length), *(length + hole + other for other in lineage)]
        seen = {
            slot
            for slot, position in zip(slots, line, strict=True)
            if kind == "full"
            or (kind == "sliding" and here - position < size)
            or (kind == "chunked" and here // size == position // size)
        }
        assert set((made[0, 0, node] == 0).nonzero().flatten().tolist()) == seen


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 6)), min_size=1, max_size=4),
    st.integers(1, 12),
    st.integers(0, 10**6),
)
def test_cache_keeps_exactly_the_accepted_slots(rows, n, seed):
    """Rows of different lengths keep different numbers of nodes, in order, after their cached slots."""
    generator = torch.Generator().manual_seed(seed)
    lengths, held = [length for length, _ in rows], max(length for length, _ in rows)
    accepted = [torch.randperm(n, generator=generator)[: min(kept, n)].sort().values.tolist() for _, kept in rows]
    states = torch.randn(2, 2, len(rows), 2, held + n, 3, generator=generator)
    cache = DynamicCache()
    for layer in range(2):
        cache.update(states[layer, 0], states[layer, 1], layer)
    TreeCache(cache).keep(held, lengths, accepted)
    longest = max(length + len(nodes) for length, nodes in zip(lengths, accepted, strict=True))
    for layer, part in itertools.product(range(2), range(2)):
        kept = (cache.layers[layer].keys, cache.layers[layer].values)[part]
        assert kept.shape == (len(rows), 2, longest, 3)
        for row, (length, nodes) in enumerate(zip(lengths, accepted, strict=True)):
            slots = [*range(length), *(held + node for node in nodes)]
            assert torch.equal(kept[row, :, : len(slots)], states[layer, part, row][:, slots])


LLAMA = tiny.llama(5, vocab_size=VOCABULARY, num_hidden_layers=1)
LLAMA.generation_config.pad_token_id = 0
POSITIONS = 24


def _gpt2():
    """Return a GPT-2 with 24 learned positions: a later position is an error."""
    torch.manual_seed(3)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": POSITIONS, "initializer_range": 0.5}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, **sizes)).eval()
    model.generation_config.pad_token_id = 0
    return model


GPT2 = _gpt2()


@cache
def single_output(model, seed, length, new):
    """Return the output of plain `generate` for one prompt."""
    return model.generate(tiny.prompt(seed, length, VOCABULARY), max_new_tokens=new)[0, length:].tolist()


def batch_outputs(model, prompts, spare, new, drafter, **more):
    """Return the outputs of accelerated `generate` for left-padded prompts, each given by seed and length."""
    inputs = padded([tiny.prompt(seed, length, VOCABULARY)[0] for seed, length in prompts], spare)
    with tr.accelerated(model, drafter) as acceleration:
        found = model.generate(**inputs, max_new_tokens=new, **more)
    assert acceleration.fallback is None
    return found[:, inputs["input_ids"].shape[1] :].tolist()


SHAPES = st.lists(trees(max_nodes=14), min_size=1, max_size=3)
PROMPTS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 10)), min_size=1, max_size=5)


@settings(max_examples=40)
@given(PROMPTS, st.integers(0, 3), st.sampled_from([1, 7, 16]), SHAPES, st.integers(0, 10**6), st.integers(1, 5))
def test_row_of_a_batch_equals_single_decoding(prompts, spare, new, shapes, seed, end):
    """For any other rows, padding and drafts. An end token of 5 is outside the vocabulary and ends nothing."""
    rows = batch_outputs(LLAMA, prompts, spare, new, Garbage(shapes, seed, VOCABULARY), eos_token_id=end)
    for row, (prompt, length) in zip(rows, prompts, strict=True):
        wanted = single_output(LLAMA, prompt, length, 16)[:new]
        wanted = wanted[: wanted.index(end) + 1] if end in wanted else wanted
        assert row[: len(wanted)] == wanted
        assert not any(row[len(wanted) :])


@settings(max_examples=60)
@given(st.integers(1, POSITIONS), st.none() | st.integers(0, 12), SHAPES, st.integers(0, 10**6))
def test_trees_shrink_near_the_last_position(length, short, shapes, seed):
    """Tree depth is limited by the remaining positions and the remaining length. With `short` of None, the length limit
    is far beyond, and a criterion ends the sequence at the last position.
    """
    new, said = POSITIONS + 1 - length, list[int]()
    how = {"max_new_tokens": max(1, new - (short or 0))}
    if short is None:
        ends = StoppingCriteriaList([lambda ids, scores: torch.tensor([ids.shape[1] > POSITIONS])])
        how = {"max_new_tokens": 4 * POSITIONS, "stopping_criteria": ends}
    steps = tr.stream(GPT2, tiny.prompt(0, length, VOCABULARY), Garbage(shapes, seed, VOCABULARY), **how)
    for turn, step in enumerate(steps):
        left = POSITIONS - length - len(said), how["max_new_tokens"] - len(said) - 1
        assert step.draft.depth == min(shapes[turn % len(shapes)].depth, *left)
        said += step.tokens
    assert said == single_output(GPT2, 0, length, new)[: how["max_new_tokens"]]


WIDE = tiny.llama(6, context=1)
"""A model whose choices depend on its whole context."""


class CorrectTrees(Garbage):
    """Fills its trees with the model's output: every node has the correct token for its depth."""

    def draft(self, context):
        tree, said = self.shapes[len(self.steps) % len(self.shapes)], single_output(WIDE, 0, 10, 60)
        place = len(context.tokens) - 10 - 1
        return tr.Draft([int(context.root), *(said[place + depth] for depth in tree.depths[1:])], tree.parents)


def test_trees_of_equal_size_have_their_own_masks():
    """A chain and a star: with the other's mask, a node would not attend to the tokens before it."""
    shapes = [tr.Template((-1, 0, 1, 2), (0,) * 4), tr.Template((-1, 0, 0, 0), (0, 0, 1, 2))]
    steps = tr.stream(WIDE, tiny.prompt(0, 10, VOCABULARY), CorrectTrees(shapes), max_new_tokens=40)
    assert [token for step in steps for token in step.tokens] == single_output(WIDE, 0, 10, 60)[:40]
