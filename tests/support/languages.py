"""A language that is a table: for every text over three tokens a next-token distribution p of the target, and another
one, q, of the draft. Outputs have four tokens.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import torch
from support.chi_square import p_value

from token_recycling import Draft, Step, Template
from token_recycling.drafters._shared.graph import draw
from token_recycling.trees.templates import chain, parse_paths

TOKENS, LENGTH, RUNS = 3, 4, 600
Text = tuple[int, ...]


def table(seed: int, spread: float) -> dict[Text, torch.Tensor]:
    """Return a random distribution (3,) after every text, including the tokens that a draft may add at its end."""
    generator = torch.Generator().manual_seed(seed)
    texts = itertools.chain.from_iterable(itertools.product(range(TOKENS), repeat=n) for n in range(LENGTH + 4))
    return {text: torch.softmax(spread * torch.randn(TOKENS, generator=generator), dim=-1) for text in texts}


P, Q = table(1, 1.0), table(2, 1.5)


class LogitSampler:
    """Sample from the given logits at temperature 1."""

    generator = None

    def __call__(self, logits: torch.Tensor) -> int:
        return int(torch.multinomial(self.distribution(logits), num_samples=1))

    def distribution(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.softmax(logits, dim=-1)


TWO_LEVELS = parse_paths("0 1 00 01 10 11")
LINE = chain(2)


def drafted(tree: Template, text: Text, last_is_chosen: bool = False) -> Draft:
    """Return a draft whose children are sampled from q without replacement. With `last_is_chosen` the last child of
    every node is the most probable remaining token, and so depends on the sampled ones.
    """
    tokens, sources, paths = [text[-1] if text else 0], {}, {0: text}
    for node, children in enumerate(tree.children):
        if not children:
            continue
        q = Q[paths[node]]
        following = draw(q[None], len(children))[0].tolist()
        if last_is_chosen:
            following[-1] = max(set(range(TOKENS)) - set(following[:-1]), key=lambda token: float(q[token]))
        for child, token in zip(children, following, strict=True):
            tokens.append(token)
            paths[child] = (*paths[node], token)
            if not (last_is_chosen and child == children[-1]):
                sources[child] = q
    return Draft(tokens, tree.parents, sampled_from=sources)


def logits_at(draft: Draft, text: Text) -> torch.Tensor:
    """Return log p after the path of every node."""
    tokens = draft.tokens.tolist()
    paths = [(*text, *(tokens[node] for node in lineage[1:])) for lineage in draft.lineages]
    return torch.stack([P[path].log() for path in paths])


def texts(drafts: Callable[[Text], Draft], verify: Callable[..., Step], runs: int = RUNS) -> Counter[Text]:
    """Return the count of each output of four tokens."""
    torch.manual_seed(0)
    seen: Counter[Text] = Counter()
    for _ in range(runs):
        text: list[int] = []

        def append(token: int, text: list[int] = text) -> bool:
            text.append(token)
            return len(text) >= LENGTH

        while len(text) < LENGTH:
            before = tuple(text)
            draft = drafts(before)
            verify(draft, logits_at(draft, before), append, LogitSampler())
        seen[tuple(text)] += 1
    return seen


def fits(seen: Counter[Text]) -> float:
    """Return the p-value of the counts under the target's distribution."""
    every = list(itertools.product(range(TOKENS), repeat=LENGTH))
    odds = [float(torch.stack([P[text[:n]][text[n]] for n in range(LENGTH)]).prod()) for text in every]
    return p_value(([seen[text] for text in every], [seen.total() * one / sum(odds) for one in odds]))
