"""The option `draws` of recycling: what is drawn, from what, and when. Distributions of texts: `test_drawn_drafts`."""

from collections import Counter

import pytest
import torch
from scipy.stats import chisquare
from support import runs, tiny

import token_recycling as tr
from token_recycling import Context
from token_recycling.model.tree_model import TreeModel

TEXT = torch.tensor([1, 5, 9, 2, 5, 9, 3, 5])


def started(model, **options):
    """A text whose prompt's candidates were learned."""
    begun = runs.begun(tr.make_drafter("recycling", draws=True, **options), TEXT, TreeModel(model))
    begun.observe_prompt(TEXT[:-1], model(TEXT[None, :-1]).logits[0])
    return begun


def fits(seen, exact):
    """Whether counts may be draws of probabilities, by things drawn; rare ones count together."""
    total, of = seen.total(), sum(exact.values())
    often = [thing for thing in exact if exact[thing] / of * total >= 5]
    counts, wanted = [seen[thing] for thing in often], [exact[thing] / of * total for thing in often]
    if len(often) < len(exact):
        counts, wanted = [*counts, total - sum(counts)], [*wanted, total - sum(wanted)]
    assert len(counts) > 2
    return chisquare(counts, wanted).pvalue > 0.001


def drawn(begun):
    draft = begun.draft(Context(TEXT, 50, warp=lambda logits: logits))
    begun._recycler.forget_draft(begun._text)
    return draft


@torch.no_grad()
def test_children_are_drawn_from_the_distribution_that_is_given():
    torch.manual_seed(0)
    begun = started(tiny.llama(context=1.0), tree=3, k=4)
    first, pairs, given = Counter(), Counter(), None
    for _ in range(600):
        draft = drawn(begun)
        children = draft.tree.children[0]
        given = draft.drawn_from[children[0]]
        tokens = draft.tokens[list(children)].tolist()
        assert len(set(tokens)) == len(tokens)
        first[tokens[0]] += 1
        pairs[tuple(tokens[:2])] += len(tokens) > 1
    given = {token: float(given[token]) for token in given.nonzero()[:, 0].tolist()}
    assert fits(first, given)
    both = {
        (one, other): given[one] * given[other] / (1 - given[one]) for one in given for other in given if one != other
    }
    assert fits(pairs, both)


@torch.no_grad()
def test_the_shape_is_that_without_drawing():
    torch.manual_seed(0)
    model = tiny.llama(context=1.0)
    begun, shapes = started(model, tree=6, k=4), set()
    wanted = begun.draft(Context(TEXT, 50))
    assert wanted.drawn_from is None, "greedy"
    begun._recycler.forget_draft(begun._text)
    for _ in range(20):
        draft = drawn(begun)
        assert len(draft.drawn_from) == len(draft.tree) - 1 == len(list(draft.drawn_from))
        assert all(float(draft.drawn_from[node].sum()) == pytest.approx(1) for node in draft.drawn_from)
        shapes.add(len(draft.tree.children[0]))
    assert shapes == {len(wanted.tree.children[0])}, "of the root all candidates are known"


@torch.no_grad()
def test_a_template_with_gaps_leaves_no_drawn_token_out():
    torch.manual_seed(0)
    draft = drawn(started(tiny.llama(context=1.0), tree="0 2", k=4))
    assert draft.tree.ranks[1:] == (0, 1)


def test_greedy_text_is_the_same():
    model, ids = tiny.llama(context=1.0), tiny.prompt(4, 9)
    found = tr.generate(model, ids, drafter="recycling:draws=true,tree=8", max_new_tokens=40, do_sample=False)
    assert found.tolist() == model.generate(ids, max_new_tokens=40, do_sample=False).tolist()


def test_a_batch_is_drawn_for():
    model, stats = tiny.llama(context=1.0), tr.Stats()
    ids = torch.cat([tiny.prompt(seed, 9) for seed in range(3)])
    torch.manual_seed(0)
    tr.generate(model, ids, drafter="recycling:draws=true", max_new_tokens=40, do_sample=True, stats=stats)
    assert stats.tokens == 120
    assert stats.drafted > 0
