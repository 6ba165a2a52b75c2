import contextlib
import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny
from support.architectures import model_of, named
from support.cases import paired
from support.releases import needs
from support.slots import assert_same_slots
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import token_recycling as tr
from token_recycling.model.kv_cache import TreeCache
from token_recycling.model.target import Target
from token_recycling.model.tree_layer import TreeLayer

pytestmark = pytest.mark.core


def rebuilt(model, text):
    """Return the cache of one forward pass over the text without its last token."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=text[:, :-1], past_key_values=cache)
    return cache


def check_after_each_step(model, ids, cache, **arguments):
    """Run `stream`, compare the cache with a rebuilt one after every step, and return the number of steps."""
    text, count = ids, 0
    for count, step in enumerate(tr.stream(model, ids, past_key_values=cache, **arguments), start=1):  # noqa: B007
        text = torch.cat([text, torch.tensor([step.tokens])], dim=1)
        assert_same_slots(cache, rebuilt(model, text), atol=1e-5)
    return count


@pytest.mark.parametrize(("tree", "length"), paired(["paper", "chain:4", "0 1 2 00 20 200"], [1, 2, 30]))
def test_after_each_step_the_cache_equals_one_rebuilt_from_scratch(model, tree, length):
    drafter, ids = tr.make_drafter("published", tree=tree), tiny.prompt(0, length).repeat(1, 2)
    cache = DynamicCache(config=model.config)
    assert check_after_each_step(model, ids, cache, drafter=drafter, max_new_tokens=24) < 24


def test_scattered_accepted_slots_are_compacted(counting):
    """The correct tokens have the last ranks in the tree, so every accepted slot has to move."""
    drafter = tr.make_drafter("published", k=3, tree="0 1 2 20 21 22 220 221 222")
    candidates = drafter.prepare(Target(counting)).candidates
    candidates[:, 2] = (torch.arange(16) + 1) % 16
    drafter.observe = lambda step: None
    steps = check_after_each_step(
        counting, torch.tensor([[0]]), DynamicCache(config=counting.config), drafter=drafter, max_new_tokens=12
    )
    assert steps == 3


def test_closed_stream_leaves_layers_of_transformers(model):
    ids, cache = tiny.prompt(0, 9), DynamicCache(config=model.config)
    kinds = [type(layer) for layer in cache.layers]
    with contextlib.closing(tr.stream(model, ids, max_new_tokens=20, past_key_values=cache)) as steps:
        text = torch.cat([ids, torch.tensor([next(steps).tokens])], dim=1)
    assert [type(layer) for layer in cache.layers] == kinds
    assert_same_slots(cache, rebuilt(model, text), atol=1e-5)


def test_keys_and_values_read_between_steps_do_not_change():
    """Sliding layers drop and move slots later."""
    model, held = model_of(named("mistral", "window of 8")), []
    cache, ids = DynamicCache(config=model.config), tiny.prompt(0, 12).repeat(1, 3)
    for _ in tr.stream(model, ids, "recycling:tree=8", max_new_tokens=40, past_key_values=cache):
        held += [(states, states.clone()) for layer in cache.layers for states in (layer.keys, layer.values)]
    assert all(torch.equal(*pair) for pair in held)


OPERATIONS = {
    "crop nothing": lambda cache: cache.crop(0),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0, 1])),
    "select": lambda cache: (cache.batch_repeat_interleave(3), cache.batch_select_indices(torch.tensor([1, 0]))),
    "repeat and crop": lambda cache: (cache.batch_repeat_interleave(2), cache.crop(-3)),
    "reset": lambda cache: cache.reset(),
}


@pytest.mark.parametrize(
    "operation",
    [
        # Before 5.18 a reset layer kept its length, filled with zeros.
        pytest.param(operation, id=name, marks=[needs(5, 18)] * (name == "reset"))
        for name, operation in OPERATIONS.items()
    ],
)
def test_operations_of_transformers_work_after_keep(model, operation):
    wanted = rebuilt(model, tiny.prompt(0, 40).view(2, 20))
    cache = copy.deepcopy(wanted)
    TreeCache(cache).keep(19, [19, 19], [[], []])
    assert all(type(layer) is TreeLayer for layer in cache.layers)
    operation(cache)
    operation(wanted)
    if wanted.get_seq_length():
        assert_same_slots(cache, wanted, atol=1e-5)
    keys = wanted.layers[0].keys
    batch = 1 if keys is None else len(keys)
    following = tiny.prompt(1, 3).expand(batch, 3)
    with torch.no_grad():
        ours, theirs = (model(input_ids=following, past_key_values=each).logits for each in (cache, wanted))
    torch.testing.assert_close(ours, theirs)
    assert_same_slots(cache, wanted, atol=1e-5)


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_layer_stores_copies_and_dtypes_as_in_transformers(dtypes):
    first, *more = (torch.randn(1, 2, 3, 4, dtype=getattr(torch, dtype)) for dtype in (dtypes[0], *dtypes))
    ours, theirs = ([layer, copy.copy(layer)] for layer in (TreeLayer(), DynamicLayer()) if layer.update(first, first))
    for pair in (ours, theirs):
        for layer, states in zip(pair, more, strict=True):
            layer.update(states, states)
    for layer, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(layer.keys, wanted.keys, rtol=0, atol=0)
        layer.update(first, first)
        before = layer.buffers[0].data_ptr()
        layer.update(first, first)
        assert layer.buffers[0].data_ptr() == before, "only what was shown is copied"


def test_copies_of_a_window_drop_their_own_slots():
    """As when a conversation goes on in two ways."""
    layers, states = [], torch.randn(1, 2, 400, 4)
    for layer in (TreeLayer(8), DynamicSlidingWindowLayer(sliding_window=8)):
        layer.update(*[states[:, :, :20]] * 2)
        pair = [layer, copy.copy(layer)]
        for one, end in zip(pair, (400, 21), strict=True):
            one.update(*[states[:, :, 20:end]] * 2)
            if isinstance(one, TreeLayer):
                one.settle([end])
        layers.append(pair)
    for ours, theirs in zip(*layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)


@pytest.mark.parametrize("length", [7, 8, 9])
def test_windows_can_be_cropped_only_before_they_are_full(length):
    """As in transformers, whose layers have dropped the earlier slots."""
    states, found = torch.randn(1, 2, length, 4), []
    for layer in (TreeLayer(8), DynamicSlidingWindowLayer(sliding_window=8)):
        layer.update(states, states)
        with contextlib.suppress(RuntimeError, ValueError):  # the latter in older releases
            layer.crop(-2)
        found.append(layer.get_seq_length())
    assert found[0] == found[1]


def test_cache_longer_than_the_sequence_is_refused(model):
    """Immediately, not at the first step."""
    for length in (5, 19):
        cache = rebuilt(model, tiny.prompt(0, 20))
        with pytest.raises(ValueError, match=rf"\b{length} .*\b19\b"):
            tr.stream(model, tiny.prompt(0, length), past_key_values=cache)


def test_cache_of_another_dtype_is_refused(model):
    """As when the model was converted after the cache was filled."""
    cache = rebuilt(model, tiny.prompt(0, 5))
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.bfloat16(), layer.values.bfloat16()
    with pytest.raises(ValueError, match="bfloat16"):
        tr.stream(model, tiny.prompt(0, 9), past_key_values=cache)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 200)), min_size=2, max_size=8), st.integers(0, 10**6))
def test_sequences_join_and_leave_a_batch(moves, seed):
    """Each row keeps its own slots; all unused slots are finite."""
    kept = None
    texts = []
    draws = torch.Generator().manual_seed(seed)
    for joins, length in moves:
        if joins or len(texts) < 2:
            states = torch.randn(4, 1, 2, length, 3, generator=draws)
            other = DynamicCache()
            for layer in range(2):
                other.update(states[2 * layer], states[2 * layer + 1], layer)
            if kept is None:
                kept = TreeCache(other)
            else:
                kept.join(TreeCache(other))
            texts.append(states)
        else:
            assert kept is not None
            order = list(range(len(texts)))
            order[length % len(order)] = order[-1]
            order.pop()
            texts = [texts[row] for row in order]
            kept.select(order, max(own.shape[-2] for own in texts))
        assert kept is not None
        for layer in kept.layers:  # as a removed sequence may have left them
            for buffer in layer.buffers:
                buffer[..., layer.columns :, :] = torch.nan
        assert kept.cache.get_seq_length() == max(own.shape[-2] for own in texts)
        for layer in range(2):
            for part, states in enumerate((kept.cache.layers[layer].keys, kept.cache.layers[layer].values)):
                assert len(states) == len(texts)
                assert states.isfinite().all()
                for row, own in enumerate(texts):
                    assert torch.equal(states[row, :, : own.shape[-2]], own[2 * layer + part, 0])


def test_wipe_removes_nan_from_unused_slots():
    """A masked slot has weight zero, but zero times NaN is NaN."""
    cache = DynamicCache()
    cache.update(torch.full((3, 2, 5, 4), torch.nan), torch.full((3, 2, 5, 4), torch.nan), 0)
    kept = TreeCache(cache)
    (layer,) = kept.layers
    for buffer in layer.buffers:
        for row, length in enumerate((2, 4)):
            buffer[:, row, :, :length] = 1
    kept.select([0, 1], 4)
    kept.wipe([2, 4])
    for buffer in layer.buffers:
        assert buffer.isfinite().all()
        assert buffer.sum() == buffer.shape[0] * (2 + 4) * 2 * 4


def test_failed_join_changes_neither_cache():
    """The keys, appended first, would fit."""
    caches = []
    for length, size in ((5, 4), (140, 6)):
        keys, values = torch.randn(1, 2, length, 3), torch.randn(1, 2, length, size)
        cache = DynamicCache()
        cache.update(keys, values, 0)
        caches.append((cache, keys, values))
    kept, joining = (TreeCache(cache) for cache, _, _ in caches)
    with pytest.raises(RuntimeError):
        kept.join(joining)
    for cache, keys, values in caches:
        assert torch.equal(cache.layers[0].keys, keys)
        assert torch.equal(cache.layers[0].values, values)
