"""What is measured: scenarios, each a model, a kind of text and the methods that alternate on it.

Scenarios of one model stand together, so that it is loaded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

PLAIN, DEFAULT, GENERATE, LOOKUP = "plain", "recycling", "generate", "prompt_lookup_hf:n=10"
PARTS = ("suffix", "prompt_lookup", "recycling:tree=8", "recycling:tree=16", "recycling:tree=32")
"""What the default is made of, each alone; the default is to be as fast as the best of them."""
SIXTEEN, PUBLISHED = "recycling:tree=16", "published"
"""Trees of 16 nodes, and the published method's of 80."""
METHODS = {
    "generate": (GENERATE, LOOKUP, PLAIN, DEFAULT, *PARTS),
    "replay": (PLAIN, DEFAULT, *PARTS, PUBLISHED),
    "first token": (GENERATE, PLAIN, DEFAULT),
}
"""By mode."""


@dataclass(frozen=True)
class Scenario:
    """One thing to measure; its rows have a folder of its name."""

    name: str
    mode: Literal["generate", "replay", "first token"]
    model: Literal["shipped", "random"]
    dtype: str
    tokens: int
    """Of a text at most, the prompt left out."""
    share: int
    """Of the time, by the sum of all shares: about the seconds that its prompts take, or half of the dearest ones."""
    temperature: float = 0.0
    from_file: bool = False
    """Whether its texts are those of `--data`, not the shipped prompts."""


def _of_shipped(dtype: str) -> Iterator[Scenario]:
    yield Scenario(f"written-{dtype}", "generate", "shipped", dtype, 160, 90)
    for tokens, share in ((20, 35), (40, 55), (400, 100)):
        yield Scenario(f"written-{tokens}-tokens-{dtype}", "generate", "shipped", dtype, tokens, share)
    for temperature in (0.7, 1.0):
        yield Scenario(f"sampled-{temperature}-{dtype}", "generate", "shipped", dtype, 100, 100, temperature)
    yield Scenario(f"replayed-code-{dtype}", "replay", "shipped", dtype, 400, 140)
    yield Scenario(f"replayed-file-{dtype}", "replay", "shipped", dtype, 160, 150, from_file=True)
    yield Scenario(f"first-token-{dtype}", "first token", "shipped", dtype, 8, 20)


SCENARIOS = (
    *_of_shipped("float32"),
    *_of_shipped("bfloat16"),
    Scenario("random-sampled", "generate", "random", "bfloat16", 40, 190, temperature=1.0),
    Scenario("random-replayed", "replay", "random", "bfloat16", 80, 230),
    Scenario("random-first-token", "first token", "random", "bfloat16", 8, 100),
)
