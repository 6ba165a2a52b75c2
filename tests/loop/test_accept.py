"""Both acceptance functions agree; learning stops at the end of the sequence."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import drafts

from token_recycling import Draft
from token_recycling.loop.accept import TreeSteps, accept_walk
from token_recycling.trees.packed import send
from token_recycling.trees.templates import parse_paths


def never(token):
    return False


def ending_with(end):
    return lambda token: token == end


def argmax(logits):
    return int(logits.argmax())


def logits_for(choices, vocab_size=10):
    """Return logits whose argmax at node i is `choices[i]`."""
    return torch.eye(vocab_size)[torch.tensor(choices)] + torch.linspace(0, 0.1, vocab_size)


def make_draft(paths, tokens):
    return Draft(tokens, parse_paths(paths).parents)


def accept_greedy(draft, logits, append):
    trees = send([draft], [0], len(draft), logits.device)
    return TreeSteps([draft], logits[None], trees, logits.argmax(dim=-1)[None]).step(0, append)


WALKS = [accept_greedy, lambda draft, logits, append: accept_walk(draft, logits, append, argmax)]
both_functions = pytest.mark.parametrize("accept", WALKS, ids=["greedy", "walk"])


@both_functions
def test_siblings_of_the_end_token_are_learned_from(accept):
    tree = make_draft("0 1 2 10 11", [1, 4, 9, 5, 6, 7])
    step = accept(tree, logits_for([9, 0, 0, 0, 0, 0]), ending_with(9))
    assert (step.accepted, step.tokens, step.finished, step.beyond) == ([0], [9], True, 2)
    assert step.learnable == [0, 1, 3]


def random_logits(draft, seed):
    size = int(draft.tokens.max()) + 2
    return torch.randn(len(draft), min(size, 5), generator=torch.Generator().manual_seed(seed))


def logits_by_prefix(draft, logits):
    """Give equal logits to nodes with equal prefixes, as a model does."""
    first = {}
    texts = [tuple(draft.tokens[list(lineage)].tolist()) for lineage in draft.lineages]
    return torch.stack([logits[first.setdefault(text, node)] for node, text in enumerate(texts)])


def assert_greedy_equals_walk(draft, logits, append):
    greedy, walk = (accept(draft, logits, append()) for accept in WALKS)
    assert (greedy.accepted, greedy.tokens) == (walk.accepted, walk.tokens)
    assert (greedy.finished, greedy.beyond) == (walk.finished, walk.beyond)


def up_to(room):
    """Return a callback that ends a sequence at its `room`-th token."""
    seen = []
    return lambda token: seen.append(token) or len(seen) == room


@given(drafts(vocab_size=3, distinct_siblings=True), st.integers(0, 10**6), st.integers(0, 4), st.integers(1, 6))
def test_greedy_and_walk_accept_the_same_path(draft, seed, end, room):
    logits = random_logits(draft, seed)
    assert_greedy_equals_walk(draft, logits, lambda: ending_with(end))
    assert_greedy_equals_walk(draft, logits, lambda: up_to(room))


@settings(max_examples=120)
@given(drafts(vocab_size=2), st.integers(0, 10**6), st.integers(1, 6))
def test_greedy_and_walk_accept_the_same_path_among_equal_siblings(draft, seed, room):
    """Equal siblings occur in drafts of an empty matrix. Nodes with equal prefixes have equal logits."""
    logits = logits_by_prefix(draft, random_logits(draft, seed))
    assert_greedy_equals_walk(draft, logits, lambda: never)
    assert_greedy_equals_walk(draft, logits, lambda: up_to(room))


@both_functions
def test_nothing_after_the_end_is_learned_among_equal_siblings(accept):
    """Nodes 1 and 2 both hold the token that ends the sequence: the logits after it must not be learned."""
    step = accept(make_draft("0 1 10", [1, 2, 2, 3]), logits_for([2, 3, 3, 4]), ending_with(2))
    assert step.learnable == [0]


@given(drafts(vocab_size=3, distinct_siblings=True), st.integers(0, 10**6), st.integers(1, 6))
def test_trimmed_step_is_a_prefix_of_the_untrimmed_step(draft, seed, room):
    logits = random_logits(draft, seed)
    whole = accept_greedy(draft, logits, never)
    seen = []
    step = accept_greedy(draft, logits, lambda token: seen.append(token) or len(seen) == room)
    assert step.tokens == whole.tokens[:room] == seen
    assert step.accepted == whole.accepted[:room]
    assert step.finished == (len(whole.tokens) >= room)
    assert step.beyond == (whole.accepted[room] if len(whole.accepted) > room else None)
    learned = range(len(draft))[step.learnable] if isinstance(step.learnable, slice) else step.learnable
    left_out = set(range(len(draft))) - set(learned)
    assert left_out == {node for node, path in enumerate(draft.lineages) if step.beyond in path}
    assert not left_out & set(step.accepted)
