"""What is measured: scenarios, each a type of numbers, a kind of text and the methods that alternate on it.

Scenarios of one type stand together, so that the model is loaded once.
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
    dtype: str
    tokens: int
    """Of a text at most, the prompt left out."""
    share: int
    """Of the time, by the sum of all shares: about the seconds that its prompts take, or half of the dearest ones."""
    temperature: float = 0.0
    from_file: bool = False
    """Whether its texts are the known answers of `--data`."""


def _of(dtype: str) -> Iterator[Scenario]:
    yield Scenario(f"written-{dtype}", "generate", dtype, 128, 400)
    for tokens, share in ((20, 80), (40, 130)):
        yield Scenario(f"written-{tokens}-tokens-{dtype}", "generate", dtype, tokens, share)
    for temperature in (0.7, 1.0):
        yield Scenario(f"sampled-{temperature}-{dtype}", "generate", dtype, 60, 200, temperature)
    yield Scenario(f"replayed-code-{dtype}", "replay", dtype, 200, 200)
    yield Scenario(f"replayed-file-{dtype}", "replay", dtype, 128, 150, from_file=True)
    yield Scenario(f"first-token-{dtype}", "first token", dtype, 8, 40)


SCENARIOS = (*_of("float32"), *_of("bfloat16"))
