"""Sampled drafts: every emitted token follows the target's distribution, and faulty acceptance rules are detected."""

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


class TableReader:
    """The interface of `Reader`, with distributions from the table q."""

    def __init__(self, text):
        self.paths = [text]

    def read(self, text):
        return Q[self.paths[0]].log()[None]

    def read_layer(self, parents, tokens):
        self.paths += [(*self.paths[parent], token) for parent, token in zip(parents, tokens, strict=True)]
        return torch.stack([Q[path].log() for path in self.paths[-len(tokens) :]])


def sampled_graph(text):
    """Three steps with merges. A copied token was sampled on another path, after which q differs."""
    rules = Rules(depth=3, k=2, nodes=14, theta_prob=0.1, tau=1)
    tokens = torch.tensor(text or [0])
    made = grow(TableReader(text), tokens, rules, Budget(), TOKENS, warp=lambda logits: logits)
    draft = made.unrolled(rules.nodes)
    COPIES.append(len(made.copied))
    return draft


def stopped_after_zero(text):
    """At most three tokens, none after a 0: sampled tokens decide the length of the draft."""
    tokens = torch.tensor(text or [0])
    made = grow(
        TableReader(text),
        tokens,
        Rules(3, 1, 3),
        Budget(),
        TOKENS,
        lambda logits: logits,
        lambda graph: graph.tokens[-1] == 0,
    )
    return made.unrolled(3)


def without_the_last_token(text):
    """The same without the token that stopped drafting, so that sampled tokens decide what is omitted."""
    draft = stopped_after_zero(text)
    return draft.cut(len(draft) - 2) if draft.tokens[-1] == 0 else draft


def with_copies(text, copies_first=False):
    """A sampled tree in which every first-layer token occurs twice: the copy is chosen, not sampled, and has its own
    sampled children.
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
    "a sampled chain": lambda text: drafted(LINE, text),
    "a sampled tree": lambda text: drafted(TWO_LEVELS, text),
    "all tokens sampled": lambda text: drafted(parse_paths("0 1 2 00 01 02"), text),
    "a sampled graph": sampled_graph,
    "a sampled chain that stops after a sampled 0": stopped_after_zero,
    "sampled and chosen siblings": lambda text: drafted(TWO_LEVELS, text, last_is_chosen=True),
    "sampled siblings, then copies": with_copies,
    "copies, then sampled siblings": lambda text: with_copies(text, copies_first=True),
}


EVERY_RUN = ("a sampled tree", "a sampled graph", "sampled and chosen siblings")


@pytest.mark.parametrize("name", thinned(DRAFTS, kept=EVERY_RUN.__contains__))
def test_outputs_have_the_targets_distribution(name):
    COPIES.clear()
    assert fits(texts(DRAFTS[name], accept_walk)) > 0.001
    assert bool(sum(COPIES)) == (name == "a sampled graph")


def test_omitting_a_token_depending_on_samples_is_not_exact():
    assert fits(texts(without_the_last_token, accept_walk)) < 1e-6


def test_sampled_draft_declared_as_chosen_is_verified_exactly():
    """Sampling once per node does not depend on the source of the tokens; it only accepts fewer."""
    made = DRAFTS["a sampled tree"]
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
def test_check_detects_a_wrong_acceptance_rule(monkeypatch, wrong):
    monkeypatch.setattr(accept, "accept_siblings", wrong)
    assert fits(texts(DRAFTS["a sampled tree"], accept_walk)) < 1e-6


@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(1, 5))
def test_residual_is_a_distribution_without_rejected_tokens(seed, size, k):
    torch.manual_seed(seed)
    p, q = torch.softmax(2 * torch.randn(size), dim=-1), torch.softmax(2 * torch.randn(size), dim=-1)
    tokens = draw(q[None], min(k, size))[0].tolist()
    place, left = accept_siblings(p, tokens, [q] * len(tokens))
    assert float(left.sum()) == pytest.approx(1, abs=1e-4)
    assert bool((left >= 0).all())
    rejected = tokens if place is None else tokens[:place]
    assert all(float(left[token]) < 1e-6 for token in rejected)


def test_token_with_probability_zero_is_refused():
    q = torch.tensor([0.0, 0.5, 0.5])
    with pytest.raises(ValueError, match="token 0"):
        accept_siblings(torch.tensor([0.6, 0.2, 0.2]), [0], [q])
    with pytest.raises(ValueError, match="token 1"):
        accept_siblings(torch.tensor([0.98, 0.01, 0.01]), [1, 1], [torch.tensor([0.0, 1.0, 0.0])] * 2)


def test_tokens_are_sampled_without_replacement_and_in_order():
    """Every pair of three tokens, compared with q(a) q(b) / (1 - q(a))."""
    torch.manual_seed(0)
    q, runs = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64), 20_000
    counts = Counter(map(tuple, draw(q.expand(runs, -1), 2).tolist()))
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    assert sum(counts[pair] for pair in pairs) == runs
    wanted = [runs * float(q[a] * q[b] / (1 - q[a])) for a, b in pairs]
    assert p_value(([counts[pair] for pair in pairs], wanted)) > 0.001


def test_three_siblings_keep_the_distribution():
    """Each was sampled without all of those before it."""
    p, q = torch.tensor([0.02, 0.68, 0.14, 0.16]), torch.tensor([0.65, 0.02, 0.03, 0.3])
    generator, counts = torch.Generator().manual_seed(0), torch.zeros(4)
    for _ in range(2000):
        tokens = draw(q[None], 3, generator)[0].tolist()
        place, left = accept_siblings(p, tokens, [q] * 3, generator)
        token = int(torch.multinomial(left, 1, generator=generator)) if place is None else tokens[place]
        counts[token] += 1
    assert p_value((counts.tolist(), (2000 * p).tolist())) > 1e-3
