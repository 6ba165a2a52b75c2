"""Recurrent layers over trees: every node equals its path read alone, and accepted tokens leave the right state."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.architectures import model_of
from support.recurrent_architectures import recurrent
from support.releases import needs
from support.strategies import trees
from transformers.cache_utils import Cache, DynamicCache

import token_recycling as tr
from token_recycling.hf import handover
from token_recycling.model.compat import LinearAttentionLayer
from token_recycling.model.kv_cache import TreeCache
from token_recycling.model.recurrence import CurrentNode, Mixer, TokenCount
from token_recycling.model.runner import read_prompts
from token_recycling.model.target import Target
from token_recycling.trees.draft import Draft
from token_recycling.trees.templates import Template, chain

pytestmark = needs(5, 14)

FAMILIES = ["qwen3_5_text", "kimi_linear", "lfm2", "falcon_h1", "nemotron_h", "jamba", "mamba2", "inkling_text"]
"""One family for each kind of state."""
BRANCHED = Template.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)])
TEXT = torch.randint(1, 96, (14,), generator=torch.Generator().manual_seed(1))


def states_of(cache):
    kept = [states for layer in cache.states.layers for states in (layer.conv_states, layer.recurrent_states)]
    return [state for states in kept for state in states.values() if state is not None]


def after(target, prompt, tokens):
    """Return the cache after a prompt and tokens read one by one, and the logits (vocabulary,) after the last."""
    cache = target.new_cache()
    logits = target.read(prompt[None], cache)
    for token in tokens:
        logits = target.read(token[None, None], cache)
    return cache, logits[0, -1]


@pytest.fixture(scope="module", params=FAMILIES)
def target(request):
    return Target(model_of(recurrent(request.param)))


@pytest.fixture(scope="module")
def hybrid():
    return Target(model_of(recurrent("qwen3_5_text")))


def test_hybrid_model_passes_the_self_test(hybrid):
    assert tr.check(hybrid.model, self_test=True).supported


@torch.no_grad()
def test_state_after_accepted_tokens_equals_one_computed_from_scratch(target):
    tree = BRANCHED if target.info.branches else chain(4)
    tokens = torch.randint(1, 96, (len(tree),), generator=torch.Generator().manual_seed(2))
    for node in (None, *range(len(tree))):
        cache = target.new_cache()
        read_prompts(target, [TEXT], cache)
        logits = target.forward(target.inputs.of([Draft(tokens, tree.parents)], [len(TEXT)], len(TEXT)), cache)
        path = [] if node is None else list(tree.lineages[node])
        cache.keep(len(TEXT), [len(TEXT)], [path])
        wanted, last = after(target, TEXT, tokens[path])
        assert cache.length == wanted.length == len(TEXT) + len(path)
        if node is not None:
            torch.testing.assert_close(logits[0, node], last, atol=1e-4, rtol=1e-4)
        for ours, theirs in zip(states_of(cache), states_of(wanted), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_each_row_of_a_batch_keeps_its_accepted_tokens(hybrid):
    prompts, cache = [TEXT, TEXT[5:], TEXT[2:9]], hybrid.new_cache()
    read_prompts(hybrid, prompts, cache)
    drafts = [Draft(TEXT[:7], BRANCHED.parents), Draft.chain(TEXT[3:6]), Draft.chain(TEXT[:1])]
    lengths = list(map(len, prompts))
    hybrid.forward(hybrid.inputs.of(drafts, lengths, cache.length), cache)
    accepted = [[0, 2, 5], [0], []]
    cache.keep(max(lengths), lengths, accepted)
    for row, (prompt, draft, nodes) in enumerate(zip(prompts, drafts, accepted, strict=True)):
        alone, _ = after(hybrid, prompt, torch.from_numpy(draft.tokens[nodes]))
        for ours, theirs in zip(states_of(cache), states_of(alone), strict=True):
            torch.testing.assert_close(ours[row], theirs[0], atol=1e-4, rtol=1e-4)


class Digest(torch.nn.Module):
    """A layer whose state depends on the order of all tokens read."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(1, 2, bias=False), torch.nn.Linear(2, 1, bias=False)
        self.rows: list[int] = []
        self.first.register_forward_hook(lambda part, given, made: self.rows.append(given[0].shape[1]))
        self.last.register_forward_hook(lambda part, given, made: self.rows.append(given[0].shape[1]))

    def forward(self, hidden_states, cache_params):
        state = cache_params.get_recurrent_state(0)
        state = torch.zeros(len(hidden_states), 2) if state is None else state
        for token in self.first(hidden_states).unbind(dim=1):
            state = (1.7 * state + token).sin()
        cache_params.update_conv_state(hidden_states.transpose(1, 2), 0, conv_kernel_size=1)  # marks it as read
        return self.last(cache_params.update_recurrent_state(state, 0).clone()[:, None])


def digested(layer, tokens):
    """Return a layer's output (1,) after the last of `tokens` (n, 1), read one by one."""
    cache = Cache(layers=[LinearAttentionLayer()])
    return [layer(token[None, None], cache) for token in tokens][-1][0, 0]


@given(shapes=st.lists(trees(max_nodes=9), min_size=1, max_size=3), text=st.integers(1, 3), data=st.data())
@torch.no_grad()
def test_every_node_starts_from_the_state_of_its_parent(shapes, text, data):
    """Also in batches of different trees. Weights are read once per pass, and decoding continues from kept nodes."""
    layer, cache, size = Digest(), Cache(layers=[LinearAttentionLayer()]), max(map(len, shapes))
    states = TreeCache(cache).states
    before, nodes = torch.rand(len(shapes), text, 1), torch.rand(len(shapes), size, 1)
    for token in before.unbind(dim=1):
        layer(token[:, None], cache)
    mixer, parents = Mixer(layer), [[*shape.parents.tolist(), *[0] * (size - len(shape))] for shape in shapes]
    for again in range(2):
        layer.rows.clear()
        with states.node_by_node([mixer], parents):
            made = layer(nodes, cache)
        if again:  # the first pass finds out which linear layer comes last
            assert [rows for rows in layer.rows if rows] == [size, size]
        for row, shape in enumerate(shapes):
            for node, path in enumerate(shape.lineages):
                wanted = digested(layer, torch.cat([before[row], nodes[row, list(path)]]))
                torch.testing.assert_close(made[row, node], wanted)
    kept = [data.draw(st.sampled_from(range(len(shape)))) for shape in shapes]
    states.keep(kept)
    following = layer(torch.full((len(shapes), 1, 1), 0.5), cache)
    for row, node in enumerate(kept):
        path = [*shapes[row].lineages[node]]
        wanted = digested(layer, torch.cat([before[row], nodes[row, path], torch.tensor([[0.5]])]))
        torch.testing.assert_close(following[row, 0], wanted)


@pytest.mark.parametrize("apart", [-1, 1])
@torch.no_grad()
def test_passes_of_other_threads_ignore_the_hooks(apart):
    layer, tokens = Digest(), torch.rand(1, 3, 1)
    wanted = layer(tokens, Cache(layers=[LinearAttentionLayer()]))
    walking = list(Mixer(layer).hooks(CurrentNode(), threading.get_ident() + apart))
    made = layer(tokens, Cache(layers=[LinearAttentionLayer()]))
    for handle in walking:
        handle.remove()
    assert torch.equal(made, wanted)


def test_states_created_in_inference_mode_can_be_updated_outside(hybrid):
    given = DynamicCache(config=hybrid.config)
    with torch.inference_mode():
        hybrid.model(input_ids=TEXT[None], past_key_values=given)
    wanted, _ = after(hybrid, TEXT, TEXT[:1])
    cache = TreeCache(given)
    with torch.no_grad():
        hybrid.read(TEXT[None, :1], cache)
    for ours, theirs in zip(states_of(cache), states_of(wanted), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_token_count_of_a_recurrent_cache_is_removed_on_release():
    target = Target(model_of(recurrent("mamba2")))
    cache = target.new_cache()
    read_prompts(target, [TEXT], cache)
    assert cache.length == len(TEXT)
    cache.states.release(cache.cache)
    assert not any(isinstance(layer, TokenCount) for layer in cache.cache.layers)
    assert handover.why_not(cache.cache, target, 1, len(TEXT) + 1, 99) is not None, "its length is unknown"
