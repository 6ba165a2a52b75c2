"""Drafts that were drawn at random: every emitted token has the target's distribution, and what is published elsewhere
has not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cases import thinned
from support.chi_square import p_value
from support.languages import LINE, TOKENS, TWO_LEVELS, Q, Text, drafted, fits, texts

from token_recycling import Draft
from token_recycling.drafters._shared.graph import Rules, draw, grow
from token_recycling.loop import accept
from token_recycling.loop.accept import accept_siblings, accept_walk
from token_recycling.trees.draft import Budget
from token_recycling.trees.templates import parse_paths


class Reading:
    """Reads like `Reader`, from the table q."""

    def __init__(self, text):
        self.paths = [text]

    def read(self, text):
        return Q[self.paths[0]].log()[None]

    def read_layer(self, parents, tokens):
        self.paths += [(*self.paths[parent], token) for parent, token in zip(parents, tokens, strict=True)]
        return torch.stack([Q[path].log() for path in self.paths[-len(tokens) :]])


def graph(text):
    """Three steps with merges; what is copied was drawn for another path, after which q is another."""
    rules = Rules(depth=3, k=2, nodes=14, theta_prob=0.1, tau=1)
    tokens = torch.tensor(text or [0])
    made = grow(Reading(text), tokens, rules, Budget(), TOKENS, warp=lambda logits: logits)
    draft = made.unrolled(rules.nodes)
    COPIES.append(len(made.copied))
    return draft


def stopped(text):
    """At most three tokens; none after a 0, so that what is drawn decides how long the draft is."""
    tokens = torch.tensor(text or [0])
    made = grow(
        Reading(text),
        tokens,
        Rules(3, 1, 3),
        Budget(),
        TOKENS,
        lambda logits: logits,
        lambda graph: graph.tokens[-1] == 0,
    )
    return made.unrolled(3)


def without_the_last(text):
    """The same without the token after which drafting stopped: left out because of what was drawn."""
    draft = stopped(text)
    return draft.cut(len(draft) - 2) if draft.tokens[-1] == 0 else draft


def doubled(text, copies_first=False):
    """A drawn tree in which every drawn token of the first layer stands twice: the copy is chosen, and has drawn
    children of its own.
    """
    made = drafted(TWO_LEVELS, text)
    tokens, sources = [int(made.tokens[0])], {}
    first = made.tokens[1:3].tolist()
    layer = [(token, drawn) for token in first for drawn in ((False, True) if copies_first else (True, False))]
    parents = [-1]
    for token, drawn in layer:
        if drawn:
            sources[len(tokens)] = Q[text]
        tokens.append(token)
        parents.append(0)
    for place, (token, _) in enumerate(layer, start=1):
        q = Q[(*text, token)]
        for following in draw(q[None], 2)[0].tolist():
            sources[len(tokens)] = q
            tokens.append(following)
            parents.append(place)
    return Draft(tokens, parents, sampled_from=sources)


COPIES: list[int] = []
DRAFTS: dict[str, Callable[[Text], Draft]] = {
    "a drawn sequence": lambda text: drafted(LINE, text),
    "a drawn tree": lambda text: drafted(TWO_LEVELS, text),
    "all tokens drawn": lambda text: drafted(parse_paths("0 1 2 00 01 02"), text),
    "a drawn graph": graph,
    "a drawn sequence that stops by what was drawn": stopped,
    "drawn and chosen siblings": lambda text: drafted(TWO_LEVELS, text, last_is_chosen=True),
    "drawn siblings and copies of them": doubled,
    "copies of drawn siblings before them": lambda text: doubled(text, copies_first=True),
}


EVERY_RUN = ("a drawn tree", "a drawn graph", "drawn and chosen siblings")


@pytest.mark.parametrize("name", thinned(DRAFTS, kept=EVERY_RUN.__contains__))
def test_texts_have_the_targets_distribution(name):
    COPIES.clear()
    assert fits(texts(DRAFTS[name], accept_walk)) > 0.001
    assert bool(sum(COPIES)) == (name == "a drawn graph")


def test_leaving_out_a_token_because_of_what_was_drawn_is_not_exact():
    assert fits(texts(without_the_last, accept_walk)) < 1e-6


def test_a_draft_said_to_be_chosen_is_verified_as_exactly():
    """One draw a node does not ask where the tokens are from; it only accepts fewer."""
    made = DRAFTS["a drawn tree"]
    assert fits(texts(lambda text: replace(made(text), sampled_from=None), accept_walk)) > 0.001


def without_residual(target, tokens, sources, generator):
    for place, token in enumerate(tokens):
        if torch.rand(()) * sources[place][token] < target[token]:
            return place, target
    return None, target


def without_renewing_q(target, tokens, sources, generator):
    left = target
    for place, token in enumerate(tokens):
        if torch.rand(()) * sources[place][token] < left[token]:
            return place, left
        left = (left - sources[place]).clamp(min=0)
        left = left / left.sum()
    return None, left


@pytest.mark.parametrize("wrong", [without_residual, without_renewing_q])
def test_the_check_finds_a_wrong_acceptance(monkeypatch, wrong):
    monkeypatch.setattr(accept, "accept_siblings", wrong)
    assert fits(texts(DRAFTS["a drawn tree"], accept_walk)) < 1e-6


@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(1, 5))
def test_what_is_left_is_a_distribution_without_the_rejected(seed, size, k):
    torch.manual_seed(seed)
    p, q = torch.softmax(2 * torch.randn(size), dim=-1), torch.softmax(2 * torch.randn(size), dim=-1)
    tokens = draw(q[None], min(k, size))[0].tolist()
    place, left = accept_siblings(p, tokens, [q] * len(tokens))
    assert float(left.sum()) == pytest.approx(1, abs=1e-4)
    assert bool((left >= 0).all())
    rejected = tokens if place is None else tokens[:place]
    assert all(float(left[token]) < 1e-6 for token in rejected)


def test_a_token_that_cannot_have_been_drawn_is_refused():
    q = torch.tensor([0.0, 0.5, 0.5])
    with pytest.raises(ValueError, match="token 0"):
        accept_siblings(torch.tensor([0.6, 0.2, 0.2]), [0], [q])
    with pytest.raises(ValueError, match="token 1"):
        accept_siblings(torch.tensor([0.98, 0.01, 0.01]), [1, 1], [torch.tensor([0.0, 1.0, 0.0])] * 2)


def test_tokens_are_drawn_without_replacement_and_in_order():
    """Every pair of three tokens, against q(a) q(b) / (1 - q(a))."""
    torch.manual_seed(0)
    q, runs = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64), 20_000
    counts = Counter(map(tuple, draw(q.expand(runs, -1), 2).tolist()))
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    assert sum(counts[pair] for pair in pairs) == runs
    wanted = [runs * float(q[a] * q[b] / (1 - q[a])) for a, b in pairs]
    assert p_value(([counts[pair] for pair in pairs], wanted)) > 0.001
